"""The HTTP engine against a scripted OpenAI-compatible server on the loopback device."""

import asyncio
import email.utils
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rbd_train.detector import EngineDetector
from rbd_train.engine import Engine
from rbd_train.engines.http import HttpEngine
from rbd_train.engines.pace import Server as Places
from rbd_train.engines.wire import retry_after
from rbd_train.errors import DataError, IncompleteError, UsageError
from rbd_train.exchange import Sampling
from rbd_train.ledger import Ledger
from rbd_train.prompts.detect import read_trace
from rbd_train.records import Case, Definition, View

SHORT = Sampling(max_new_tokens=8)


class Answer(NamedTuple):
    """One scripted answer; it is held back until `wait` is set, sets `tell`, and `last` takes the server down."""

    code: int = 200
    body: Any = None
    headers: dict[str, str] = {}
    wait: threading.Event | None = None
    tell: threading.Event | None = None
    last: bool = False


def said(content: str | None, finish: str = "stop", logprobs: Any = None, **extra: Any) -> Answer:
    message = {"role": "assistant", "content": content, **extra}
    choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": logprobs}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    return Answer(200, {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice],
                        "usage": usage})  # fmt: skip


def fault(code: int, text: str = "no", headers: dict[str, str] | None = None, name: str | None = None) -> Answer:
    return Answer(code, {"error": {"message": text, "code": name}}, headers or {})


