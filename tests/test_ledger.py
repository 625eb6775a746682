"""The ledger: committed before use, final is final, safe for several processes, plain when it is damaged."""

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rbd_train.cost import Cost, at_most
from rbd_train.engine import Engine
from rbd_train.engines.function import FunctionBackend, function_judge
from rbd_train.errors import DataError, IncompleteError, UsageError
from rbd_train.exchange import Completion, Reply, Request, Sampling
from rbd_train.ledger import Ledger

SHORT = Sampling(max_new_tokens=8)


def asking(*texts: str) -> list[Any]:
    return [[{"role": "user", "content": text}] for text in texts]


class Counted:
    """A function that notes what it was asked, and answers as told."""

    def __init__(self, answers: dict[str, str] | None = None) -> None:
        self.asked: list[str] = []
        self.answers = answers or {}

    def __call__(self, messages: Any) -> str:
        self.asked.append(messages[-1]["content"])
        return self.answers.get(self.asked[-1], f"reply to {self.asked[-1]}")


class Replies:
    """A backend that hands over replies of a scripted status."""

    def __init__(self, *statuses: str) -> None:
        self.identity: dict[str, Any] = {"engine": "test"}
        self.statuses = list(statuses)

    def run(self, requests: Sequence[Request], missing: frozenset[int], commit: Callable[[int, Reply], None]) -> None:
        for index in sorted(missing):
            status: Any = self.statuses.pop(0)
            commit(index, Completion(status=status, text="text" if status == "ok" else ""))

    def close(self) -> None:
        pass


def row(ledger: Ledger, key: str) -> tuple[str, bool, int]:
    return tuple(ledger.replies([key])[key])  # type: ignore[return-value]


def test_a_reply_is_committed_before_the_next_is_asked(tmp_path: Path) -> None:
    """Another connection sees each reply as soon as the next call is made, so a kill loses only what is in flight."""
    path = tmp_path / "l.sqlite"
    other: list[int] = []

    def reply(messages: Any) -> str:
        other.append(sqlite3.connect(path).execute("SELECT count(*) FROM replies").fetchone()[0])
        return "fine"

    Engine(FunctionBackend(reply, "f"), Ledger(path)).generate(asking("a", "b", "c"), SHORT)
    assert other == [0, 1, 2]


def test_what_fails_in_the_middle_keeps_what_was_answered(tmp_path: Path) -> None:
    path = tmp_path / "l.sqlite"
    function = Counted()

    def broken(messages: Any) -> str:
        if messages[-1]["content"] == "c":
            raise RuntimeError("power cut")
        return function(messages)

    with pytest.raises(RuntimeError, match="power cut"):
        Engine(FunctionBackend(broken, "f"), Ledger(path)).generate(asking("a", "b", "c", "d"), SHORT)
    replies = Engine(FunctionBackend(function, "f"), Ledger(path)).generate(asking("a", "b", "c", "d"), SHORT)
    assert function.asked == ["a", "b", "c", "d"]
    assert [reply.text for reply in replies] == [f"reply to {text}" for text in "abcd"]


@pytest.mark.parametrize("status", ["ok", "length", "content_filter", "bad_request"])
def test_a_final_reply_is_never_replaced_nor_asked_again(tmp_path: Path, status: str) -> None:
    ledger = Ledger(tmp_path / "l.sqlite")
    backend = Replies(status)
    for _ in range(2):
        (reply,) = Engine(backend, ledger).generate(asking("q"), SHORT)
        assert reply.status == status
    ledger.commit("k", "first", {}, final=True)
    ledger.commit("k", "second", {}, final=True)
    ledger.commit("k", "third", {}, final=False)
    assert row(ledger, "k") == ("first", True, 1)


@pytest.mark.parametrize("status", ["empty", "timeout", "server_error"])
def test_a_failure_is_asked_again_and_becomes_final(tmp_path: Path, status: str) -> None:
    """Once ok it is ok (B23); failing on, it ends after `attempts` over all runs (A26)."""
    ledger = Ledger(tmp_path / "l.sqlite")
    backend = Replies(status, "ok", status, status, status)
    with pytest.raises(IncompleteError, match=f"1 of 1 calls have no final answer yet .{status}: 1"):
        Engine(backend, ledger, attempts=3).generate(asking("q"), SHORT)
    assert Engine(backend, ledger, attempts=3).generate(asking("q"), SHORT)[0].text == "text"
    for _ in range(2):
        with pytest.raises(IncompleteError):
            Engine(backend, ledger, attempts=3).generate(asking("never"), SHORT)
    for _ in range(2):  # the third failure is the last; the run after it asks nothing
        (reply,) = Engine(backend, ledger, attempts=3).generate(asking("never"), SHORT)
        assert (reply.status, reply.text) == (status, "")
    assert backend.statuses == []


