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

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rbd_train.engines.fake_server import FINAL, IN_A_ROW, PASSING, FakeServer
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


# the fake server itself -----------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.text(max_size=8), st.integers(0, 3), st.floats(0, 1))
def test_the_schedule_is_a_function_of_content_and_attempt(content: str, seed: int, faults: float) -> None:
    first, second = (FakeServer(faults=faults, seed=seed) for _ in range(2))
    plans = [first.plan(content, attempt) for attempt in range(IN_A_ROW + 3)]
    assert plans == [second.plan(content, attempt) for attempt in range(IN_A_ROW + 3)]
    assert not set(plans[IN_A_ROW:]) & set(PASSING)  # what passes has passed
    assert plans[0] not in FINAL or set(plans) == {plans[0]}  # what is final is so at every attempt
    assert faults > 0 or set(plans) == {"ok"}


def test_a_fifth_fails_and_every_kind_occurs() -> None:
    server = FakeServer(faults=0.2)
    plans = [server.plan(f"c{k}", 0) for k in range(4000)]
    assert 0.17 < sum(plan != "ok" for plan in plans) / 4000 < 0.23
    assert set(plans) == {"ok", *FINAL, *PASSING}


@pytest.mark.parametrize("place", ["reasoning", "reasoning_content", "tags"])
def test_a_real_client_reads_reasoning_and_log_probabilities(fake: Callable[..., Fake], place: str) -> None:
    client = openai.OpenAI(base_url=fake(reasoning=place, delay_s=0).url, api_key="none", max_retries=0)
    prompt: Any = [{"role": "user", "content": "Think, then answer Yes or No."}]
    answer = client.chat.completions.create(model="m", messages=prompt, logprobs=True, top_logprobs=20)
    message = answer.choices[0].message
    assert message.content is not None and answer.usage is not None and answer.usage.completion_tokens > 0
    verdict = message.content.rpartition("</think>")[2].strip()
    assert verdict in ("Yes", "No") and (place == "tags") == message.content.startswith("<think>")
    assert place == "tags" or "I look at" in (message.model_extra or {})[place]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    tops = {top.token: top.logprob for top in logprobs.content[0].top_logprobs}
    assert {"Yes", "No"} < set(tops) and max(tops, key=lambda token: tops[token]) == verdict
    assert [model.id for model in client.models.list()] == ["fake"]


def test_a_dry_run_tells_and_asks_nothing(tmp_path: Path, fake: Callable[..., Fake]) -> None:
    make_pairs(tmp_path, 3)
    server = fake(delay_s=0)
    words = judging(server.url, "engine.price_in=1", "engine.price_out=2")
    told = run(tmp_path, [*words, "dry_run=true"])
    assert told.returncode == 0, told.stderr
    assert "dry run of judgements: 12 calls, about " in told.stdout and "US$ " in told.stdout
    assert server.stats()["requests"] == 0 and not (tmp_path / "default/judgements").exists()
    assert run(tmp_path, words).returncode == 0
    before = (tmp_path / "default/judgements/manifest.json").read_bytes()
    again = run(tmp_path, [*words, "dry_run=true", "judge.max_new_tokens=64"])
    assert "no call: every reply is in the ledger" in again.stdout, again.stdout + again.stderr
    assert (tmp_path / "default/judgements/manifest.json").read_bytes() == before


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["local", "http"])
def test_two_workers_give_the_records_of_one(tmp_path: Path, fake: Callable[..., Fake], engine: str) -> None:
    """Each asks its share, no process group is needed, and every call is made once."""
    server = fake(delay_s=0)
    words = judging(server.url) if engine == "http" else ["judgements", "judge=embedded", "judge.engine.model=tiny"]
    roots = tmp_path / "one", tmp_path / "two"
    for root, more in zip(roots, ([], ["launch=ddp", "processes=2"]), strict=True):
        make_pairs(root, 5)
        done = run(root, [*words, *more])
        assert done.returncode == 0, done.stderr
    one, two = (root / "default/judgements" for root in roots)
    assert (one / "records.jsonl").read_bytes() == (two / "records.jsonl").read_bytes()
    assert json.loads((two / "manifest.json").read_text())["world_size"] == 2
    if engine == "http":
        assert server.stats()["requests"] == 40 and server.stats()["asked_again"] == 20


def test_two_workers_on_a_quick_engine_end(tmp_path: Path) -> None:
    """Nothing slow stands between looking into the ledger and answering: one looks after the other has answered."""
    make_pairs(tmp_path, 5)
    words = [
        "judgements", "judge=generative", "engine=scripted",
        "engine.rules=[{pattern: '.', reply: 'Output (a)'}]", "judge.engine.delay_s=0.02", "sham=true",
    ]  # fmt: skip
    done = run(tmp_path, [*words, "launch=ddp", "processes=2"])
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "default/judgements/manifest.json").read_text())
    assert manifest["world_size"] == 2 and manifest["facts"]["calls"]["asked_again"] == 0
    calls = manifest["facts"]["calls"]
    assert calls["asked"] + calls["from_ledger"] == stored(tmp_path), "the others' calls are counted too"
