"""A server that answers like an OpenAI-compatible one and fails on a seeded schedule, to rehearse a run for nothing.

    python -m rbd_train.engines.fake_server --port 8000 --faults 0.2
    rbd traces engine.base_url=http://localhost:8000/v1 engine.api_key_env=null

What is final (content filter, length) depends on a request's content alone, what passes (429, 5xx, slow, cut, reset,
empty, `choices: null`, malformed JSON) on content and attempt, three times in a row at most. `/stats` counts the
requests, and those that were asked again although their last answer was no injected passing fault.
"""

import argparse
import asyncio
import math
import re
import socket
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rbd_train.records import uniform
from rbd_train.store import fingerprint

FINAL = ("content_filter", "length")
PASSING = ("429", "429_retry_after", "500", "503", "slow", "cut", "reset", "empty", "choices_null", "malformed")
EXPLAINED = frozenset(PASSING) - {"slow"}  # after these a client has to ask again; a slow answer is an answer
IN_A_ROW = 3  # passing faults of one content at most, fewer than the attempts of any sensible client
TOKENS = ("Yes", "No", *"ABCDabcd", *map(str, range(1, 11)))  # whose log-probabilities are given


@dataclass
class FakeServer:
    """What answers: an ASGI application in `app`, and what it counted."""

    faults: float = 0.0  # share of requests that fail, a fifth of them for good
    seed: int = 0  # of the schedule and of the replies
    delay_s: float = 0.02  # seconds before each answer
    slow_s: float = 2.0  # seconds before a slow one
    retry_after_s: float = 1.0  # what a 429 with Retry-After asks for
    reasoning: str = "reasoning"  # where the thinking goes: reasoning, reasoning_content or tags
    attempts: Counter[str] = field(default_factory=Counter)  # per content
    sent: Counter[str] = field(default_factory=Counter)  # answers by kind
    last: dict[str, str] = field(default_factory=dict)  # kind of the last answer per content
    asked_again: int = 0

    def __post_init__(self) -> None:
        """Lay out the routes."""
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/stats", self.stats),
            ]
        )

    def plan(self, content: str, attempt: int) -> str:
        """Return what happens to a content's attempt (from 0): `ok` or a kind of fault."""
        if uniform(self.seed, "final", content) < self.faults / 5:
            return FINAL[int(uniform(self.seed, "which", content) * len(FINAL))]
        if attempt < IN_A_ROW and uniform(self.seed, "passing", content, attempt) < self.faults * 4 / 5:
            return PASSING[int(uniform(self.seed, "which", content, attempt) * len(PASSING))]
        return "ok"

    async def chat(self, request: Request) -> Response:
        """Answer one chat completion, or fail as planned."""
        body = await request.json()
        content = fingerprint(body)
        self.asked_again += self.last.get(content, "500") not in EXPLAINED
        kind = self.plan(content, self.attempts[content])
        self.attempts[content] += 1
        self.last[content] = kind
        self.sent[kind] += 1
        await asyncio.sleep(self.slow_s if kind == "slow" else self.delay_s)
        return fault(kind, self.retry_after_s) or Answer(self.completion(body, content, kind), kind)

    def completion(self, body: Mapping[str, Any], content: str, kind: str) -> dict[str, Any]:
        """Make the completion of a request: a function of its content and the seed."""
        prompt = "\n".join(str(message.get("content", "")) for message in body.get("messages", []))
        thinking, text = reply(prompt, f"{self.seed}/{content}")
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thinking and self.reasoning == "tags":
            message["content"] = f"<think>\n{thinking}\n</think>\n\n{text}"
        elif thinking:
            message[self.reasoning] = thinking
        if kind == "length":
            message["content"] = message["content"][: len(message["content"]) // 2]
        if kind == "content_filter":
            message["content"] = None
        finish = kind if kind in FINAL else "stop"
        tokens = {
            "prompt_tokens": len(prompt) // 4 + 1,
            "completion_tokens": (len(text) + len(thinking or "")) // 4 + 1,
        }
        tokens["total_tokens"] = sum(tokens.values())
        logprobs = {"content": [steps(text, content)], "refusal": None} if body.get("logprobs") else None
        choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": logprobs}
        return {
            "id": f"fake-{content}", "object": "chat.completion", "created": 0, "model": body.get("model", "fake"),
            "choices": [choice], "usage": tokens,
        }  # fmt: skip

    async def models(self, request: Request) -> Response:
        """List the one model, as health checks ask."""
        return JSONResponse({"object": "list", "data": [{"id": "fake", "object": "model", "owned_by": "rbd_train"}]})

    async def stats(self, request: Request) -> Response:
        """Say what was counted."""
        counts = {"requests": self.sent.total(), "contents": len(self.attempts), "asked_again": self.asked_again}
        return JSONResponse(counts | {"sent": dict(sorted(self.sent.items()))})


class Answer(JSONResponse):
    """A completion that goes through, is cut in the middle of its body, or dies with its connection."""

    def __init__(self, content: Any, kind: str) -> None:
        """Render the body."""
        super().__init__(content)
        self.kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send as much of it as its kind lets through."""
        if self.kind not in ("cut", "reset"):
            await super().__call__(scope, receive, send)
            return
        if self.kind == "cut":
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            half = bytes(self.body)[: len(self.body) // 2]
            await send({"type": "http.response.body", "body": half, "more_body": True})
        transport = receive.__self__.transport  # type: ignore[attr-defined]  # uvicorn's; ASGI knows no reset
        if self.kind == "reset":
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            transport.abort()
        else:
            transport.close()


def fault(kind: str, retry_after_s: float) -> Response | None:
    """Return the answer of a fault that is no completion at all; None for the others."""
    if kind in ("429", "429_retry_after"):
        headers = {"retry-after": f"{retry_after_s:g}"} if kind == "429_retry_after" else None
        return JSONResponse({"error": {"message": "slow down", "code": "rate_limit"}}, 429, headers)
    if kind in ("500", "503"):
        return JSONResponse({"error": {"message": "an injected fault"}}, int(kind))
    if kind == "empty":
        return Response(b"", 200)
    if kind == "choices_null":
        return JSONResponse({"choices": None, "error": {"message": "an injected fault upstream"}})
    if kind == "malformed":
        return Response(b'{"choices": [{"mess', 200, media_type="application/json")
    return None


def reply(prompt: str, key: str) -> tuple[str | None, str]:
    """Return thinking and text that this project's parsers read, drawn by the key: a verdict, a label or a number."""
    if "Yes or No" in prompt:
        verdict = uniform(key, "verdict") < 0.5
        reason = "follows the cue" if verdict else "does not follow a cue"
        return f"I look at what was shown and at what was chosen. The choice {reason}.", "Yes" if verdict else "No"
    letters = sorted(set(re.findall(r'^Output \(([a-z])\): """', prompt, re.MULTILINE)))
    if letters:
        first, second = (letters[int(uniform(key, n) * len(letters))] for n in (1, 2))
        joint = "First order: Output (x)" in prompt
        return None, f"First order: Output ({first})\nSecond order: Output ({second})" if joint else f"Output ({first})"
    return None, f"I work it out.\n#### {int(uniform(key) * 1000)}"


def steps(text: str, key: str) -> dict[str, Any]:
    """Return one step of log-probabilities: the reply's word first, then what else it might have been."""
    word = text if text in TOKENS else TOKENS[2]
    others = [token for token in TOKENS if token != word]
    weights = [1.0, *(uniform(key, token) / len(TOKENS) for token in others)]
    total = sum(weights)
    tops = [
        {"token": token, "logprob": math.log(max(weight / total, 1e-9)), "bytes": None}
        for token, weight in zip([word, *others], weights, strict=True)
    ]
    return {"token": word, "logprob": tops[0]["logprob"], "bytes": None, "top_logprobs": tops}


def main(words: Sequence[str] | None = None) -> None:
    """Serve until interrupted; says first where."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--port", type=int, default=8000, help="0: any free one")
    parser.add_argument("--faults", type=float, default=0.2, help="share of requests that fail")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--delay-s", type=float, default=0.02, help="before each answer")
    parser.add_argument("--slow-s", type=float, default=2.0, help="before a slow one")
    parser.add_argument("--retry-after-s", type=float, default=1.0)
    parser.add_argument("--reasoning", choices=("reasoning", "reasoning_content", "tags"), default="reasoning")
    given = vars(parser.parse_args(words))
    listening = socket.create_server(("127.0.0.1", given.pop("port")), backlog=1024)
    print(f"http://127.0.0.1:{listening.getsockname()[1]}/v1", flush=True)
    config = uvicorn.Config(FakeServer(**given).app, log_level="critical", access_log=False, timeout_keep_alive=60)
    uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main()
