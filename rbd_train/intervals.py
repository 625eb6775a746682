"""Intervals that know which rows share a question: Wilson at the effective sample size, and the cluster bootstrap."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

T = TypeVar("T")
Interval = tuple[float | None, float | None]
LEVEL = 0.95
RESAMPLES = 2000


def clustered_wilson(values: "Array", groups: Sequence[str]) -> Interval:
    """Return Wilson's interval of a share at n / design effect, with Student's t over the groups; None with one group.

    It covers where a bootstrap of few groups or equal values doesn't (Korn and Graubard 1998; Franco et al. 2019).

    Args:
        values: (n,) of 0 and 1.
        groups: the cluster of each row.
    """
    import numpy as np
    from scipy.stats import t as student

    count, n = len(np.unique(np.asarray(groups))), len(values)
    if count < 2:
        return None, None
    z = float(student.ppf(1 - (1 - LEVEL) / 2, count - 1))
    return wilson(float(values.mean()), n / design_effect(values, groups), z)


def wilson(share: float, size: float, z: float) -> tuple[float, float]:
    """Return Wilson's interval of a share of so many rows, at their effective number; z is the quantile of its law."""
    centre = (share + z * z / (2 * size)) / (1 + z * z / size)
    half = z / (1 + z * z / size) * (share * (1 - share) / size + z * z / (4 * size * size)) ** 0.5
    # the share lies inside, whatever the last digit of the sums is
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


def adjusted_wald(more: float, less: float, size: float, groups: int) -> tuple[float, float]:
    """Return Bonett and Price's interval (2012) of the difference of two paired shares, by one outcome added to each.

    Args:
        more: share of rows that only the one has.
        less: share of rows that only the other has.
        size: rows, at their effective number.
        groups: how many there are, for Student's t; 0: each row by itself, the normal law.
    """
    from scipy.stats import norm
    from scipy.stats import t as student

    tail = 1 - (1 - LEVEL) / 2
    z = float(student.ppf(tail, groups - 1) if groups else norm.ppf(tail))
    first, second = (size * more + 1) / (size + 2), (size * less + 1) / (size + 2)
    middle, half = first - second, z * ((first + second - (first - second) ** 2) / (size + 2)) ** 0.5
    return max(-1.0, middle - half), min(1.0, middle + half)


def design_effect(values: "Sequence[float] | Array", groups: Sequence[str]) -> float:
    """Return by how much shared groups widen the variance of a mean; at least 1, and n / groups where all are alike."""
    import numpy as np

    found = np.asarray(values, dtype=float)
    names, member = np.unique(np.asarray(groups), return_inverse=True)
    count, variance = len(names), float(found.var())
    if variance < 1e-12:  # as if each group had one row
        return len(found) / count
    residual = np.bincount(member, weights=found - found.mean())
    return max(1.0, float(count / (count - 1) * (residual**2).sum() / (len(found) * variance)))


def cluster_bootstrap(
    rows: Sequence[T], groups: Sequence[str], statistic: Callable[[Sequence[T]], float | None]
) -> Interval:
    """Return the 95 % interval of any statistic over resampled groups; None with fewer than two groups.

    `bootstrap_sums` is a hundred times faster for statistics of sums.
    """
    members: dict[str, list[T]] = {}
    for row, group in zip(rows, groups, strict=True):
        members.setdefault(group, []).append(row)
    names = sorted(members)
    values = []
    for weights in draws(len(names), len(rows)):
        for draw in weights:
            drawn = [row for name, times in zip(names, draw, strict=True) for row in members[name] * int(times)]
            values.append(statistic(drawn))
    return interval([value for value in values if value is not None], len(names))


def bootstrap_sums(rows: "Array", groups: Sequence[str], statistic: Callable[["Array"], "Array"]) -> Interval:
    """Return the 95 % interval of a function of column sums over resampled groups.

    Args:
        rows: (n, k) what each row adds.
        groups: the cluster of each row.
        statistic: from sums (..., k) to (...); NaN where it is undefined.
    """
    import numpy as np

    names, member = np.unique(np.asarray(groups), return_inverse=True)
    sums = np.zeros((len(names), rows.shape[1])) if len(rows) else np.zeros((0, 0))
    np.add.at(sums, member, rows)
    weighted = [weights @ sums for weights in draws(len(names), len(rows))]
    with np.errstate(invalid="ignore", divide="ignore"):
        values = statistic(np.concatenate(weighted)) if weighted else np.zeros(0)
    return interval(values[~np.isnan(values)], len(names))


def draws(count: int, rows: int) -> Iterator["Array"]:
    """Yield (100, count) how often each group is drawn in 100 resamples, the same at every call."""
    import numpy as np

    generator = np.random.default_rng(0)
    for _ in range((RESAMPLES if rows <= 2000 else RESAMPLES // 4) // 100 if count > 1 else 0):
        drawn = generator.integers(count, size=(100, count)) + count * np.arange(100)[:, None]
        yield np.bincount(drawn.ravel(), minlength=100 * count).reshape(100, count)


def interval(values: "Sequence[float] | Array", count: int) -> Interval:
    """Return the percentile interval of resampled values, widened for few groups (Hesterberg 2015: t, n - 1)."""
    import numpy as np
    from scipy.stats import norm
    from scipy.stats import t as student

    if not len(values):
        return None, None
    tail = float(norm.cdf(-((count / (count - 1)) ** 0.5) * student.ppf(1 - (1 - LEVEL) / 2, count - 1)))
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)
