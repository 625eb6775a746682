"""Kill a stage anywhere, run the same command again: nothing answered is asked again, no row is lost or doubled."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

QUESTIONS = 8
RULES = '[{pattern: "Question: ...q[1-4]", reply: "Output (a)"}, {pattern: "(?s).*", reply: "Output (b)"}]'
REVIEWS = (
    r'[{pattern: "verbosity[^~]*q[1-4]", reply: "It is the longer one.\n</think>\n\nYes"},'
    r' {pattern: "(?s).*", reply: "It is the right one.\n</think>\n\nNo"}]'
)
JUDGE = ["judgements", "judge=generative", "engine=scripted", f"engine.rules={RULES}"]
TEACHER = ["traces", "teacher=r1", "engine=scripted", f"engine.rules={REVIEWS}"]
DISCOVER = ["discover", "source.items=120", "shares=[0.5,0.3,0.1,0.1]", "max_iterations=2"]
SLOW = "engine.delay_s=0.03"  # the same in every run: it is part of the command
EMBEDDED = ["judgements", "judge=embedded", "engine.batch_size=4"]


def command(root: Path, words: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "rbd_train.app", *words, f"root={root}"]


def run(root: Path, words: Sequence[str]) -> None:
    done = subprocess.run(command(root, words), capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode == 0, done.stderr


def stored(root: Path) -> dict[str, tuple[str, float]]:
    """Return the ledger's rows: a reply asked again would have another time."""
    path = root / "ledger.sqlite"
    if not path.is_file():
        return {}
    with sqlite3.connect(path) as db:
        if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'replies'").fetchone():
            return {}
        return {key: (reply, at) for key, reply, at in db.execute("SELECT key, reply, seconds FROM replies")}


def kill_at(root: Path, words: Sequence[str], rows: int) -> dict[str, tuple[str, float]]:
    """Run a command, kill it as soon as the ledger holds so many rows, and return what the ledger holds then."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command(root, words), cwd=root, **quiet)  # type: ignore[call-overload]
    deadline = time.monotonic() + 240
    while len(stored(root)) < rows:
        assert process.poll() is None, "the command ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    return stored(root)


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    """Two roots with the same pairs."""
    source = tmp_path / "questions.jsonl"
    source.write_text(
        "".join(
            f'{{"id": "q{k}", "question": "q{k}: what is {k} + 1?", "right": "{k} and 1 are\\n{k + 1}", '
            f'"wrong": "{k} and 1 are surely\\n{k + 2}"}}\n'
            for k in range(QUESTIONS)
        )
    )
    made = tmp_path / "killed", tmp_path / "undisturbed"
    for root in made:
        root.mkdir()
        run(root, ["pairs", "source=jsonl", f"source.path={source}", "bias=[verbosity,position]"])
    return made


def resumed_equals_undisturbed(
    roots: tuple[Path, Path], words: Sequence[str], kills: Sequence[int], files: Sequence[str]
) -> None:
    killed, undisturbed = roots
    stage = words[0]
    kept: dict[str, tuple[str, float]] = {}
    for rows in kills:
        after = kill_at(killed, words, len(kept) + rows)
        assert kept.items() <= after.items()
        assert not (killed / "default" / stage / files[0]).exists()
        kept = after
    run(killed, words)
    run(undisturbed, words)
    whole = stored(killed)
    assert len(kept) < len(whole), "the kills came too late to prove anything"
    assert kept.items() <= whole.items()  # same reply, same time: nothing was asked again
    assert {key: reply for key, (reply, _) in whole.items()} == {k: r for k, (r, _) in stored(undisturbed).items()}
    for file in files:
        left, right = (root / "default" / stage / file for root in roots)
        assert left.read_bytes() == right.read_bytes() and left.stat().st_size > 0


def test_judgements_killed_twice(roots: tuple[Path, Path]) -> None:
    resumed_equals_undisturbed(roots, [*JUDGE, SLOW], (3, 9), ("records.jsonl", "cases.jsonl"))


def test_traces_killed_twice(roots: tuple[Path, Path]) -> None:
    for root in roots:
        run(root, JUDGE)
    before = len(stored(roots[0]))
    resumed_equals_undisturbed(roots, [*TEACHER, SLOW], (before + 2, 7), ("traces.jsonl",))


def test_discovery_killed_twice(tmp_path: Path) -> None:
    roots = tmp_path / "killed", tmp_path / "undisturbed"
    for root in roots:
        root.mkdir()
    files = ("library.jsonl", "candidates.jsonl", "probes.jsonl", "parts.jsonl", "tables.json")
    resumed_equals_undisturbed(roots, DISCOVER, (60, 150), files)


def test_a_killed_stage_is_refused_by_the_next(roots: tuple[Path, Path]) -> None:
    kill_at(roots[0], [*JUDGE, SLOW], 2)
    next_stage = subprocess.run(command(roots[0], TEACHER), capture_output=True, text=True, check=False)
    assert next_stage.returncode == 1 and "judgements" in next_stage.stderr


def test_the_same_seed_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    made: list[bytes] = []
    for root in (tmp_path / "one", tmp_path / "two"):
        root.mkdir()
        run(root, ["pairs", "source.train=6", "source.test=4", "seed=3"])
        run(root, [*JUDGE, "seed=3"])
        made.append(b"".join((root / "default" / file).read_bytes() for file in (
            "pairs/pairs.jsonl", "judgements/records.jsonl", "judgements/cases.jsonl")))  # fmt: skip
    assert made[0] == made[1] and made[0].count(b"\n") > 20


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_embedded_judge_killed_in_the_middle(roots: tuple[Path, Path]) -> None:
    resumed_equals_undisturbed(roots, EMBEDDED, (4,), ("records.jsonl", "cases.jsonl"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_embedded_teacher_killed_in_the_middle(roots: tuple[Path, Path]) -> None:
    for root in roots:
        run(root, JUDGE)
    before = len(stored(roots[0]))
    words = ["traces", "teacher=r1", "engine=embedded", "engine.batch_size=4", "teacher.max_new_tokens=32"]
    resumed_equals_undisturbed(roots, words, (before + 4,), ("traces.jsonl",))