def test_attempts_are_counted(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.sqlite")
    for number, final in enumerate((False, False, True), start=1):
        ledger.commit("k", f"reply {number}", {}, final)
        assert row(ledger, "k") == (f"reply {number}", final, number)


def test_unfinished_calls_are_counted_by_reason(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.sqlite")
    ledger.commit("a", Completion(status="timeout").model_dump_json(), {}, final=False)
    ledger.commit("b", Completion(status="timeout").model_dump_json(), {}, final=False)
    assert ledger.reasons(["a", "b", "c"]) == "no answer: 1, timeout: 2"


def test_more_keys_than_a_query_takes(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.sqlite")
    ledger._db.execute("PRAGMA synchronous=OFF")  # 1,201 commits to disk would take the test's time
    keys = [f"k{number}" for number in range(1201)]
    for key in keys:
        ledger.commit(key, key, {}, final=True)
    assert {key: stored.reply for key, stored in ledger.replies(keys).items()} == {key: key for key in keys}


WRITER = """
import sys
from pathlib import Path
from rbd_train.ledger import Ledger
print("ready", flush=True)
sys.stdin.readline()
ledger = Ledger(Path(sys.argv[1]))
for number in range(40):
    ledger.commit(f"{sys.argv[2]}-{number}", "reply", {}, True)
    ledger.commit(f"shared-{number}", sys.argv[2], {}, False)
"""


def test_processes_that_open_and_write_at_once(tmp_path: Path) -> None:
    path = tmp_path / "l.sqlite"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    workers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), f"w{k}"], text=True, **pipes) for k in range(4)
    ]
    for worker in workers:
        worker.stdout.readline()
    for worker in workers:
        worker.stdin.write("\n")
        worker.stdin.flush()
    faults = [worker.communicate(timeout=60)[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0, 0, 0], faults
    ledger = Ledger(path)
    own = ledger.replies([f"w{k}-{number}" for k in range(4) for number in range(40)])
    assert len(own) == 160
    assert [row(ledger, f"shared-{number}")[2] for number in range(40)] == [4] * 40


def damage_header(path: Path) -> None:
    path.write_bytes(b"not a data base, whatever it is called\n" * 200)


def damage_middle(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[8192:] = b"\xff" * (len(data) - 8192)
    path.write_bytes(data)


def damage_cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:9000])


