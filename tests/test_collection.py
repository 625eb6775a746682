"""Whole runs against the shipped fake server: faults, kills, budgets, several servers, and what a rehearsal tells."""

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rbd_train.engines.fake_server import FINAL
from rbd_train.records import BiasRecord
from rbd_train.store import read_rows


class Fake(NamedTuple):
    """A running fake server."""

    url: str
    process: "subprocess.Popen[str]"

    def stats(self) -> dict[str, Any]:
        with urllib.request.urlopen(self.url.replace("/v1", "/stats")) as answer:
            return dict(json.load(answer))


@pytest.fixture
def fake() -> Iterator[Callable[..., Fake]]:
    """Start fake servers in processes of their own."""
    started: list[Fake] = []

    def start(faults: float = 0.0, **settings: Any) -> Fake:
        words = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        command = [sys.executable, "-m", "rbd_train.engines.fake_server", "--port=0", f"--faults={faults}", *words]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        started.append(Fake(process.stdout.readline().strip(), process))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()


def make_pairs(root: Path, questions: int) -> None:
    """Leave pairs whose judgements take four calls per question."""
    root.mkdir(exist_ok=True)
    source = root / "questions.jsonl"
    source.write_text(
        "".join(
            f'{{"id": "q{k}", "question": "q{k}: what is {k} + 1?", "right": "{k} and 1 are\\n{k + 1}", '
            f'"wrong": "{k} and 1 are surely\\n{k + 2}"}}\n'
            for k in range(questions)
        )
    )
    assert run(root, ["pairs", "source=jsonl", f"source.path={source}", "bias=[verbosity]"]).returncode == 0


def judging(url: str, *words: str) -> list[str]:
    """Return the command of a judgement over HTTP that retries without long pauses."""
    return [
        "judgements", "judge=generative", "engine.model=m", f"engine.base_url={url}", "engine.provider=fake",
        "engine.api_key_env=null", "engine.backoff_s=0.02", *words,
    ]  # fmt: skip


def run(root: Path, words: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "rbd_train.app", *words, f"root={root}"]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)


def stored(root: Path) -> int:
    if not (root / "ledger.sqlite").is_file():
        return 0
    with sqlite3.connect(root / "ledger.sqlite", timeout=60) as db:
        known = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'replies'").fetchone()
        return int(db.execute("SELECT count(*) FROM replies").fetchone()[0]) if known else 0


def kill_at(root: Path, words: Sequence[str], rows: int) -> None:
    """Run a command and kill it once the ledger holds so many rows."""
    quiet = subprocess.DEVNULL
    command = [sys.executable, "-m", "rbd_train.app", *words, f"root={root}"]
    process = subprocess.Popen(command, cwd=root, stdout=quiet, stderr=quiet)
    while stored(root) < rows:
        assert process.poll() is None, "the command ended before it could be killed"
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def killed_equals_undisturbed(tmp_path: Path, fake: Callable[..., Fake], questions: int, kills: int) -> None:
    """Kill at random moments under faults, and compare with a run that nobody disturbed, by bytes and by calls."""
    concurrency, calls = 16, 4 * questions
    quick = {"faults": 0.2, "slow_s": 0.3, "retry_after_s": 0.05, "delay_s": 0.005}
    roots = tmp_path / "killed", tmp_path / "undisturbed"
    moments = sorted(random.Random(5).sample(range(1, calls - 2 * concurrency), kills))
    counted = []
    for root, times in zip(roots, (moments, []), strict=True):
        make_pairs(root, questions)
        server = fake(**quick)
        words = judging(server.url, f"engine.concurrency={concurrency}")
        for rows in times:
            kill_at(root, words, max(rows, stored(root) + 1))
            assert not (root / "default/judgements/records.jsonl").exists()
        last = run(root, words)
        assert last.returncode == 0, last.stderr
        counted.append(server.stats())
    records = [root / "default/judgements/records.jsonl" for root in roots]
    assert records[0].read_bytes() == records[1].read_bytes()
    ids = [record.id for record in read_rows(records[0], BiasRecord)]
    assert len(ids) == len(set(ids)) == 2 * questions
    manifest = json.loads((roots[0] / "default/judgements/manifest.json").read_text())
    tables = json.loads((roots[0] / "default/judgements/tables.json").read_text())
    axes = next(table for table in tables if table["name"] == "judgements_rows")["rows"]
    assert (
        sum(row[2] for row in axes if row[0] == "server") == sum(row[2] for row in axes if row[0] == "reply") == calls
    )
    assert {row[1] for row in axes if row[0] == "server"} >= ({"ok", *FINAL} if calls > 1000 else {"ok"})
    # the promise: what is asked again was in flight at a kill; the server counts it, and the last run says its share
    assert counted[1]["asked_again"] == 0 and counted[1]["contents"] == counted[0]["contents"] == calls
    assert 0 <= counted[0]["asked_again"] <= kills * concurrency
    assert 0 < manifest["facts"]["calls"]["asked_again"] <= concurrency
    print(f"{calls} calls, {kills} kills, asked again {counted[0]['asked_again']}, sent {counted[0]['sent']}")


@pytest.mark.timeout(200)
def test_killed_twice_under_faults(tmp_path: Path, fake: Callable[..., Fake]) -> None:
    killed_equals_undisturbed(tmp_path, fake, questions=60, kills=2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_calls_killed_ten_times_under_faults(tmp_path: Path, fake: Callable[..., Fake]) -> None:
    killed_equals_undisturbed(tmp_path, fake, questions=2500, kills=10)
