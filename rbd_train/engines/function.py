"""A Python function as an engine: one's own judge, or a fixed script for rehearsals and tests."""

import hashlib
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from pydantic import JsonValue

from rbd_train.engine import Commit, Engine
from rbd_train.errors import UsageError
from rbd_train.exchange import ChoiceLogprobs, Completion, Messages, Reply, Request
from rbd_train.judge import GenerativeJudge
from rbd_train.ledger import Ledger
from rbd_train.store import fingerprint


class FunctionBackend:
    """Answer with `reply(messages) -> text`; what the function raises is the caller's."""

    def __init__(self, reply: Callable[[Messages], str], name: str, identity: JsonValue = None) -> None:
        """Wrap a function; name and identity tell the ledger when a stored reply may be used again."""
        self.reply = reply
        self.identity: dict[str, JsonValue] = {"engine": "function", "model": name, "identity": identity}

    def run(self, requests: Sequence[Request], missing: frozenset[int], commit: Commit) -> None:
        """Answer the missing requests one after the other."""
        todo = sorted(missing)
        commit.many([], begun=todo[:1])
        for index, following in zip(todo, [*todo[1:], None], strict=True):
            commit.many([(index, self._answer(requests[index]))], [] if following is None else [following])

    def _answer(self, request: Request) -> Reply:
        if request.sampling is None:
            return _arbitrary_logprobs(request)
        said: Any = self.reply(request.messages)
        if said is not None and not isinstance(said, str):
            raise UsageError(f"the function {self.identity['model']!r} returned {said!r:.80}; a reply is text, or None")
        text = said or ""  # None: many clients' word for a refusal
        return Completion(status="ok" if text.strip() else "empty", text=text, finish_reason="stop")

    def together(self, requests: Sequence[Request]) -> list[list[int]]:
        """Answer each by itself."""
        return [[index] for index in range(len(requests))]

    def close(self) -> None:
        """Nothing to free."""


def function_judge(reply: Callable[[Messages], str], ledger: Ledger, name: str) -> GenerativeJudge:
    """Make a judge of a function from messages to text: any model, behind any client.

    The ledger keeps every reply under this name and the function's code: give another model another name, or its
    predecessor's replies are used.
    """
    identity = fingerprint(_code(getattr(reply, "__code__", None)))  # a partial or an object has none
    return GenerativeJudge(Engine(FunctionBackend(reply, name, identity), ledger, attempts=1), name)


def _code(code: CodeType | None) -> JsonValue:
    """Return what a function does, the names that it calls and the functions within it included."""
    if code is None:
        return None
    return [code.co_code.hex(), [*code.co_names, *code.co_freevars], [_constant(c) for c in code.co_consts]]


def _constant(value: object) -> JsonValue:
    if isinstance(value, CodeType):
        return _code(value)
    if isinstance(value, frozenset):  # `in {...}`: its order is another one in every process
        return ", ".join(sorted(map(repr, value)))
    return repr(value)


@dataclass
class ScriptedEngine:
    """Engine that replies by rules, for rehearsals: the first rule whose pattern is found in the prompt answers."""

    rules: list[dict[str, str]] = field(default_factory=list)  # [{"pattern": regex, "reply": text}, ...]
    delay_s: float = 0.0  # seconds of pause before each reply

    def open(self, ledger: Ledger) -> Engine:
        """Return the engine; running out of rules is an error, not an empty reply."""
        rules: list[Any] = [dict(rule) for rule in self.rules]
        for rule in rules:
            if set(rule) != {"pattern", "reply"}:
                raise UsageError(f"engine.rules: a rule holds 'pattern' and 'reply', not {sorted(rule)}")

        def reply(messages: Messages) -> str:
            time.sleep(self.delay_s)
            prompt = "\n".join(message["content"] for message in messages)
            for rule in rules:
                if re.search(rule["pattern"], prompt):
                    return str(rule["reply"])
            raise UsageError(f"engine=scripted: no rule matches the prompt {prompt[:80]!r}…; add one to engine.rules")

        return Engine(FunctionBackend(reply, "scripted", fingerprint(rules)), ledger, attempts=1)


def _arbitrary_logprobs(request: Request) -> ChoiceLogprobs:
    """Give each choice a fixed, meaningless log-probability that depends on prompt and choice alone."""
    prompt = "\n".join(message["content"] for message in request.messages)
    sums = [-hashlib.sha256(f"{prompt}\n{choice}".encode()).digest()[0] / 16 for choice in request.choices]
    return ChoiceLogprobs(sums=tuple(sums), tokens=tuple(len(choice.split()) or 1 for choice in request.choices))
