"""One run over the calls that are missing: workers that ask, retry and store, and a common end.

The retry policy is owned here alone: the SDK's own retries are off, since each would double ours.
"""

import asyncio
import contextlib
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from rbd_train.cost import at_most
from rbd_train.engine import Commit
from rbd_train.engines.pace import Limit, Server, Servers
from rbd_train.engines.wire import body_of, read_answer, retry_after
from rbd_train.errors import DataError, IncompleteError, UsageError
from rbd_train.exchange import TERMINAL, Completion, Reply, Request
from rbd_train.run import world_size

if TYPE_CHECKING:
    import openai

    from rbd_train.engines.http import HttpBackend

UNREACHED = ("ConnectError", "ConnectTimeout")  # of whichever httpx the SDK is built on
BUDGET_POLL_S = 0.05  # how often a call looks whether those in flight have left it room in the budget
LONGEST_PAUSE_S, LONGEST_ASKED_S = 60.0, 300.0  # own back-off; what a server's Retry-After may ask for
REASONED = 20  # replies without any reasoning after which a reasoning model counts as misconfigured
REFUSED = 20  # bad requests, before anything succeeded, after which the settings are at fault and not the rows


class Result(NamedTuple):
    """What one call came to: the reply, and the seconds that the server asked to wait.

    No reply: the server was not reached or took no calls (429, 503), which is no attempt at this row: running the same
    command on a dead server would else use the attempts up and make failures final.
    """

    reply: Reply | None
    asked_s: float = 0.0
    throttled: bool = False
    why: str = "not reached"
    made: bool = True  # false: its item's deadline passed before it could be made


