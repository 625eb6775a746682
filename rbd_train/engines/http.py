"""Any OpenAI-compatible server through the openai SDK; the retry policy is owned here (`max_retries=0` in the SDK)."""

import asyncio
import os
import random
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from rbd_train.engine import ChoiceLogprobs, Completion, Engine, Reply, Request, Sampling
from rbd_train.errors import DataError, IncompleteError, UsageError
from rbd_train.ledger import Ledger

if TYPE_CHECKING:
    import openai
    import tenacity

NO_KEY = "none"  # what the SDK is given for a server without keys
UNREACHED = ("ConnectError", "ConnectTimeout")  # of whichever httpx the SDK is built on
REASONING_FIELDS = ("reasoning", "reasoning_content")  # vLLM renamed the second to the first (vllm#27752)
DEAD_AFTER = 8  # failed connections in a row, with no reply in between, after which the server counts as dead


@dataclass
class HttpEngine:
    """Engine that asks an OpenAI-compatible server; the key is read from the environment, never from the config."""

    model: str  # model name as the server knows it
    base_url: str = "https://api.together.xyz/v1"
    api_key_env: str | None = "TOGETHER_API_KEY"  # name of the environment variable; null for a server without keys
    concurrency: int = 16  # calls in flight at once
    attempts: int = 5  # failed calls, over all runs, after which a failure is final
    timeout_s: float = 600.0  # seconds for one call, connection included
    backoff_s: float = 1.0  # seconds before the first retry; doubles, with jitter, unless the server says Retry-After
    logprobs: bool = False  # ask for the log-probabilities of the verdict's token

    def __post_init__(self) -> None:
        """Refuse what means nothing; a key where its variable's name is due is not repeated."""
        if self.api_key_env and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", self.api_key_env):
            raise UsageError("engine.api_key_env is no variable's name; put the key into the environment, not here")
        for name in ("concurrency", "attempts", "timeout_s"):
            if getattr(self, name) <= 0:
                raise UsageError(f"engine.{name} is {getattr(self, name)}; it must be more than 0")
        if not re.match(r"https?://[^/]", self.base_url):
            raise UsageError(f"engine.base_url is {self.base_url!r}; it starts with http:// or https:// and a host")

    def open(self, ledger: Ledger) -> Engine:
        """Return the engine.

        Raises:
            UsageError: the API key's variable is not set.
        """
        key = os.environ.get(self.api_key_env, "") if self.api_key_env else NO_KEY
        if not key:
            raise UsageError(
                f"engine.api_key_env names {self.api_key_env}, but the environment has no such variable; "
                f"export {self.api_key_env}=..., or set engine.api_key_env=null for a server without keys"
            )
        return Engine(HttpBackend(self, key), ledger, self.attempts)


