"""Any OpenAI-compatible server, or several, through the openai SDK: the settings, and what stays from call to call."""

import asyncio
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from rbd_train.cost import Cost
from rbd_train.engine import Commit, Engine
from rbd_train.engines.collection import Collection
from rbd_train.errors import UsageError
from rbd_train.exchange import Request
from rbd_train.ledger import Ledger
from rbd_train.run import world_size

if TYPE_CHECKING:
    import openai

NO_KEY = "none"  # what the SDK is given for a server without keys
CONNECTIONS = 4  # calls in flight on one client
CONNECT_S = 10.0  # seconds for a connection


@dataclass
class HttpEngine:
    """Engine that asks OpenAI-compatible servers; the key is read from the environment, never from the config."""

    model: str  # model name as the server knows it
    base_url: Any = "https://api.together.xyz/v1"  # the server's URL, or a list of several that serve the same model
    provider: str | None = None  # who serves, in the ledger's key; null: the URL, or pool for several
    api_key_env: str | None = "TOGETHER_API_KEY"  # name of the environment variable; null for a server without keys
    concurrency: int = 16  # calls in flight at once, over all servers; fewer after a 429, growing again
    attempts: int = 5  # failed calls, over all runs, after which a failure is final
    timeout_s: float = 600.0  # seconds for one call, connection included
    deadline_s: float = 3600.0  # seconds for one item in one run, retries and pauses included
    backoff_s: float = 1.0  # seconds before the first retry; doubles, with jitter, unless the server says Retry-After
    requests_per_minute: float | None = None  # over all servers
    tokens_per_minute: float | None = None  # over all servers, counted as each call's most
    price_in: float | None = None  # US$ per million prompt tokens
    price_out: float | None = None  # US$ per million completion tokens
    budget_usd: float | None = None  # US$ that this engine's calls in a stage may cost, over all its runs
    logprobs: bool = False  # ask for the log-probabilities of the verdict's token
    reasoning: bool = False  # stop where the first 20 replies hold no reasoning (a parser or a template is wrong)

    def __post_init__(self) -> None:
        """Refuse what means nothing; a key where its variable's name is due is not repeated."""
        if self.api_key_env and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", self.api_key_env):
            raise UsageError(
                "engine.api_key_env is no variable's name in capitals; put the key into the environment, not here"
            )
        given = self.base_url
        self.base_url = [given] if isinstance(given, str) else list(given or ())
        if not self.base_url or not all(re.match(r"https?://[^/]", str(url)) for url in self.base_url):
            raise UsageError(f"engine.base_url is {given!r}; give http:// or https:// and a host, or a list [a,b]")
        if any("@" in url or "?" in url for url in self.base_url):  # it goes into the ledger and into every trace
            raise UsageError("engine.base_url holds a user or a query; a key is read from engine.api_key_env alone")
        for name in ("concurrency", "attempts", "timeout_s", "deadline_s", "requests_per_minute", "tokens_per_minute"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UsageError(f"engine.{name} is {value}; it must be more than 0")
        if self.budget_usd is not None and (self.price_in is None or self.price_out is None):
            raise UsageError("engine.budget_usd needs engine.price_in and engine.price_out (US$ per million tokens)")

    def open(self, ledger: Ledger) -> Engine:
        """Return the engine.

        Raises:
            UsageError: the API key's variable is not set.
        """
        key = os.environ.get(self.api_key_env, "") if self.api_key_env else NO_KEY
        if not key and not ledger.dry_run:
            raise UsageError(
                f"engine.api_key_env names {self.api_key_env}, but the environment has no such variable; "
                f"export {self.api_key_env}=..., or set engine.api_key_env=null for a server without keys"
            )
        if world_size() > 1 and self.budget_usd is not None:
            raise UsageError("engine.budget_usd is kept by one process; leave launch out, or the budget")
        cost = Cost(self.price_in, self.price_out, self.budget_usd)
        return Engine(HttpBackend(self, key, cost), ledger, self.attempts, cost=cost)


class HttpBackend:
    """Answer requests concurrently; each reply is handed over as it comes."""

    def __init__(self, settings: HttpEngine, api_key: str, cost: Cost) -> None:
        """Prepare; no connection is made before the first call."""
        self.settings, self.cost, self._api_key = settings, cost, api_key
        self.succeeded = False  # whether any call was answered: then a bad request is its row's
        alone = settings.base_url[0] if len(settings.base_url) == 1 else "pool"
        self.identity: dict[str, JsonValue] = {
            "engine": "http", "provider": settings.provider or alone, "model": settings.model,
        }  # fmt: skip
        if settings.logprobs:  # a reply without them can't stand for one with them
            self.identity["logprobs"] = True

    def run(self, requests: Sequence[Request], missing: frozenset[int], commit: Commit) -> None:
        """Answer the missing requests.

        Raises:
            IncompleteError: no server can be reached, or the budget is spent; what was answered before is kept.
            UsageError: a server refuses the key or doesn't know the model.
        """
        work = partial(asyncio.run, Collection(self, requests, commit).run(sorted(missing)))
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            work()
        else:  # inside a notebook a loop is running already
            with ThreadPoolExecutor(1) as pool:
                pool.submit(work).result()

    def together(self, requests: Sequence[Request]) -> list[list[int]]:
        """Answer each by itself."""
        return [[index] for index in range(len(requests))]

    def close(self) -> None:
        """Nothing is held between calls."""

    def clients(self, calls: int) -> "list[list[openai.AsyncOpenAI]]":
        """Open clients for so many calls in flight, per server; the SDK's own retries are off: each would double ours.

        A client's pool looks at all of its connections for each request (httpcore), so that few share one.
        """
        import openai

        timeout = openai.Timeout(self.settings.timeout_s, connect=min(CONNECT_S, self.settings.timeout_s))
        each = -(-calls // CONNECTIONS)
        return [
            [openai.AsyncOpenAI(api_key=self._api_key or NO_KEY, base_url=url, max_retries=0, timeout=timeout)
             for _ in range(each)]
            for url in self.settings.base_url
        ]  # fmt: skip

    def short(self, error: Exception) -> str:
        """Tell an error in a line, without the key: servers echo the one that they refuse."""
        cause = f" ({error.__cause__})" if error.__cause__ else ""
        text = f"{type(error).__name__}: {error}{cause}"
        return (text if self._api_key in ("", NO_KEY) else text.replace(self._api_key, "***"))[:300]