class Server:
    """Answers by prompt: `script[prompt]` is worked off, its last answer repeats; without a script, echoes."""

    def __init__(self, port: int = 0) -> None:
        outer = self
        self.script: dict[str, list[Answer]] = {}
        self.bodies: list[dict[str, Any]] = []
        self.lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                prompt = body["messages"][-1]["content"]
                with outer.lock:
                    outer.bodies.append(body)
                    answers = outer.script.get(prompt) or [said(f"reply to {prompt}")]
                    answer = answers.pop(0) if len(answers) > 1 else answers[0]
                if answer.wait is not None:
                    answer.wait.wait(30)
                if answer.last:
                    outer.stop()
                data = answer.body.encode() if isinstance(answer.body, str) else json.dumps(answer.body).encode()
                try:
                    self.send_response(answer.code)
                    for name, value in {"content-type": "application/json", **answer.headers}.items():
                        self.send_header(name, value)
                    self.send_header("content-length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:  # the client gave up waiting
                    pass
                if answer.tell is not None:
                    answer.tell.set()

            def log_message(self, *_: Any) -> None:
                pass

        class Quick(ThreadingHTTPServer):
            daemon_threads, block_on_close, request_queue_size = True, False, 64

        self.http = Quick(("127.0.0.1", port), Handler)
        self.port = self.http.server_address[1]
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def asked(self) -> list[str]:
        return [body["messages"][-1]["content"] for body in self.bodies]

    def stop(self) -> None:
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    for answers in made.script.values():
        for answer in answers:
            if answer.wait is not None:
                answer.wait.set()
    made.stop()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the pauses instead of making them."""
    recorded: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float, result: Any = None) -> Any:
        if seconds:
            recorded.append(seconds)
        return await sleep(0, result)

    monkeypatch.setattr(asyncio, "sleep", noted)
    return recorded


Opener = Callable[..., Engine]


@pytest.fixture
def open_engine(server: Server, waits: list[float], tmp_path: Path) -> Opener:
    def opened(**settings: Any) -> Engine:
        base = f"http://127.0.0.1:{server.port}/v1"
        given = {"model": "m", "base_url": base, "api_key_env": None, "timeout_s": 20.0, **settings}
        return HttpEngine(**given).open(Ledger(tmp_path / "ledger.sqlite"))

    return opened


def asking(*texts: str) -> list[Any]:
    return [[{"role": "user", "content": text}] for text in texts]


def attempts(path: Path) -> list[int]:
    return [row[0] for row in Ledger(path)._db.execute("SELECT attempts FROM replies ORDER BY attempts")]


@pytest.mark.parametrize(
    ("headers", "least"),
    [({"retry-after": "7"}, 7.0), ({"retry-after-ms": "2500"}, 2.5), ({"retry-after": "Wed, 01 Jan 2031"}, 1.0)],
)
def test_429_waits_as_long_as_the_server_asks(
    server: Server, open_engine: Opener, waits: list[float], tmp_path: Path, headers: dict[str, str], least: float
) -> None:
    server.script["q"] = [fault(429, headers=headers), said("fine")]  # B19
    (reply,) = open_engine().generate(asking("q"), SHORT)
    assert reply.text == "fine" and server.asked == ["q", "q"]
    assert len(waits) == 1 and waits[0] >= least
    assert attempts(tmp_path / "ledger.sqlite") == [1], "a server that takes no calls is no attempt"


def test_pauses_grow_and_are_capped(server: Server, open_engine: Opener, waits: list[float]) -> None:
    server.script["q"] = [fault(500)]
    open_engine(attempts=9).generate(asking("q"), SHORT)
    assert len(waits) == 8
    assert all(min(2**k, 60) <= pause <= 1.5 * min(2**k, 60) for k, pause in enumerate(waits))


def test_a_filtered_item_is_final_and_the_others_go_on(server: Server, open_engine: Opener) -> None:
    server.script["two"] = [fault(400, "blocked", name="content_filter")]  # B20, A23
    replies = open_engine().generate(asking("one", "two", "three"), SHORT)
    assert [reply.status for reply in replies] == ["ok", "content_filter", "ok"]
    assert server.asked.count("two") == 1
    assert read_trace(replies[1]).verdict is None and replies[1].text == ""
    open_engine().generate(asking("one", "two", "three"), SHORT)
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("answer", "status", "text"),
    [
        (said(None, finish="content_filter"), "content_filter", ""),
        (said("cut in the mid", finish="length"), "length", "cut in the mid"),
        (fault(400, "too long"), "bad_request", ""),
        (fault(422, "what?"), "bad_request", ""),
    ],
    ids=["filter", "length", "400", "422"],
)
def test_final_at_once(server: Server, open_engine: Opener, answer: Answer, status: str, text: str) -> None:
    server.script["q"] = [answer]
    (reply,) = open_engine().generate(asking("q"), SHORT)
    assert (reply.status, reply.text, server.asked) == (status, text, ["q"])


TRANSIENT = {
    "500": fault(500), "503": fault(503), "429": fault(429), "408": fault(408),
    "choices null": Answer(200, {"choices": None, "error": {"message": "upstream is gone"}}),  # A20
    "no choices": Answer(200, {"choices": []}),
    "no message": Answer(200, {"choices": [{"index": 0, "message": None}]}),
    "content is no text": Answer(200, {"choices": [{"index": 0, "message": {"content": [{"type": "text"}]}}]}),
    "malformed json": Answer(200, '{"choices": [{"mess'),
    "html": Answer(200, "<html>busy</html>", {"content-type": "text/html"}),
    "empty body": Answer(200, ""),
    "empty text": said(""),
    "blank text": said(" \n"),
    "null content": said(None),
}  # fmt: skip


@pytest.mark.parametrize("kind", TRANSIENT)
def test_a_transient_failure_is_asked_again(server: Server, open_engine: Opener, kind: str) -> None:
    server.script["bad"] = [TRANSIENT[kind], said("now it works")]
    replies = open_engine().generate(asking("a", "bad", "b"), SHORT)
    assert [reply.text for reply in replies] == ["reply to a", "now it works", "reply to b"]
    assert server.asked.count("bad") == 2


@pytest.mark.parametrize("kind", [kind for kind in TRANSIENT if kind not in ("429", "503")])
def test_used_up_attempts_are_a_status_and_never_a_text(
    server: Server, open_engine: Opener, kind: str, tmp_path: Path
) -> None:
    server.script["bad"] = [TRANSIENT[kind]]  # A24
    engine = open_engine(attempts=3)
    replies = engine.generate(asking("a", "bad"), SHORT)
    assert replies[1].status == ("empty" if kind in ("empty text", "blank text", "null content") else "server_error")
    assert replies[1].text.strip() == "" and read_trace(replies[1]).verdict is None
    assert server.asked.count("bad") == 3 and engine.calls["asked"] == 4
    assert attempts(tmp_path / "ledger.sqlite") == [1, 3]
    assert open_engine(attempts=3).generate(asking("a", "bad"), SHORT) == replies
    assert len(server.asked) == 4


def test_the_cause_of_a_200_without_choices_is_kept(server: Server, open_engine: Opener) -> None:
    server.script["q"] = [TRANSIENT["choices null"]]
    (reply,) = open_engine(attempts=1).generate(asking("q"), SHORT)
    assert "upstream is gone" in str(reply.error)


def test_timeout(server: Server, open_engine: Opener) -> None:
    never = threading.Event()
    server.script["slow"] = [Answer(wait=never)]  # A22
    replies = open_engine(timeout_s=0.4, attempts=2).generate(asking("slow", "quick"), SHORT)
    assert [reply.status for reply in replies] == ["timeout", "ok"]
    assert server.asked.count("slow") == 2 and replies[0].text == ""


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reasoning_fields(server: Server, open_engine: Opener, field: str) -> None:
    server.script["b11"] = [said("No", **{field: "\nBoth orders pick the same text.\n"})]  # A04, B11
    server.script["b17"] = [said(None, "length", **{field: "Compare the two orders first"})]  # B17
    full, cut = open_engine().generate(asking("b11", "b17"), SHORT)
    assert full.reasoning_field == field and read_trace(full) == ("Both orders pick the same text.", False, None)
    assert cut.text == "" and read_trace(cut).reject == "finish_length"


def test_reasoning_tags_are_noted(server: Server, open_engine: Opener) -> None:
    server.script["q"] = [said("<think>\nIt is long.\n</think>\n\nYes")]
    (reply,) = open_engine().generate(asking("q"), SHORT)
    assert reply.reasoning_field == "tags" and read_trace(reply) == ("It is long.", True, None)


def test_a_dead_server_keeps_what_was_answered(server: Server, open_engine: Opener, tmp_path: Path) -> None:
    texts = [f"p{k}" for k in range(6)]
    server.script["p1"] = [said("last words")._replace(last=True)]
    for _ in range(4):  # run again and again while it is dead: that must not use attempts up
        with pytest.raises(IncompleteError, match="run the same command again"):
            open_engine(concurrency=1, attempts=2).generate(asking(*texts), SHORT)
    assert server.asked == ["p0", "p1"]
    back = Server(server.port)
    try:
        replies = open_engine(concurrency=1, attempts=2).generate(asking(*texts), SHORT)
    finally:
        back.stop()
    assert [reply.text for reply in replies] == ["reply to p0", "last words", *(f"reply to p{k}" for k in range(2, 6))]
    assert back.asked == texts[2:]


def test_one_call_to_a_dead_server_is_not_final(server: Server, open_engine: Opener) -> None:
    server.stop()
    with pytest.raises(IncompleteError):
        open_engine(attempts=2).generate(asking("q"), SHORT)


@pytest.mark.parametrize("code", [401, 403, 404])
def test_a_wrong_key_or_model_stops_at_once(server: Server, open_engine: Opener, code: int) -> None:
    server.script["q"] = [fault(code, "who are you?")]
    with pytest.raises(UsageError, match=f"{code} for model 'm'.*engine.model"):
        open_engine().generate(asking("q", "r", "s"), SHORT)
    assert server.asked.count("q") == 1


def test_a_full_disk_is_one_plain_error(open_engine: Opener) -> None:
    engine = open_engine()
    engine.ledger._db.execute("PRAGMA query_only=1")
    with pytest.raises(DataError, match="can't store a reply"):
        engine.generate(asking("a", "b", "c"), SHORT)


def test_a_missing_key_names_its_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(UsageError, match="export MY_KEY"):
        HttpEngine(model="m", api_key_env="MY_KEY").open(Ledger(tmp_path / "l.sqlite"))


def test_order_and_length_are_those_of_the_input(server: Server, open_engine: Opener) -> None:
    texts = [f"p{k}" for k in range(8)]
    answered = threading.Event()
    server.script["p0"] = [said("the first, answered last")._replace(wait=answered)]
    server.script["p7"] = [said("the last")._replace(tell=answered)]
    replies = open_engine(concurrency=4).generate(asking(*texts), SHORT)
    middle = [f"reply to p{k}" for k in range(1, 7)]
    assert [reply.text for reply in replies] == ["the first, answered last", *middle, "the last"]


def test_duplicates_are_asked_once_and_a_second_call_asks_nothing(server: Server, open_engine: Opener) -> None:
    engine = open_engine()
    replies = engine.generate(asking("a", "b", "a"), SHORT)
    assert [reply.text for reply in replies] == ["reply to a", "reply to b", "reply to a"]
    assert sorted(server.asked) == ["a", "b"]
    assert engine.generate(asking("a", "b", "a"), SHORT) == replies
    assert open_engine().generate(asking("a", "b", "a"), SHORT) == replies
    assert sorted(server.asked) == ["a", "b"] and engine.calls["asked"] == 2
    assert engine.generate([], SHORT) == []


def test_works_inside_a_running_loop(server: Server, open_engine: Opener) -> None:
    async def notebook() -> list[str]:
        return [reply.text for reply in open_engine().generate(asking("a", "b"), SHORT)]

    assert asyncio.run(notebook()) == ["reply to a", "reply to b"]


def test_what_is_sent(server: Server, open_engine: Opener) -> None:
    engine = open_engine(logprobs=True)
    engine.generate(asking("greedy"), SHORT)
    engine.generate(asking("drawn"), Sampling(max_new_tokens=9, temperature=0.6, top_p=0.95, sample=3, watch=("Yes",)))
    greedy, drawn = server.bodies
    assert (greedy["max_tokens"], greedy["temperature"]) == (8, 0) and "seed" not in greedy and "logprobs" not in greedy
    assert (drawn["temperature"], drawn["top_p"], drawn["seed"], drawn["top_logprobs"]) == (0.6, 0.95, 3, 20)


def step(token: str, **top: float) -> dict[str, Any]:
    tops = [{"token": name, "logprob": value, "bytes": None} for name, value in top.items()]
    return {"token": token, "logprob": top.get(token, -1.0), "bytes": None, "top_logprobs": tops}


def test_p_yes_is_read_where_the_verdict_was_said(server: Server, open_engine: Opener) -> None:
    content = [step("Yes", Yes=-9.0, No=-9.0), step("</think>"), step("Yes", Yes=-0.5, No=-1.5)]
    case = Case(
        id="c", definitions=(Definition(name="n", text="t"),), question="q", judge="j",
        views=(View(options=("x", "y"), choice=0),),
    )  # fmt: skip
    sampling = Sampling(max_new_tokens=9, watch=("Yes", "No"))
    engine = open_engine(logprobs=True)
    detector = EngineDetector(engine, "d", sampling)
    prompt = detector_prompt(case)
    server.script[prompt] = [said("Hm.</think>\n\nYes", logprobs={"content": content, "refusal": None})]
    (trace,) = detector.detect([case])
    assert trace.verdict is True and trace.p_yes == pytest.approx(1 / (1 + 2.718281828**-1.0))


def detector_prompt(case: Case) -> str:
    from rbd_train.prompts.detect import detect_messages

    return detect_messages(case)[-1]["content"]


def test_letters_have_logprobs_and_a_missing_one_is_bounded(server: Server, open_engine: Opener) -> None:
    server.script["q"] = [said("A", logprobs={"content": [step("A", A=-0.1, B=-2.5, x=-4.0)], "refusal": None})]
    engine = open_engine()
    (reply,) = engine.choice_logprobs(asking("q"), [("A", "B", "C")])
    assert (engine.calls["prompt_tokens"], engine.calls["completion_tokens"]) == (3, 2)
    assert (reply.sums, reply.bounds) == ((-0.1, -2.5, -4.0), (False, False, True))


@pytest.mark.parametrize(
    "answer",
    [said("A"), said("A", logprobs={"content": [step("A")], "refusal": None}), fault(400, "no logprobs here"),
     fault(500)],
    ids=["none", "no top", "400", "500"],
)  # fmt: skip
def test_a_call_without_logprobs_does_not_fail_the_batch(server: Server, open_engine: Opener, answer: Answer) -> None:
    server.script["q"] = [answer]
    server.script["r"] = [said("B", logprobs={"content": [step("B", A=-2.0, B=-0.2)], "refusal": None})]
    bad, good = open_engine(attempts=2).choice_logprobs(asking("q", "r"), [("A", "B")] * 2)
    assert good.sums == (-2.0, -0.2)
    assert bad.status in ("bad_request", "server_error") and bad.sums == ()


def test_whole_answers_have_no_logprobs_over_http(open_engine: Opener) -> None:
    with pytest.raises(UsageError, match="one-token choices"):
        open_engine().choice_logprobs(asking("q"), [("a long answer", "B")])


# the policy -----------------------------------------------------------------------------------------------------------


def in_flight_at_once(concurrency: int, throttled: int) -> list[int]:
    """Drive the places of one server through 429s and replies; returns how many were free after each."""
    server = Places("u", [None], float(concurrency), concurrency)
    seen = []
    for _ in range(throttled):
        server.refused(server.cuts)
        seen.append(int(server.places))
    for _ in range(200):
        server.answered()
    return [*seen, int(server.places)]


def test_places_shrink_on_429_and_grow_again() -> None:
    assert in_flight_at_once(16, 3) == [8, 4, 2, 16]
    assert in_flight_at_once(16, 9)[-2:] == [1, 16]
    server = Places("u", [None], 16.0, 16)
    for _ in range(10):  # ten calls of one burst are one reason to slow down
        server.refused(0)
    assert server.places == 8


def test_a_429_leaves_fewer_calls_in_flight(server: Server, open_engine: Opener) -> None:
    texts = [f"p{k}" for k in range(30)]
    for text in texts[:4]:
        server.script[text] = [fault(429), said(f"reply to {text}")]
    replies = open_engine(concurrency=4).generate(asking(*texts), SHORT)
    assert [reply.text for reply in replies] == [f"reply to {text}" for text in texts]
    assert len(server.asked) == 34


def test_servers_take_turns_and_a_dead_one_is_left_out(server: Server, open_engine: Opener, tmp_path: Path) -> None:
    other, gone = Server(), Server()
    gone.stop()
    urls = [f"http://127.0.0.1:{one.port}/v1" for one in (server, other, gone)]
    texts = [f"p{k}" for k in range(40)]
    try:
        engine = open_engine(base_url=urls, concurrency=6, attempts=9)
        replies = engine.generate(asking(*texts), SHORT)
    finally:
        other.stop()
    assert [reply.text for reply in replies] == [f"reply to {text}" for text in texts]
    assert min(len(server.asked), len(other.asked)) >= 10 and len(server.asked) + len(other.asked) == 40
    assert engine.identity["provider"] == "pool"  # another pool of the same model uses the same replies
    assert open_engine(base_url=urls[:2]).generate(asking(*texts), SHORT) == replies
    assert len(server.asked) + len(other.asked) == 40


@pytest.mark.parametrize("code", [500, 503])
def test_a_server_that_only_fails_ends_the_run(server: Server, open_engine: Opener, tmp_path: Path, code: int) -> None:
    """An outage must not turn thousands of rows into final failures, nor a few, however often one tries."""
    texts = [f"p{k}" for k in range(60)]
    server.script |= {text: [fault(code)] for text in texts[2:]}
    for _ in range(4):
        with pytest.raises(IncompleteError, match=f"calls failed .*{code}.* run the same command again"):
            open_engine(concurrency=2, attempts=3).generate(asking(*texts), SHORT)
    assert len(server.asked) < 2 + 4 * 3 * 6
    assert attempts(tmp_path / "ledger.sqlite") == [1, 1], "only what was answered is kept"
    server.script.clear()
    assert {reply.status for reply in open_engine().generate(asking(*texts), SHORT)} == {"ok"}


@pytest.mark.parametrize("code", [429, 503])
def test_a_busy_server_is_no_attempt_at_the_few_rows_that_are_left(
    server: Server, open_engine: Opener, code: int
) -> None:
    server.script["q"] = [fault(code)] * 9 + [said("at last")]
    assert open_engine(attempts=2).generate(asking("q"), SHORT)[0].text == "at last"


def test_neighbours_that_fail_by_themselves_are_no_outage_forever(server: Server, open_engine: Opener) -> None:
    server.script |= {text: [fault(500)] for text in ("b", "c")}
    for run in range(10):
        try:
            replies = open_engine(concurrency=1, attempts=3).generate(asking("a", "b", "c", "d"), SHORT)
            break
        except IncompleteError:
            assert run < 9
    assert [reply.status for reply in replies] == ["ok", "server_error", "server_error", "ok"]


def test_a_request_above_the_limit_is_no_busy_server(server: Server, open_engine: Opener) -> None:
    server.script["q"] = [fault(429, "Request too large: limit 30000, requested 31000")]
    assert open_engine().generate(asking("q"), SHORT)[0].status == "bad_request" and server.asked == ["q"]


def test_no_credit_is_no_answer(server: Server, open_engine: Opener, tmp_path: Path) -> None:
    server.script |= {"b": [fault(402, "insufficient balance")], "c": [fault(402, "insufficient balance")]}
    with pytest.raises(IncompleteError, match="402, out of credit: .*insufficient balance"):
        open_engine(concurrency=1).generate(asking("a", "b", "c"), SHORT)
    assert attempts(tmp_path / "ledger.sqlite") == [1]


def test_settings_that_every_call_is_refused_for_stop_the_run(server: Server, open_engine: Opener) -> None:
    """A server that knows no such parameter says 400 to each row: that says nothing of the rows."""
    texts = [f"p{k}" for k in range(60)]
    server.script |= {text: [fault(400, "no parameter top_logprobs")] for text in texts}
    with pytest.raises(UsageError, match="first 20 calls were refused .*top_logprobs"):
        open_engine(concurrency=4).generate(asking(*texts), SHORT)
    assert len(server.asked) < 30
    server.script.clear()
    replies = open_engine().generate(asking(*texts), SHORT)
    assert [reply.status for reply in replies].count("bad_request") < 8, "those under way when it stopped"


def test_a_pause_counts_once_against_the_deadline(server: Server, open_engine: Opener, waits: list[float]) -> None:
    server.script["q"] = [fault(429, headers={"retry-after": "60"}), said("fine")]
    assert open_engine(deadline_s=100).generate(asking("q"), SHORT)[0].text == "fine"
    server.script["r"] = [fault(429, headers={"retry-after": "200"}), said("never asked")]
    waits.clear()
    with pytest.raises(IncompleteError, match="no answer: 1"):
        open_engine(deadline_s=100).generate(asking("r"), SHORT)
    assert waits == [], "it doesn't wait for what would come too late"


def test_a_call_ends_with_its_items_deadline(server: Server, open_engine: Opener) -> None:
    server.script["slow"] = [Answer(wait=threading.Event())]
    with pytest.raises(IncompleteError, match="timeout: 1"):
        open_engine(timeout_s=30.0, deadline_s=0.4).generate(asking("slow"), SHORT)


def test_replies_without_log_probabilities_dont_stand_for_replies_with_them(
    server: Server, open_engine: Opener
) -> None:
    open_engine().generate(asking("q"), SHORT)
    open_engine(logprobs=True).generate(asking("q"), SHORT)
    assert server.asked == ["q", "q"]


@pytest.mark.parametrize(
    "settings",
    [{"api_key_env": "gsk_abcDEF123"}, {"api_key_env": "hf_secretkey"},
     {"base_url": "https://user:secret@host/v1"}, {"base_url": "https://host/v1?key=secret"}],
)  # fmt: skip
def test_a_key_in_the_wrong_place_is_refused_and_not_repeated(settings: dict[str, str]) -> None:
    with pytest.raises(UsageError) as told:
        HttpEngine(model="m", **settings)
    assert "gsk_" not in str(told.value) and "secret" not in str(told.value)


def test_workers_share_the_limits(server: Server, open_engine: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    from rbd_train.engines.collection import Collection

    monkeypatch.setenv("WORLD_SIZE", "4")
    engine: Any = open_engine(concurrency=16, requests_per_minute=60.0)
    part = Collection(engine.backend, [], engine)
    assert part.concurrency == 4 and part.per_minute._seconds_each == 4.0


def test_a_deadline_ends_an_item_and_leaves_it_to_the_next_run(server: Server, open_engine: Opener) -> None:
    server.script["slow"] = [fault(500), said("at last")]
    with pytest.raises(IncompleteError, match="server_error: 1"):
        open_engine(backoff_s=50, deadline_s=10).generate(asking("slow", "quick"), SHORT)
    assert server.asked.count("slow") == 1
    assert open_engine().generate(asking("slow", "quick"), SHORT)[0].text == "at last"


def test_a_budget_stops_before_it_is_passed(server: Server, open_engine: Opener) -> None:
    """What a call may cost is set aside first; earlier runs count; more money continues."""
    texts = [f"question {k}" for k in range(20)]
    prices = {"price_in": 0.0, "price_out": 1e6, "concurrency": 3}  # a dollar per token: 8 set aside, 2 spent each
    engine = open_engine(**prices, budget_usd=20.0)
    with pytest.raises(IncompleteError, match="budget_usd is 20.*raise engine.budget_usd"):
        engine.generate(asking(*texts), SHORT)
    asked = len(server.asked)
    assert asked == 7 and engine.cost.usd == 14  # an eighth might pass it; none stops for what is only set aside
    with pytest.raises(IncompleteError):
        open_engine(**prices, budget_usd=2.0 * asked + 7.9).generate(asking(*texts), SHORT)
    assert len(server.asked) == asked
    open_engine(**prices, budget_usd=100.0).generate(asking(*texts), SHORT)
    assert len(server.asked) == 20


def test_a_budget_without_prices_is_refused() -> None:
    with pytest.raises(UsageError, match="price_in"):
        HttpEngine(model="m", budget_usd=1.0)


@pytest.mark.parametrize("limit", [{"requests_per_minute": 60.0}, {"tokens_per_minute": 60.0 * 20}])
def test_limits_spread_the_calls(server: Server, open_engine: Opener, waits: list[float], limit: Any) -> None:
    open_engine(**limit).generate(asking("a", "b", "c", "d"), SHORT)
    assert len(waits) == 3 and waits == sorted(waits)
    assert 2.0 < waits[-1] < 3.6  # the fourth call of one a second waits three


def test_a_reasoner_that_does_not_reason_is_stopped(server: Server, open_engine: Opener) -> None:
    """A04: a parser that is off must not cost thousands of calls."""
    texts = [f"p{k}" for k in range(60)]
    with pytest.raises(IncompleteError, match="first 20 replies of m hold no reasoning"):
        open_engine(reasoning=True, concurrency=4).generate(asking(*texts), SHORT)
    assert len(server.asked) < 30
    server.script["p50"] = [said("Yes", reasoning="Hm.")]
    assert len(open_engine(reasoning=False).generate(asking(*texts), SHORT)) == 60


def test_a_date_as_retry_after() -> None:
    soon = email.utils.formatdate(time.time() + 30, usegmt=True)
    assert 25 < retry_after({"retry-after": soon}) <= 30
    assert retry_after({"retry-after": "soon"}) == retry_after({}) == 0.0


def test_usage_is_summed_and_guessed_where_it_is_missing(server: Server, open_engine: Opener) -> None:
    bare = said("fine").body | {"usage": None}
    server.script["b"] = [Answer(200, bare)]
    engine = open_engine(price_in=1e6, price_out=1e6)
    engine.generate(asking("a", "b"), SHORT)
    assert engine.cost.usd == 3 + 2 + (1 // 3 + 8) + 8
    again = open_engine(price_in=1e6, price_out=1e6)
    again.generate(asking("a", "b"), SHORT)
    assert again.cost.usd == engine.cost.usd and again.calls["asked"] == 0