class Collection:
    """One run over the missing requests: workers that ask, retry and store, and a common end."""

    def __init__(self, backend: "HttpBackend", requests: Sequence[Request], commit: Commit) -> None:
        """Prepare the run."""
        self.backend, self.settings, self.cost = backend, backend.settings, backend.cost
        self.requests, self.commit = requests, commit
        # each of several workers has its part of what is allowed over all servers
        self.concurrency = max(1, self.settings.concurrency // world_size())
        self.per_minute, self.tokens_per_minute = (
            Limit(rate / world_size() if rate else None)
            for rate in (self.settings.requests_per_minute, self.settings.tokens_per_minute)
        )
        self.unreasoned = 0
        self.failing: list[int] = []  # the calls since the last one that was answered
        self.refused: list[int] = []  # bad requests, before anything succeeded
        self.ends: dict[int, float] = {}  # until when an item may be asked; it begins with its first call
        self.no_fault: list[int] = []  # what a common end says nothing about
        self.ending = False
        self.idle: set[Any] = set()

    async def run(self, missing: Sequence[int]) -> None:
        """Answer, or end early with what the calls under way still bring."""
        if not missing:
            return
        clients = self.backend.clients(self.concurrency)
        count = min(self.concurrency, len(missing))
        places = max(1.0, self.concurrency / len(clients))
        urls = self.settings.base_url
        self.servers = Servers([Server(u, c, places, self.concurrency) for u, c in zip(urls, clients, strict=True)])
        self.todo: Iterator[int] = iter(missing[count:])
        self.writer = Writer(self.commit)
        tasks: list[asyncio.Task[None]] = []
        try:
            await self.writer.store(None, missing[:count])
            tasks = [asyncio.create_task(self._work(index)) for index in missing[:count]]
            done, under_way = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            self.ending = bool(under_way)
            for task in under_way & self.idle:
                task.cancel()
            if under_way:
                done |= (await asyncio.wait(under_way))[0]
            faults = [fault for task in done if not task.cancelled() and (fault := task.exception())]
            if faults:
                raise min(faults, key=lambda fault: not isinstance(fault, DataError | UsageError))
        finally:
            for task in tasks:  # none is left, but after an interrupt
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.writer.close()
            if self.no_fault:
                self.commit.forget(self.no_fault)
            for client in (client for own in clients for client in own):
                await client.close()

    async def _work(self, index: int | None) -> None:
        while index is not None and not self.ending:
            index = await self._answer(index)

    async def _answer(self, index: int) -> int | None:
        """Ask until there is an answer, the attempts are used up or the deadline passes; returns what to ask next."""
        calls = attempt = 0
        while True:
            calls += 1
            result, pause, reserved = await self._ask(index, calls)
            late = not result.made or asyncio.get_running_loop().time() + pause > self.ends[index]
            attempt += result.reply is not None
            final = result.reply is not None and result.reply.status in TERMINAL
            last = final or attempt == self.settings.attempts or late or self.ending
            following = next(self.todo, None) if last and not self.ending else None
            try:
                if last or result.reply is not None:
                    await self.writer.store((index, result.reply), [] if following is None else [following])
            finally:
                self.cost.release(reserved)
            self._check(index, result)
            if last:
                return following
            with self._idle():
                await asyncio.sleep(pause)

    async def _ask(self, index: int, calls: int) -> tuple[Result, float, float]:
        """Make one call, ended by the item's deadline; a throttled one keeps its place while it waits.

        Returned with it: the seconds to wait before the next, and what is set aside for the reply, which counts until
        the reply's own cost does, when that is stored.
        """
        request = self.requests[index]
        with self._idle():
            await self.per_minute.wait()
            await self.tokens_per_minute.wait(sum(at_most(request)))
            server = await self.servers.take()
        try:
            while self.cost.waits(request) and not self.ending:
                with self._idle():
                    await asyncio.sleep(BUDGET_POLL_S)
            now = asyncio.get_running_loop().time()
            ends = self.ends.setdefault(index, now + self.settings.deadline_s)
            if ends <= now:
                return Result(None, why="its deadline passed while it waited its turn", made=False), 0.0, 0.0
            reserved = self.cost.reserve(request)
            try:
                result = await self._call(server, request, min(self.settings.timeout_s, ends - now))
            except BaseException:
                self.cost.release(reserved)
                raise
            if result.reply is None:
                self.cost.release(reserved)
                reserved = 0.0
            own = min(self.settings.backoff_s * 2 ** min(calls - 1, 30), LONGEST_PAUSE_S) * random.uniform(1, 1.5)
            pause = max(own, min(result.asked_s, LONGEST_ASKED_S))
            late = asyncio.get_running_loop().time() + pause > ends
            if result.throttled and not late and not self.ending:
                with self._idle():
                    await asyncio.sleep(pause)
                pause = 0.0
        finally:
            await self.servers.give_back(server)
        return result, pause, reserved

    @contextlib.contextmanager
    def _idle(self) -> Iterator[None]:
        """Mark this worker as waiting: it may be cancelled, while a call that may be paid for is waited for."""
        task = asyncio.current_task()
        self.idle.add(task)
        try:
            yield
        finally:
            self.idle.discard(task)

    async def _call(self, server: "Server[openai.AsyncOpenAI]", request: Request, seconds: float) -> Result:
        """Make one call."""
        import openai
        from openai.types.chat import ChatCompletion

        short, cuts = self.backend.short, server.cuts
        try:
            async with asyncio.timeout(seconds):
                # not chat.completions.create: it walks through the body's types anew for every call
                answer = await next(server.clients).post(
                    "/chat/completions", cast_to=ChatCompletion,
                    body=body_of(request, self.settings.model, self.settings.logprobs),
                )  # fmt: skip
        except openai.APIConnectionError as error:  # its subclass APITimeoutError too
            timed_out = isinstance(error, openai.APITimeoutError)
            unreached = type(error.__cause__).__name__ in UNREACHED
            if unreached or not timed_out:
                server.not_reached(short(error))
            if unreached:
                return Result(None, why=short(error))
            return Result(Completion(status="timeout" if timed_out else "server_error", error=short(error)))
        except TimeoutError:
            return Result(Completion(status="timeout", error=f"no reply in {seconds:g} s"))
        except openai.APIStatusError as error:
            return self._refused(server, cuts, error)
        except (openai.OpenAIError, ValueError) as error:  # a body that is no JSON, or no completion
            return Result(Completion(status="server_error", error=short(error)))
        try:
            reply = read_answer(answer, request)
        except (AttributeError, TypeError, ValueError) as error:
            return Result(Completion(status="server_error", error=f"200 without a completion: {short(error)}"))
        server.answered()
        return Result(reply)

    def _refused(self, server: "Server[openai.AsyncOpenAI]", cuts: int, error: "openai.APIStatusError") -> Result:
        code, text = error.status_code, self.backend.short(error)
        if code in (401, 403, 404):
            raise UsageError(
                f"the server at {server.url} answers {code} for model {self.settings.model!r}: {text}; "
                f"check engine.model, engine.base_url and the key in {self.settings.api_key_env}"
            ) from error
        if code == 402:
            raise IncompleteError(
                f"the server at {server.url} answers 402, out of credit: {text}; what was answered is kept: run the "
                "same command again when there is credit"
            ) from error
        if code == 429 and "too large" in text.casefold():  # OpenAI's word for one request above the limit per minute
            return Result(Completion(status="bad_request", error=f"{code}: {text}"))
        if code == 429:
            server.refused(cuts)
        server.unreached = 0
        asked = retry_after(error.response.headers)
        if code in (429, 503):
            return Result(None, asked, code == 429, f"{code}: {text}")
        if code >= 500 or code in (408, 409, 425):
            return Result(Completion(status="server_error", error=f"{code}: {text}"), asked)
        filtered = "content_filter" in text or "content_filter" in str(error.body)
        return Result(Completion(status="content_filter" if filtered else "bad_request", error=f"{code}: {text}"))

    def _check(self, index: int, result: Result) -> None:
        """Stop where going on would only turn rows into failures: nothing succeeds, or a reasoner doesn't reason."""
        reply = result.reply
        why = getattr(reply, "error", None) or result.why
        if not result.made:
            return
        if reply is None or reply.status in ("timeout", "server_error"):
            self.failing.append(index)
        else:
            self.failing.clear()
        if len(self.failing) > self.settings.attempts * self.concurrency:
            self.no_fault = list(self.failing)  # not the rows': they start anew
            raise IncompleteError(
                f"the last {len(self.failing)} calls failed ({why}); what was answered is kept: "
                "run the same command again when the server is well"
            )
        if reply is not None and reply.status == "bad_request":
            self.refused.append(index)
            most = max(REFUSED, 2 * self.concurrency)
            if not self.backend.succeeded and len(self.refused) >= most:
                self.no_fault = self.refused
                raise UsageError(
                    f"the first {most} calls were refused as bad requests ({why}); check engine.model, "
                    "engine.base_url and the engine's settings, or the data: the same command asks for them again"
                )
        elif reply is not None and reply.status in ("ok", "length", "content_filter"):
            self.backend.succeeded = True
        if not self.settings.reasoning or self.unreasoned < 0 or not isinstance(reply, Completion):
            return
        if reply.reasoning_field:
            self.unreasoned = -1  # it can reason: look no further
        elif reply.status == "ok":
            self.unreasoned += 1
        if self.unreasoned >= REASONED:
            raise IncompleteError(
                f"the first {REASONED} replies of {self.settings.model} hold no reasoning, neither in a field nor in "
                "tags; check the server's reasoning parser, or set engine.reasoning=false; the replies are kept"
            )


class Writer:
    """Store replies off the event loop; those that come while a commit is under way share the next one."""

    def __init__(self, commit: Commit) -> None:
        """Start the one thread that writes."""
        self._commit = commit
        self._thread = ThreadPoolExecutor(1)
        self._waiting: list[tuple[tuple[int, Reply | None] | None, Sequence[int], asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None

    async def store(self, answer: tuple[int, Reply | None] | None, begun: Sequence[int] = ()) -> None:
        """Return when the reply is on the disk, with the note of what is asked next."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((answer, begun, future))
        if self._task is None:
            self._task = asyncio.create_task(self._write())
        await future

    async def close(self) -> None:
        """Write what still waits, and stop the thread."""
        if self._task is not None:
            await self._task
        self._thread.shutdown()

    async def _write(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            replies = [(answer[0], answer[1]) for answer, _, _ in batch if answer and answer[1] is not None]
            begun = [index for _, indices, _ in batch for index in indices]
            work = partial(self._commit.many, replies, begun)
            try:
                await asyncio.get_running_loop().run_in_executor(self._thread, work)
            except Exception as error:  # noqa: BLE001  # handed to those who wait
                for _, _, future in batch:
                    if not future.done():
                        future.set_exception(error)
            else:
                for _, _, future in batch:
                    if not future.done():
                        future.set_result(None)
        self._task = None