def other_table(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE replies (something TEXT)")


@pytest.mark.parametrize("harm", [damage_header, damage_middle, damage_cut, other_table])
def test_a_damaged_file_is_a_plain_error_with_the_way_out(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    path = tmp_path / "l.sqlite"
    texts = [f"q{number}" for number in range(60)]
    engine = Engine(FunctionBackend(lambda messages: "long " * 100, "f"), Ledger(path))
    engine.ledger._db.execute("PRAGMA synchronous=OFF")
    engine.generate(asking(*texts), SHORT)
    engine.ledger.close()
    harm(path)
    with pytest.raises(DataError, match=r"l\.sqlite: can't be .*; move it away to start a new one"):
        Engine(FunctionBackend(Counted(), "f"), Ledger(path)).generate(asking(*texts, "new"), SHORT)


def test_damage_met_while_writing_is_a_plain_error_too(tmp_path: Path) -> None:
    path = tmp_path / "l.sqlite"
    ledger = Ledger(path)
    ledger.commit("k", "reply", {}, True)
    ledger.close()
    data = path.read_bytes()
    path.write_bytes(data[:4096] + b"\xff" * 4096 + data[8192:])
    ledger = Ledger(path)
    with pytest.raises(DataError, match="move it away"):
        ledger.commit("k2", "reply", {}, True)


def test_a_torn_tail_costs_only_the_last_reply(tmp_path: Path) -> None:
    """B22: the write in flight at a kill is dropped, the rows before it are kept, and only the rest is asked."""
    path, torn = tmp_path / "l.sqlite", tmp_path / "torn" / "l.sqlite"
    engine = Engine(FunctionBackend(Counted(), "f"), Ledger(path))
    engine.generate(asking("1", "2", "3"), SHORT)
    torn.parent.mkdir()
    shutil.copy(path, torn)
    log = (tmp_path / "l.sqlite-wal").read_bytes()  # still open: this is what a kill leaves
    torn.with_name("l.sqlite-wal").write_bytes(log[:-100])
    function = Counted()
    replies = Engine(FunctionBackend(function, "f"), Ledger(torn)).generate(asking("1", "2", "3", "4"), SHORT)
    assert function.asked == ["3", "4"]
    assert [reply.text for reply in replies] == [f"reply to {number}" for number in "1234"]
    assert sqlite3.connect(torn).execute("SELECT count(*) FROM replies").fetchone() == (4,)


BASE = Request([{"role": "user", "content": "q"}], SHORT)
CHANGES: dict[str, tuple[Any, Request]] = {
    "engine": ("other prompt template", BASE),
    "messages": (None, Request([{"role": "user", "content": "q "}], SHORT)),
    "role": (None, Request([{"role": "system", "content": "q"}], SHORT)),
    "turns": (None, Request([*BASE.messages, *BASE.messages], SHORT)),
    "tokens": (None, Request(BASE.messages, Sampling(max_new_tokens=9))),
    "temperature": (None, Request(BASE.messages, Sampling(max_new_tokens=8, temperature=0.1))),
    "top_p": (None, Request(BASE.messages, Sampling(max_new_tokens=8, top_p=0.9))),
    "sample": (None, Request(BASE.messages, Sampling(max_new_tokens=8, sample=1))),
    "watch": (None, Request(BASE.messages, Sampling(max_new_tokens=8, watch=("Yes",)))),
    "choices": (None, Request(BASE.messages, None, ("a", "b"))),
    "choice order": (None, Request(BASE.messages, None, ("b", "a"))),
}


def test_the_key_changes_with_whatever_changes_the_reply(tmp_path: Path) -> None:
    """A27: another model, prompt, setting or list of choices never reuses a stored reply."""
    ledger = Ledger(tmp_path / "l.sqlite")

    def key(identity: Any, request: Request) -> str:
        return Engine(FunctionBackend(Counted(), "f", identity), ledger)._key(request)

    assert key(None, BASE) == key(None, Request([{"content": "q", "role": "user"}], SHORT))
    keys = {name: key(*change) for name, change in CHANGES.items()} | {"base": key(None, BASE)}
    assert len(set(keys.values())) == len(keys)


def test_every_reply_says_who_made_it(tmp_path: Path) -> None:
    path = tmp_path / "l.sqlite"
    Engine(FunctionBackend(Counted(), "my judge", 7), Ledger(path)).generate(asking("q"), SHORT)
    (said,) = sqlite3.connect(path).execute("SELECT provenance FROM replies").fetchone()
    assert said == '{"engine":"function","identity":7,"model":"my judge"}'


def test_both_kinds_of_reply_come_back_as_they_were(tmp_path: Path) -> None:
    engine = Engine(FunctionBackend(Counted(), "f"), Ledger(tmp_path / "l.sqlite"))
    texts, scores = engine.generate(asking("q"), SHORT), engine.choice_logprobs(asking("q"), [("x", "y")])
    assert engine.generate(asking("q"), SHORT) == texts
    assert engine.choice_logprobs(asking("q"), [("x", "y")]) == scores
    assert engine.calls["asked"] == 2 and engine.calls["from_ledger"] == 2


def test_a_damaged_reply_names_the_ledger_and_the_way_out(tmp_path: Path) -> None:
    backend = FunctionBackend(lambda messages: "Output (a)", "f", "1")
    prompt: Any = [[{"role": "user", "content": "q"}]]
    with Engine(backend, Ledger(tmp_path / "ledger.sqlite")) as engine:
        engine.generate(prompt, Sampling(max_new_tokens=4))
    with sqlite3.connect(tmp_path / "ledger.sqlite") as db:
        db.execute("update replies set reply = substr(reply, 1, 40)")
    with Engine(backend, Ledger(tmp_path / "ledger.sqlite")) as engine, pytest.raises(DataError, match="is damaged"):
        engine.generate(prompt, Sampling(max_new_tokens=4))


def test_an_interrupt_leaves_the_calls_that_it_cut_off_to_be_counted(tmp_path: Path) -> None:
    """A fault does not: the backend has waited for what was under way."""
    for stop, asked_again in ((KeyboardInterrupt, 1), (RuntimeError, 0)):
        ledger = Ledger(tmp_path / f"{stop.__name__}.sqlite")

        def cut_off(messages: Any, stop: type[BaseException] = stop) -> str:
            raise stop

        with pytest.raises(stop):
            Engine(FunctionBackend(cut_off, "f"), ledger).generate(asking("a", "b"), SHORT)
        again = Engine(FunctionBackend(Counted(), "f"), ledger)
        again.generate(asking("a", "b"), SHORT)
        assert again.calls["asked_again"] == asked_again


def test_workers_share_what_all_of_them_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each looks into the ledger at another moment: what is missing then must not decide who asks what."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    requests = [Request(messages, SHORT) for messages in asking(*"abcd")]
    shares = []
    for rank, missing in ((0, {0, 1, 2, 3}), (1, {1, 2, 3})):  # the second one looks after 0 was answered
        monkeypatch.setenv("RANK", str(rank))
        engine = Engine(FunctionBackend(Counted(), "f"), Ledger(tmp_path / "l.sqlite"))
        shares.append(engine._share(requests, frozenset(missing)))
    assert shares == [{0, 2}, {1, 3}]
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="start it on one machine"):
        engine._share(requests, frozenset({0}))


def test_a_worker_without_a_share_waits_for_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    engines = [Engine(FunctionBackend(Counted(), "f"), Ledger(tmp_path / "l.sqlite")) for _ in range(2)]

    def answer(_: float) -> None:
        monkeypatch.setenv("RANK", "0")
        engines[0].generate(asking("a"), SHORT)

    monkeypatch.setattr("rbd_train.engine.time.sleep", answer)
    monkeypatch.setenv("RANK", "1")
    assert engines[1].generate(asking("a"), SHORT)[0].text == "reply to a"
    assert engines[1].calls["asked"] == 1, "the other's call is part of the count"


def test_a_worker_whose_call_has_no_answer_ends_and_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    backend: Any = Replies("timeout")
    backend.together = lambda requests: [[index] for index in range(len(requests))]
    with pytest.raises(IncompleteError, match="timeout: 1"):
        Engine(backend, Ledger(tmp_path / "l.sqlite")).generate(asking("a", "b"), SHORT)


def test_failed_calls_are_paid_for_in_the_next_run_too(tmp_path: Path) -> None:
    """A call that ran out of time here goes on there; two of them cost twice."""
    spent = []
    for statuses in (("timeout",), ("timeout",), ("ok",)):
        cost = Cost(1e6, 1e6)
        engine = Engine(Replies(*statuses), Ledger(tmp_path / "l.sqlite"), cost=cost)  # type: ignore[arg-type]
        with contextlib.suppress(IncompleteError):
            engine.generate(asking("a"), SHORT)
        spent.append(cost.usd)
    one = sum(at_most(Request(asking("a")[0], SHORT)))
    assert spent == [one, 2 * one, 3 * one]


def test_other_code_under_the_same_name_asks_again(tmp_path: Path) -> None:
    """Also where it differs in the names that it calls alone, or inside an inner function."""

    def old(messages: Any) -> str:
        return "old"

    def new(messages: Any) -> str:
        return "new"

    inner = [lambda m: next(old(m) for _ in "x"), lambda m: next(new(m) for _ in "x")]
    for first, second in ((lambda m: old(m), lambda m: new(m)), inner):
        ledger = Ledger(tmp_path / "l.sqlite")
        keys = [function_judge(one, ledger, "j").engine.identity["identity"] for one in (first, second)]
        assert keys[0] != keys[1]


def test_a_functions_identity_is_the_same_in_every_process(tmp_path: Path) -> None:
    """CPython keeps `in {...}` as a frozenset, whose order follows the process's hash seed."""
    code = (
        "from rbd_train.engines.function import _code\n"
        "f = lambda m: 'a' if m in {'yes', 'no', 'perhaps', 'never'} else 'b'\n"
        "print(_code(f.__code__))"
    )
    said = {
        subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True,
                       text=True, check=True).stdout
        for seed in "123"
    }  # fmt: skip
    assert len(said) == 1 and "perhaps" in said.pop()


def test_a_function_that_returns_nothing_gives_an_empty_reply(tmp_path: Path) -> None:
    """Many clients say None for a refusal."""
    engine = Engine(FunctionBackend(lambda m: None, "f"), Ledger(tmp_path / "l.sqlite"), attempts=1)  # type: ignore[arg-type,return-value]
    assert engine.generate(asking("a"), SHORT)[0].status == "empty"
    other = Engine(FunctionBackend(lambda m: 4, "g"), Ledger(tmp_path / "l.sqlite"), attempts=1)  # type: ignore[arg-type,return-value]
    with pytest.raises(UsageError, match="the function 'g' returned 4"):
        other.generate(asking("a"), SHORT)