class HttpBackend:
    """Answer requests concurrently; each reply is handed over as it comes."""

    def __init__(self, settings: HttpEngine, api_key: str) -> None:
        """Prepare; no connection is made before the first call."""
        self.settings, self._api_key = settings, api_key
        self.identity: dict[str, JsonValue] = {
            "engine": "http", "provider": settings.base_url, "model": settings.model,
        }  # fmt: skip
        self._failures = 0

    def run(self, requests: Sequence[Request], missing: frozenset[int], commit: Callable[[int, Reply], None]) -> None:
        """Answer the missing requests.

        Raises:
            IncompleteError: the server is dead; what it answered before is kept.
            UsageError: the server refuses the key or doesn't know the model.
        """
        work = partial(asyncio.run, self._run(requests, missing, commit))
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            work()
        else:  # inside a notebook a loop is running already
            with ThreadPoolExecutor(1) as pool:
                pool.submit(work).result()

    def close(self) -> None:
        """Nothing is held between calls."""

    async def _run(
        self, requests: Sequence[Request], missing: frozenset[int], commit: Callable[[int, Reply], None]
    ) -> None:
        import openai

        todo = iter(sorted(missing))
        self._failures = 0
        client = openai.AsyncOpenAI(
            api_key=self._api_key, base_url=self.settings.base_url, max_retries=0, timeout=self.settings.timeout_s
        )

        async def worker() -> None:
            for index in todo:
                await self._answer(client, requests[index], partial(commit, index))

        try:
            async with client, asyncio.TaskGroup() as group:
                for _ in range(min(self.settings.concurrency, len(missing))):
                    group.create_task(worker())
        except BaseExceptionGroup as group:  # raised inside except*, it would be wrapped again (Python before 3.11.4)
            known = group.subgroup((DataError, IncompleteError, UsageError))
            if known is None:
                raise
            fault = known.exceptions[0]
        else:
            return
        raise fault

    async def _answer(self, client: "openai.AsyncOpenAI", request: Request, commit: Callable[[Reply], None]) -> None:
        import tenacity

        async def once() -> tuple[Reply | None, float]:
            reply, pause = await self._call(client, request)
            if reply is not None:
                commit(reply)
            return reply, pause

        def failed(result: tuple[Reply | None, float]) -> bool:
            return result[0] is None or result[0].status in ("empty", "timeout", "server_error")

        await tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self.settings.attempts),
            wait=self._wait,
            retry=tenacity.retry_if_result(failed),
            retry_error_callback=lambda state: None,  # the failure is in the ledger, as a status
        )(once)

    def _wait(self, state: "tenacity.RetryCallState") -> float:
        asked = float(state.outcome.result()[1]) if state.outcome else 0.0
        own = min(self.settings.backoff_s * 2 ** (state.attempt_number - 1), 60.0) * random.uniform(1, 1.5)
        return float(max(asked, own))

    async def _call(self, client: "openai.AsyncOpenAI", request: Request) -> tuple[Reply | None, float]:
        """Make one call; returns the reply, failed or not, and the seconds the server asked to wait.

        The reply is None where the server was not reached: that is no attempt, or running the same command on a dead
        server would use the attempts up and make failures final.
        """
        import openai

        key = self._api_key
        try:
            async with asyncio.timeout(self.settings.timeout_s):
                answer = await client.chat.completions.create(**_body(self.settings, request))
        except openai.APIConnectionError as error:  # its subclass APITimeoutError too
            timed_out = isinstance(error, openai.APITimeoutError)
            unreached = type(error.__cause__).__name__ in UNREACHED
            if unreached or not timed_out:
                self._failures += 1
                if self._failures >= DEAD_AFTER:
                    raise IncompleteError(
                        f"the server at {self.settings.base_url} can't be reached ({_short(error, key)}); "
                        "what it answered is kept: run the same command again when it is back"
                    ) from error
            if unreached:
                return None, 0.0
            return Completion(status="timeout" if timed_out else "server_error", error=_short(error, key)), 0.0
        except TimeoutError:
            return Completion(status="timeout", error=f"no reply in {self.settings.timeout_s} s"), 0.0
        except openai.APIStatusError as error:
            return self._refused(error)
        except (openai.OpenAIError, ValueError) as error:  # a body that is no JSON, or no completion
            return Completion(status="server_error", error=_short(error, key)), 0.0
        self._failures = 0
        try:
            return _read(answer, request), 0.0
        except (AttributeError, TypeError, ValueError) as error:  # the SDK passes any JSON on, unchecked
            return Completion(status="server_error", error=f"200 without a completion: {_short(error, key)}"), 0.0

    def _refused(self, error: "openai.APIStatusError") -> tuple[Reply, float]:
        self._failures = 0
        code, key = error.status_code, self._api_key
        text = _short(error, key)
        if code in (401, 403, 404):
            raise UsageError(
                f"the server at {self.settings.base_url} answers {code} for model {self.settings.model!r}: {text}; "
                f"check engine.model, engine.base_url and the key in {self.settings.api_key_env}"
            ) from error
        if code == 429 or code >= 500 or code in (408, 409, 425):
            return Completion(status="server_error", error=f"{code}: {text}"), _retry_after(error.response.headers)
        filtered = "content_filter" in text or "content_filter" in str(error.body)
        return Completion(status="content_filter" if filtered else "bad_request", error=f"{code}: {text}"), 0.0


