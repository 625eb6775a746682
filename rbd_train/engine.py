"""The engine: prompts in, replies or log-probabilities of given choices out, every one through the ledger.

An `Engine` has two verbs and wraps one backend (`rbd_train.engines`). The backend says what it is (`identity`) and
answers requests; the engine looks up what the ledger already holds, hands over what is missing, and commits each
reply before anyone uses it. Killed anywhere and run again, a stage asks for nothing that was already answered.
"""

import logging
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Literal, NamedTuple, Protocol, Self, TypedDict

from pydantic import JsonValue
from tqdm import tqdm

from rbd_train.errors import IncompleteError
from rbd_train.ledger import Ledger, Stored
from rbd_train.records import Record
from rbd_train.store import canonical

Status = Literal["ok", "length", "empty", "content_filter", "bad_request", "timeout", "server_error"]
CUT_SHARE = 0.03  # of replies cut at the token limit, above which a warning is due
TERMINAL: frozenset[str] = frozenset({"ok", "length", "content_filter", "bad_request"})


class Message(TypedDict):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


Messages = Sequence[Message]


class Sampling(Record):
    """How a completion is drawn. `watch` asks for the log-probabilities of these words where one of them was said."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    sample: int = 0
    watch: tuple[str, ...] = ()


class Completion(Record):
    """What came back from one call; `status` says what the server did, never what the text means."""

    kind: Literal["completion"] = "completion"
    status: Status
    text: str = ""
    reasoning: str | None = None
    reasoning_field: str | None = None
    finish_reason: str | None = None
    error: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    watched: dict[str, float] | None = None


class ChoiceLogprobs(Record):
    """Per choice its summed log-probability (nats) and token count; `bounds` marks values that are upper bounds."""

    kind: Literal["choices"] = "choices"
    status: Status = "ok"
    sums: tuple[float, ...]
    tokens: tuple[int, ...]
    bounds: tuple[bool, ...] = ()


Reply = Completion | ChoiceLogprobs


class Request(NamedTuple):
    """One call: a completion (`sampling`) or the log-probabilities of `choices`."""

    messages: Messages
    sampling: Sampling | None = None
    choices: tuple[str, ...] = ()


class Backend(Protocol):
    """What an engine is made of: it knows what it is, and answers requests."""

    identity: dict[str, JsonValue]

    def run(self, requests: Sequence[Request], missing: frozenset[int], commit: Callable[[int, Reply], None]) -> None:
        """Answer at least the missing requests and hand over each reply (or whole batch) as it comes.

        All requests are given, so that a local backend can plan its batches over the whole input: a resumed run
        then computes in the batches of an undisturbed one.
        """

    def close(self) -> None:
        """Free what the backend holds."""


class Engine:
    """Two verbs around a backend and the ledger; a context manager, so that one model is freed before the next."""

    def __init__(self, backend: Backend, ledger: Ledger, attempts: int = 5, progress: str = "") -> None:
        """Wrap a backend.

        Args:
            backend: what answers.
            ledger: where each reply is committed before it is used.
            attempts: after so many failed calls over all runs, a transient failure becomes final.
            progress: title of the progress bar.
        """
        self.backend, self.ledger, self.attempts, self.progress = backend, ledger, attempts, progress
        self.identity = dict(backend.identity)
        self.calls = {"asked": 0, "from_ledger": 0, "prompt_tokens": 0, "completion_tokens": 0}

    def generate(self, prompts: Sequence[Messages], sampling: Sampling) -> list[Completion]:
        """Return one completion per prompt, in order; a failed call is a status, never a text.

        Raises:
            IncompleteError: some calls have no final answer yet; the same command continues them.
        """
        replies = self._answer([Request(prompt, sampling) for prompt in prompts])
        completions = [Completion.model_validate(reply) for reply in replies]
        cut = sum(completion.status == "length" for completion in completions)
        if cut > CUT_SHARE * len(completions):
            logging.getLogger("rbd_train").warning(
                "%d of %d replies end at the limit of %d new tokens and can't be read; raise max_new_tokens",
                cut, len(completions), sampling.max_new_tokens,
            )  # fmt: skip
        return completions

    def choice_logprobs(self, prompts: Sequence[Messages], choices: Sequence[Sequence[str]]) -> list[ChoiceLogprobs]:
        """Return the log-probabilities of each prompt's choices as the assistant's reply, in order.

        A failed call has a status other than ok, and no sums.

        Raises:
            IncompleteError: as for `generate`.
        """
        pairs = zip(prompts, choices, strict=True)
        replies = self._answer([Request(prompt, None, tuple(options)) for prompt, options in pairs])
        return [
            reply if isinstance(reply, ChoiceLogprobs) else ChoiceLogprobs(status=reply.status, sums=(), tokens=())
            for reply in replies
        ]

    def _answer(self, requests: Sequence[Request]) -> list[Reply]:
        keys = [self._key(request) for request in requests]
        first: dict[str, int] = {}
        for index, key in enumerate(keys):
            first.setdefault(key, index)
        unique = [requests[index] for index in first.values()]
        unique_keys = list(first)
        stored = self.ledger.replies(unique_keys)
        missing = frozenset(i for i, key in enumerate(unique_keys) if not self._final(stored.get(key)))
        self.calls["from_ledger"] += len(requests) - len(missing)
        bar = tqdm(total=len(unique), initial=len(unique) - len(missing), desc=self.progress or None, disable=None)

        def commit(index: int, reply: Reply) -> None:
            if index not in missing:
                return  # a batch that is partly stored is run whole, and the stored replies are the ones used
            self.ledger.commit(unique_keys[index], reply.model_dump_json(), self.identity, reply.status in TERMINAL)
            self._count(reply)
            bar.update()

        with bar:
            if missing:
                self.backend.run(unique, missing, commit)
        stored = self.ledger.replies(unique_keys)
        unfinished = [key for key in unique_keys if not self._final(stored.get(key))]
        if unfinished:
            reasons = self.ledger.reasons(unfinished)
            raise IncompleteError(
                f"{len(unfinished)} of {len(unique_keys)} calls have no final answer yet ({reasons}); "
                f"run the same command again to continue: what was answered is kept in {self.ledger.path}"
            )
        parsed: dict[str, Reply] = {}
        for key, row in stored.items():
            kind = ChoiceLogprobs if '"kind":"choices"' in row.reply[:20] else Completion
            parsed[key] = kind.model_validate_json(row.reply)
        return [parsed[key] for key in keys]

    def _final(self, row: Stored | None) -> bool:
        return row is not None and (row.final or row.attempts >= self.attempts)

    def _key(self, request: Request) -> str:
        return Ledger.key(
            canonical(
                {
                    "engine": self.identity,
                    "messages": [dict(message) for message in request.messages],
                    "sampling": request.sampling.model_dump(mode="json") if request.sampling else None,
                    "choices": list(request.choices),
                }
            )
        )

    def _count(self, reply: Reply) -> None:
        self.calls["asked"] += 1
        if isinstance(reply, Completion):
            self.calls["prompt_tokens"] += reply.prompt_tokens or 0
            self.calls["completion_tokens"] += reply.completion_tokens or 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.backend.close()
