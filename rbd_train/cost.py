"""What calls cost: tokens and money, summed live, told beforehand, and stopped before a budget is passed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from rbd_train.errors import IncompleteError

if TYPE_CHECKING:
    from rbd_train.exchange import Reply, Request


class Tokens(NamedTuple):
    """Tokens of a prompt and of its completion."""

    prompt: int
    completion: int


class Cost:
    """Counts tokens and US dollars of the calls behind one engine, those of earlier runs included."""

    def __init__(
        self, price_in: float | None = None, price_out: float | None = None, budget_usd: float | None = None
    ) -> None:
        """Take the prices, in US dollars per million tokens; without them money is unknown."""
        self.price_in, self.price_out, self.budget_usd = price_in, price_out, budget_usd
        self.prompt_tokens = self.completion_tokens = 0
        self.replies = self.guessed = 0  # how many were counted, and how many of them by what they may have been
        self._reserved = 0.0

    @property
    def usd(self) -> float | None:
        """What was spent so far; None without prices."""
        return self.money(Tokens(self.prompt_tokens, self.completion_tokens))

    def money(self, tokens: Tokens) -> float | None:
        """Return what so many tokens cost; None without prices."""
        if self.price_in is None or self.price_out is None:
            return None
        return (tokens.prompt * self.price_in + tokens.completion * self.price_out) / 1e6

    def add(self, request: "Request", reply: "Reply") -> None:
        """Count a reply, new or stored.

        One whose server named no usage counts as long as it may have been, and so does a call that ran out of time
        here: the server goes on, and bills it.
        """
        prompt, completion = reply.prompt_tokens, reply.completion_tokens
        self.replies += 1
        if prompt is None and reply.status in ("ok", "length", "timeout"):
            prompt, completion = at_most(request)
            self.guessed += 1
        self.prompt_tokens += prompt or 0
        self.completion_tokens += completion or 0

    def waits(self, request: "Request") -> bool:
        """Tell whether a call fits into the budget, but not beside what is set aside for those in flight."""
        if self.budget_usd is None or not self._reserved:
            return False
        together = (self.usd or 0.0) + (self.money(at_most(request)) or 0.0)
        return together <= self.budget_usd < together + self._reserved

    def reserve(self, request: "Request") -> float:
        """Set aside what a call may cost, until `release`; a budget counts what is set aside as spent.

        Raises:
            IncompleteError: the call might pass the budget.
        """
        if self.budget_usd is None:
            return 0.0
        most = self.money(at_most(request)) or 0.0
        spent = self.usd or 0.0
        if spent + self._reserved + most > self.budget_usd:
            raise IncompleteError(
                f"budget_usd is {self.budget_usd:g}: US$ {spent:.4f} are spent, and the next call may cost "
                f"{most:.4f}; what was answered is kept: raise engine.budget_usd and run the same command again"
            )
        self._reserved += most
        return most

    def release(self, reserved: float) -> None:
        """Set aside no longer what `reserve` returned."""
        self._reserved -= reserved

    def told(self) -> str:
        """Tell the sums in a few words, for a progress bar."""
        money = "" if self.usd is None else f", US$ {self.usd:.4f}"
        return f"{self.prompt_tokens + self.completion_tokens} tokens{money}"

    def forecast(self, requests: Sequence["Request"]) -> str:
        """Tell what these calls may cost at most."""
        each = [at_most(request) for request in requests]
        total = Tokens(sum(t.prompt for t in each), sum(t.completion for t in each))
        money = self.money(total)
        cost = (
            "money unknown: set engine.price_in and engine.price_out" if money is None else f"US$ {money:.2f} at most"
        )
        return (
            f"{len(requests)} calls, about {total.prompt} prompt tokens, at most {total.completion} completion tokens, "
            f"{cost}"
        )


def at_most(request: "Request") -> Tokens:
    """Bound the tokens of a call: a token is seldom shorter than three bytes, a message carries about eight more."""
    size = sum(len(message["content"].encode()) for message in request.messages)
    completion = request.sampling.max_new_tokens if request.sampling else 1
    return Tokens(size // 3 + 8 * len(request.messages), completion)
