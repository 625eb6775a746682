"""How fast servers are asked: places that shrink on 429 and grow again, servers in turn, limits per minute."""

import asyncio
import itertools
from collections.abc import Sequence
from typing import Generic, TypeVar

from rbd_train.errors import IncompleteError

DEAD_AFTER = 8  # failed connections in a row, with no reply in between, after which a server counts as dead
C = TypeVar("C")


class Server(Generic[C]):
    """One server: its clients, asked in turn, and how many calls it takes at once.

    Additive increase, multiplicative decrease, as in TCP: a 429 halves the places, but only once for all the calls that
    were under way by then; every reply adds a share, so that a full round of replies adds one place.
    """

    def __init__(self, url: str, clients: Sequence[C], places: float, ceiling: int) -> None:
        """Start with so many places, and never have more than the ceiling."""
        self.url, self.places, self.ceiling = url, places, ceiling
        self.clients = itertools.cycle(clients)
        self.busy = self.unreached = self.cuts = 0
        self.dead = ""  # why it counts as dead

    def answered(self) -> None:
        """Note a reply: the server is alive and can take a little more."""
        self.unreached = 0
        self.places = min(float(self.ceiling), self.places + 1 / self.places)

    def refused(self, cuts: int) -> None:
        """Note a 429 to a call that began after so many cuts."""
        self.unreached = 0
        if cuts == self.cuts:
            self.places = max(1.0, self.places / 2)
            self.cuts += 1

    def not_reached(self, why: str) -> None:
        """Note a failed connection."""
        self.unreached += 1
        if self.unreached >= DEAD_AFTER:
            self.dead = why


class Servers(Generic[C]):
    """Several servers of one model, asked in turn; those that die are left out."""

    def __init__(self, servers: Sequence[Server[C]]) -> None:
        """Take the servers."""
        self.servers = list(servers)
        self._changed = asyncio.Condition()
        self._turn = 0

    async def take(self) -> Server[C]:
        """Wait for a free place and take it.

        Raises:
            IncompleteError: every server is dead.
        """
        async with self._changed:
            while (server := self._free()) is None:
                await self._changed.wait()
            server.busy += 1
        return server

    async def give_back(self, server: Server[C]) -> None:
        """Free a place, and let those who wait look again."""
        server.busy -= 1
        async with self._changed:
            self._changed.notify_all()

    def _free(self) -> Server[C] | None:
        alive = [server for server in self.servers if not server.dead]
        if not alive:
            told = "; ".join(f"{server.url} ({server.dead})" for server in self.servers)
            raise IncompleteError(
                f"no server can be reached: {told}; what was answered is kept: run the same command again when"
                " one is back"
            )
        self._turn += 1
        in_turn = [alive[(self._turn + k) % len(alive)] for k in range(len(alive))]
        free = [server for server in in_turn if server.busy < int(server.places)]
        return min(free, key=lambda server: server.busy / server.places, default=None)


class Limit:
    """So much per minute, spread evenly: no burst that a server's sliding window would count twice."""

    def __init__(self, per_minute: float | None) -> None:
        """Take the limit; None is none."""
        self._seconds_each = 60.0 / per_minute if per_minute else 0.0
        self._next = 0.0

    async def wait(self, amount: float = 1.0) -> None:
        """Wait until so much more may be sent."""
        now = asyncio.get_running_loop().time()
        due = max(now, self._next)
        self._next = due + amount * self._seconds_each
        if due > now:
            await asyncio.sleep(due - now)
