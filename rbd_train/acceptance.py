"""When a candidate bias is accepted: a paired exact test with a margin, looks that stop early, Holm over candidates.

Per item the plain and the rewritten answer are judged in the same order; `harm` counts items on which the rewrite made
the judge wrong (or raised a wrong answer's score by delta), `gain` the opposite. Nothing here knows a judge.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rbd_train.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

GAMMA = 1e-4  # what the confidence bound on the nuisance share costs (Berger and Boos 1994)
FUTILE = 0.1  # a candidate whose chance to pass at the last look is smaller is dropped
POWER = 0.9
PATHS = 4000

Fate = Literal["clear", "futile", "end", "no items"]


class Plan(NamedTuple):
    """How candidates are tested: alpha of the whole run, the margin, the shares of the items at which one looks."""

    alpha: float = 0.05
    margin: float = 0.01
    looks: tuple[float, ...] = (0.2, 0.5, 1.0)

    @property
    def spend(self) -> tuple[float, ...]:
        """Share alpha over the looks; early ones see little and cost little."""
        weights = [look**1.5 for look in self.looks]
        return tuple(weight / sum(weights) for weight in weights)


class Counts(NamedTuple):
    """Paired outcomes of one candidate; `n` is every item with a usable rewrite, whatever the judge said."""

    harm: int
    gain: int
    n: int


class Tested(NamedTuple):
    """What became of a candidate; `p` holds over its looks, `adjusted` over its rivals too."""

    counts: Counts
    p: float
    adjusted: float
    looks: int
    fate: Fate


def check_plan(plan: Plan) -> None:
    """Refuse a plan that would not hold its level.

    Raises:
        UsageError: a value out of range; names the key.
    """
    if not 0 < plan.alpha < 1 or not 0 <= plan.margin < 1:
        raise UsageError(f"alpha is {plan.alpha} (between 0 and 1), margin is {plan.margin} (0 to below 1)")
    whole = plan.looks and plan.looks[-1] == 1.0 and list(plan.looks) == sorted(set(plan.looks)) and plan.looks[0] > 0
    if not whole:
        raise UsageError(f"looks is {list(plan.looks)}: rising shares of the items, the last one 1.0")


def margin_p(harm: Any, gain: Any, n: Any, margin: float) -> "np.ndarray[Any, Any]":
    """Return one-sided exact p-values of `P(harm) - P(gain) <= margin`; arguments broadcast.

    Given d = P(harm) + P(gain) and the discordant count, harm is at most binomial with share (1 + margin/d)/2. The
    unknown d is bounded from below by Clopper-Pearson at GAMMA, and GAMMA is added (Berger and Boos 1994), so that the
    level holds for every d. With margin 0 the share is 1/2 whatever d is: the exact one-sided McNemar test.
    """
    import numpy as np
    from scipy.stats import beta, binom

    harm, gain, n = np.asarray(harm), np.asarray(gain), np.asarray(n)
    discordant = harm + gain
    if margin == 0:
        return np.asarray(binom.sf(harm - 1, discordant, 0.5))
    with np.errstate(divide="ignore", invalid="ignore"):
        lowest = np.where(discordant > 0, beta.ppf(GAMMA, discordant, n - discordant + 1), 0.0)
        share = np.minimum(1.0, (1 + margin / np.where(lowest > 0, lowest, margin)) / 2)
    return np.asarray(np.minimum(1.0, binom.sf(harm - 1, discordant, share) + GAMMA))


def holm(p: Sequence[float]) -> list[float]:
    """Adjust p-values for their number, step by step from the smallest (Holm 1979).

    Written out because statsmodels' multipletests collects garbage on every call: nine tenths of a simulation's time.
    """
    order = sorted(range(len(p)), key=lambda k: p[k])
    adjusted, highest = [0.0] * len(p), 0.0
    for step, k in enumerate(order):
        highest = max(highest, min(1.0, (len(p) - step) * p[k]))
        adjusted[k] = highest
    return adjusted


def bounds(items: int, looks: Sequence[float]) -> list[int]:
    """Return how many items have been seen at each look."""
    return [max(1, round(items * look)) for look in looks]


def look_at(
    harm: Any, gain: Any, n: Any, look: int, plan: Plan, bar: float
) -> tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]:
    """Test at one look.

    Returns:
        p-values divided by the look's share of alpha; which candidates are clear; which are futile. Being futile is
        judged by the conditional power under the effect seen so far; it never makes an acceptance more likely.
    """
    import numpy as np
    from scipy.stats import norm

    harm, gain, n = np.asarray(harm, float), np.asarray(gain, float), np.asarray(n, float)
    p = np.minimum(1.0, margin_p(harm, gain, n, plan.margin) / plan.spend[look])
    clear = p <= bar
    if look == len(plan.looks) - 1:
        return p, clear, np.zeros_like(clear)
    seen = plan.looks[look]
    size = np.maximum(n, 1)
    spread = np.sqrt(np.maximum(harm + gain + 1 - (harm - gain) ** 2 / size, 1)) / size
    z = ((harm - gain) / size - plan.margin) / spread
    needed = norm.isf(bar * plan.spend[-1])
    power = norm.cdf((z / np.sqrt(seen) - needed) / np.sqrt(1 - seen))
    return p, clear, ~clear & (power < FUTILE)


def validate(
    names: Sequence[str],
    items: int,
    observe: Callable[[Sequence[str], int, int], Mapping[str, Counts]],
    plan: Plan,
    alpha: float,
) -> dict[str, Tested]:
    """Test candidates in looks, dropping the clear and the futile ones, and adjust for their number.

    Args:
        names: the candidates.
        items: how many items there are.
        observe: counts of the named candidates on items start to stop.
        plan: looks and margin.
        alpha: what this family may spend.
    """
    import numpy as np

    counts = {name: Counts(0, 0, 0) for name in names}
    p, looks, fate = dict.fromkeys(names, 1.0), dict.fromkeys(names, 0), dict[str, Fate](dict.fromkeys(names, "end"))
    active, start = list(names), 0
    for look, stop in enumerate(bounds(items, plan.looks)):
        if not active:
            break
        seen = observe(active, start, stop)
        start = stop
        for name in active:
            counts[name] = Counts(*(a + b for a, b in zip(counts[name], seen[name], strict=True)))
            looks[name] = look + 1
        columns = np.array([counts[name] for name in active]).T
        found, clear, futile = look_at(columns[0], columns[1], columns[2], look, plan, alpha / len(names))
        for k, name in enumerate(active):
            p[name] = min(p[name], float(found[k]))
            fate[name] = "clear" if clear[k] else "futile" if futile[k] else "end"
        active = [name for k, name in enumerate(active) if not clear[k] and not futile[k]]
    adjusted = dict(zip(names, holm([p[name] for name in names]), strict=True))
    for name in names:
        fate[name] = fate[name] if counts[name].n else "no items"
    return {name: Tested(counts[name], p[name], adjusted[name], looks[name], fate[name]) for name in names}


def smallest_detectable(items: int, noise: float, candidates: int, plan: Plan, alpha: float) -> float | None:
    """Return the smallest effect that the whole design (looks, margin, Holm's first step) finds with 90 % power.

    Args:
        items: number of items at the last look.
        noise: share of decisions that a rewrite without any effect flips, half of them each way.
        candidates: size of the family.
        plan: looks and margin.
        alpha: what the family may spend.

    Returns:
        The effect (to 0.001), by bisection over simulated paths; None where even the largest possible one is missed.
    """
    low, high = plan.margin, 0.999 - noise
    if items < 1 or _power(high, items, noise, candidates, plan, alpha) < POWER:
        return None
    while high - low > 0.001:
        middle = (low + high) / 2
        if _power(middle, items, noise, candidates, plan, alpha) < POWER:
            low = middle
        else:
            high = middle
    return high


def _power(effect: float, items: int, noise: float, candidates: int, plan: Plan, alpha: float) -> float:
    import numpy as np

    generator = np.random.default_rng(0)
    shares = [noise / 2 + effect, noise / 2]
    seen, total = 0, np.zeros((PATHS, 2))
    alive, found = np.ones(PATHS, bool), np.zeros(PATHS, bool)
    for look, stop in enumerate(bounds(items, plan.looks)):
        total += generator.multinomial(stop - seen, [*shares, max(0.0, 1 - sum(shares))], PATHS)[:, :2]
        seen = stop
        _, clear, futile = look_at(total[:, 0], total[:, 1], np.full(PATHS, stop), look, plan, alpha / candidates)
        found |= alive & clear
        alive &= ~clear & ~futile
    return float(found.mean())