def _body(settings: HttpEngine, request: Request) -> dict[str, Any]:
    messages = [dict(message) for message in request.messages]
    if request.sampling is None:
        if any(len(choice.split()) != 1 for choice in request.choices):
            raise UsageError("over HTTP only one-token choices have log-probabilities; use a local engine, or letters")
        return {
            "model": settings.model, "messages": messages, "max_tokens": 1, "temperature": 0.0,
            "logprobs": True, "top_logprobs": 20,
        }  # fmt: skip
    sampling: Sampling = request.sampling
    body: dict[str, Any] = {
        "model": settings.model, "messages": messages, "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature, "top_p": sampling.top_p,
    }  # fmt: skip
    if sampling.temperature > 0:
        body["seed"] = sampling.sample
    if settings.logprobs and sampling.watch:
        body |= {"logprobs": True, "top_logprobs": 20}
    return body


def _read(answer: Any, request: Request) -> Reply:
    """Turn a 200 into a reply; gateways answer 200 with `choices: null` and an error body (openai-agents#2850)."""
    choices = getattr(answer, "choices", None)
    if not choices:
        return Completion(status="server_error", error=f"200 without choices: {str(answer)[:300]}")
    choice = choices[0]
    if request.sampling is None:
        return _read_logprobs(choice, request.choices)
    content = choice.message.content
    extra = choice.message.model_extra or {}
    field = next((name for name in REASONING_FIELDS if extra.get(name)), None)
    finish = choice.finish_reason
    if finish == "content_filter":
        status = "content_filter"
    elif finish == "length":
        status = "length"
    elif not (content or "").strip():
        status = "empty"
    else:
        status = "ok"
    usage = answer.usage
    return Completion(
        status=status,  # type: ignore[arg-type]
        text=content or "",
        reasoning=extra[field] if field else None,
        reasoning_field=field or ("tags" if "</think>" in (content or "") else None),
        finish_reason=finish,
        prompt_tokens=usage.prompt_tokens if usage else None,
        completion_tokens=usage.completion_tokens if usage else None,
        watched=_watched(choice, request.sampling.watch),
    )


def _watched(choice: Any, words: Sequence[str]) -> dict[str, float] | None:
    content = choice.logprobs.content if choice.logprobs else None
    for step in reversed(content or []):
        if step.token.strip() in words:
            seen = {top.token.strip(): top.logprob for top in reversed(step.top_logprobs)}
            floor = min(seen.values(), default=step.logprob)
            return {word: seen.get(word, floor) for word in words}  # a word beyond the top 20 gets their floor
    return None


def _read_logprobs(choice: Any, options: Sequence[str]) -> Reply:
    content = choice.logprobs.content if choice.logprobs else None
    if not content or not content[0].top_logprobs:
        return Completion(status="bad_request", error="the server returned no log-probabilities")
    seen = {top.token.strip(): top.logprob for top in reversed(content[0].top_logprobs)}
    floor = min(seen.values())
    missing = tuple(option not in seen for option in options)
    sums = tuple(seen.get(option, floor) for option in options)  # a missing choice is bounded, not minus infinity
    return ChoiceLogprobs(sums=sums, tokens=(1,) * len(options), bounds=missing)


def _retry_after(headers: Any) -> float:
    try:
        if "retry-after-ms" in headers:
            return float(headers["retry-after-ms"]) / 1000
        return float(headers.get("retry-after", 0))
    except ValueError:  # an HTTP date: the back-off stands in
        return 0.0


def _short(error: Exception, key: str) -> str:
    """Tell an error in a line, without the key: servers echo the one that they refuse."""
    cause = f" ({error.__cause__})" if error.__cause__ else ""
    text = f"{type(error).__name__}: {error}{cause}"
    return (text if key == NO_KEY else text.replace(key, "***"))[:300]
