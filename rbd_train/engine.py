"""The engine: prompts in, replies or log-probabilities of given choices out, every one through the ledger.

An `Engine` has two verbs and wraps one backend (`rbd_train.engines`). The backend says what it is (`identity`) and
answers requests; the engine looks up what the ledger already holds, hands over what is missing, and commits each
reply before anyone uses it. Killed anywhere and run again, a stage asks for nothing that was already answered.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

from pydantic import JsonValue, ValidationError
from tqdm import tqdm

from rbd_train.cost import Cost
from rbd_train.errors import DataError, DryRun, IncompleteError, UsageError
from rbd_train.exchange import TERMINAL, ChoiceLogprobs, Completion, Messages, Reply, Request, Sampling
from rbd_train.ledger import Answer, Ledger, Stored
from rbd_train.run import rank, world_size
from rbd_train.store import canonical

CUT_SHARE = 0.03  # of replies cut at the token limit, above which a warning is due


class Commit(Protocol):
    """Takes the replies of a run: `commit(index, reply)` for one, `commit.many` for several in one transaction."""

    def __call__(self, index: int, reply: Reply) -> None:
        """Store one reply before it is used."""

    def many(self, replies: Sequence[tuple[int, Reply]], begun: Sequence[int] = ()) -> None:
        """Store replies, all or none, and note which calls are made next (those that a kill would lose)."""

    def forget(self, indices: Sequence[int]) -> None:
        """Drop failed calls that turn out to be no fault of theirs; an answer is never dropped."""


class Backend(Protocol):
    """What an engine is made of: it knows what it is, and answers requests."""

    identity: dict[str, JsonValue]

    def run(self, requests: Sequence[Request], missing: frozenset[int], commit: Commit) -> None:
        """Answer at least the missing requests and hand over each reply (or whole batch) as it comes.

        All requests are given, so that a local backend can plan its batches over the whole input: a resumed run
        then computes in the batches of an undisturbed one.
        """

    def together(self, requests: Sequence[Request]) -> Sequence[Sequence[int]]:
        """Group the requests that are answered together: what several workers (`launch=ddp`) share out.

        It depends on the requests alone. What is missing doesn't: each worker looks into the ledger at another moment.
        """

    def close(self) -> None:
        """Free what the backend holds."""


class Family(NamedTuple):
    """What two models must share to be contrasted, and how large a model is."""

    tokenizer: Any
    context: int | None  # tokens, prompt and reply together
    parameters: int
    weights: int = 0  # bytes
    per_token: int = 0  # bytes of a token's keys and values


class Engine:
    """Two verbs around a backend and the ledger; a context manager, so that one model is freed before the next."""

    def __init__(
        self, backend: Backend, ledger: Ledger, attempts: int = 5, progress: str = "", cost: Cost | None = None
    ) -> None:
        """Wrap a backend.

        Args:
            backend: what answers.
            ledger: where each reply is committed before it is used.
            attempts: after so many failed calls over all runs, a transient failure becomes final.
            progress: title of the progress bar.
            cost: where tokens and money are summed; the backend may share it to keep a budget.
        """
        self.backend, self.ledger, self.attempts, self.progress = backend, ledger, attempts, progress
        self.identity = dict(backend.identity)
        self.cost = cost or Cost()
        self.planted: dict[str, str] = {}  # what an engine that simulates a judge leans on; declared in every table
        self.calls = {"asked": 0, "from_ledger": 0, "asked_again": 0, "prompt_tokens": 0, "completion_tokens": 0}
        self._charged: set[str] = set()
        self.states: Counter[str] = Counter()  # rows by what the server did; every row is in one

    def generate(self, prompts: Sequence[Messages], sampling: Sampling | Sequence[Sampling]) -> list[Completion]:
        """Return one completion per prompt, in order; a failed call is a status, never a text.

        Args:
            prompts: the conversations.
            sampling: how they are answered; several that differ in `sample` alone answer all prompts, one after the
                other: all prompts' first samples, then their second.

        Raises:
            IncompleteError: some calls have no final answer yet; the same command continues them.
        """
        drawn = [sampling] if isinstance(sampling, Sampling) else sampling
        replies = self._answer([Request(prompt, each) for each in drawn for prompt in prompts])
        completions = [Completion.model_validate(reply) for reply in replies]
        cut = sum(completion.status == "length" for completion in completions)
        if cut > CUT_SHARE * len(completions):
            logging.getLogger("rbd_train").warning(
                "%d of %d replies end at the limit of %d new tokens; raise the limit if they must be whole to be read",
                cut, len(completions), drawn[0].max_new_tokens,
            )  # fmt: skip
        return completions

    def choice_logprobs(
        self, prompts: Sequence[Messages], choices: Sequence[Sequence[str]], temperatures: Sequence[float] = (),
        ends: Sequence[bool] = (),
    ) -> list[ChoiceLogprobs]:  # fmt: skip
        """Return the log-probabilities of each prompt's choices as the assistant's reply, in order.

        A failed call has a status other than ok, and no sums.

        Args:
            prompts: one conversation each.
            choices: texts of replies, per prompt.
            temperatures: asks for readings (token by token), with the log-normalisers at these temperatures.
            ends: per prompt, with readings: whether its choices end the reply, so that "1" is no beginning of "10".

        Raises:
            IncompleteError: as for `generate`.
        """
        asked = zip(prompts, choices, ends or [False] * len(prompts), strict=True)
        replies = self._answer(
            [Request(prompt, None, tuple(options), tuple(temperatures), end) for prompt, options, end in asked]
        )
        return [
            reply if isinstance(reply, ChoiceLogprobs) else ChoiceLogprobs(status=reply.status, sums=(), tokens=())
            for reply in replies
        ]

    def family(self) -> Family | None:
        """Return tokenizer, context and size of a model in this process; None for one behind a server."""
        asked: Callable[[], Family] | None = getattr(self.backend, "family", None)
        return asked() if asked else None

    def _answer(self, requests: Sequence[Request]) -> list[Reply]:
        keys = [self._key(request) for request in requests]
        first: dict[str, int] = {}
        for index, key in enumerate(keys):
            first.setdefault(key, index)
        unique = [requests[index] for index in first.values()]
        unique_keys = list(first)
        stored = self.ledger.replies(unique_keys)
        missing = frozenset(i for i, key in enumerate(unique_keys) if not self._final(stored.get(key)))
        open_keys = {unique_keys[index] for index in missing}
        if missing and self.ledger.dry_run:
            raise DryRun(self.cost.forecast([unique[index] for index in sorted(missing)]))
        self.calls["from_ledger"] += sum(key not in open_keys for key in keys)
        for index, key in enumerate(unique_keys):
            if key in stored and key not in self._charged:  # an earlier run has paid for it
                self._charge_stored(key, unique[index], stored[key])
        if missing:
            mine = self._share(unique, missing)
            if mine:
                self._run(unique, unique_keys, mine)
            stored |= self.ledger.replies([unique_keys[index] for index in sorted(mine)])
            self._check_final([unique_keys[index] for index in sorted(mine)], stored)
            stored |= self._awaited([unique_keys[index] for index in sorted(missing - mine)])
            for index in sorted(missing - mine):  # what another worker asked is part of the same bill
                row = stored[unique_keys[index]]
                self.count(_reply(row.reply))
                self._charge_stored(unique_keys[index], unique[index], row)
        self._check_final(unique_keys, stored)
        parsed = {key: _reply(row.reply) for key, row in stored.items()}
        self.states.update(parsed[key].status for key in keys)
        return [parsed[key] for key in keys]

    def _check_final(self, keys: Sequence[str], stored: Mapping[str, Stored]) -> None:
        """Stop where a call has no final answer.

        Raises:
            IncompleteError: says how many, and why.
        """
        unfinished = [key for key in keys if not self._final(stored.get(key))]
        if unfinished:
            reasons = self.ledger.reasons(unfinished)
            raise IncompleteError(
                f"{len(unfinished)} of {len(keys)} calls have no final answer yet ({reasons}); "
                f"run the same command again to continue: what was answered is kept in {self.ledger.path}"
            )

    def _share(self, requests: Sequence[Request], missing: frozenset[int]) -> frozenset[int]:
        """Return what this worker is to answer of what is missing.

        Raises:
            UsageError: the workers are on several machines.
        """
        if world_size() == 1:
            return missing
        if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1:
            raise UsageError(
                "workers of a data stage meet in the ledger, a SQLite file, which machines can't share; start it on "
                "one machine (engine.base_url=[...] reaches servers on many)"
            )
        parts = list(self.backend.together(requests))[rank() :: world_size()]
        return missing.intersection(index for part in parts for index in part)

    def _run(self, requests: Sequence[Request], keys: Sequence[str], missing: frozenset[int]) -> None:
        """Let the backend answer what is missing; what ends by itself leaves no call noted as begun."""
        open_keys = [keys[index] for index in sorted(missing)]
        self.calls["asked_again"] += self.ledger.begun(open_keys)
        bar = tqdm(total=len(keys), initial=len(keys) - len(missing), desc=self.progress or None, disable=None)
        with bar:
            try:
                self.backend.run(requests, missing, _Commit(self, requests, keys, missing, bar))
            except Exception:  # not an interrupt: the calls it cut off were begun, and are asked again
                self.ledger.begun(open_keys)
                raise
        self.ledger.begun(open_keys)

    def _awaited(self, keys: Sequence[str]) -> dict[str, Stored]:
        """Return what the other workers answered, once they have.

        Workers have no process group: they meet in the ledger. One that fails takes the others with it (torchrun).
        """
        stored = self.ledger.replies(keys)
        while not all(self._final(stored.get(key)) for key in keys):
            time.sleep(0.2)
            stored |= self.ledger.replies([key for key in keys if not self._final(stored.get(key))])
        return stored

    def count(self, reply: Reply) -> None:
        """Count a call that was made, and its tokens where the backend names them."""
        self.calls["asked"] += 1
        self.calls["prompt_tokens"] += reply.prompt_tokens or 0
        self.calls["completion_tokens"] += reply.completion_tokens or 0

    def charge(self, key: str, request: Request, reply: Reply, calls: int = 1) -> None:
        """Count what a call cost, or several that ended alike."""
        self._charged.add(key)
        for _ in range(calls):
            self.cost.add(request, reply)

    def _charge_stored(self, key: str, request: Request, row: Stored) -> None:
        """Count what was paid for a stored reply; of failed calls the last is kept, and stands for them all."""
        self.charge(key, request, _reply(row.reply), 1 if row.final else row.attempts)

    def _final(self, row: Stored | None) -> bool:
        return row is not None and (row.final or row.attempts >= self.attempts)

    def _key(self, request: Request) -> str:
        asked: dict[str, Any] = {
            "engine": self.identity,
            "messages": [dict(message) for message in request.messages],
            "sampling": request.sampling.model_dump(mode="json") if request.sampling else None,
            "choices": list(request.choices),
        }
        if request.temperatures:
            asked |= {"temperatures": list(request.temperatures), "end": request.end}
        return Ledger.key(canonical(asked))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.backend.close()


class _Commit:
    """Store replies in the ledger, then count and show them."""

    def __init__(
        self, engine: Engine, requests: Sequence[Request], keys: Sequence[str], missing: frozenset[int], bar: Any
    ) -> None:
        self.engine, self.requests, self.keys, self.missing, self.bar = engine, requests, keys, missing, bar

    def __call__(self, index: int, reply: Reply) -> None:
        """Store one reply."""
        self.many([(index, reply)])

    def many(self, replies: Sequence[tuple[int, Reply]], begun: Sequence[int] = ()) -> None:
        """Store several, and note what is asked next."""
        engine = self.engine
        # a batch that is partly stored is run whole, and the stored replies are the ones used
        new = [(index, reply) for index, reply in replies if index in self.missing]
        answers = [
            Answer(self.keys[index], reply.model_dump_json(), engine.identity, reply.status in TERMINAL)
            for index, reply in new
        ]
        engine.ledger.commit_all(answers, [self.keys[index] for index in begun])
        for index, reply in new:
            engine.charge(self.keys[index], self.requests[index], reply)
            engine.count(reply)
        self.bar.update(len(new))
        self.bar.set_postfix_str(engine.cost.told(), refresh=False)

    def forget(self, indices: Sequence[int]) -> None:
        """Drop what failed calls left."""
        self.engine.ledger.forget([self.keys[index] for index in indices])


def _reply(text: str) -> Reply:
    kind = ChoiceLogprobs if '"kind":"choices"' in text[:20] else Completion
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise DataError(
            f"a reply in the ledger is damaged ({text[:40]!r}...); restore ledger.sqlite of this root from a copy, or "
            "move it away: the same command then asks again for what it needs"
        ) from error
