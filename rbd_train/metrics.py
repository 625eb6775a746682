"""Numbers with their n, coverage and interval, over scipy, scikit-learn and statsmodels.

Undefined is None, never 0 and never NaN. A rate counts all rows (unreadable as wrong) unless its name says readable.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from rbd_train.records import Record

T = TypeVar("T")
LEVEL = 0.95
RESAMPLES = 2000


class Rate(Record):
    """A figure with the number of rows behind it and its 95 % interval; None where it is undefined."""

    value: float | None
    n: int
    low: float | None = None
    high: float | None = None


class Scored(NamedTuple):
    """One detection: the unit of resampling, the truth, and the verdict (None if unreadable)."""

    bias: str
    group: str
    label: bool
    verdict: bool | None


class Confusion(NamedTuple):
    """Counts with Yes as the positive class; an unreadable verdict is counted as the wrong one (papers.md 1.2)."""

    tp: int
    fp: int
    fn: int
    tn: int

    @property
    def accuracy(self) -> float | None:
        """Return the share of right verdicts."""
        return _ratio(self.tp + self.tn, sum(self))

    @property
    def precision(self) -> float | None:
        """Return the share of true Yes among Yes."""
        return _ratio(self.tp, self.tp + self.fp)

    @property
    def recall(self) -> float | None:
        """Return the share of found Yes among true Yes."""
        return _ratio(self.tp, self.tp + self.fn)

    @property
    def f1(self) -> float | None:
        """Return the harmonic mean of precision and recall; None if there is no Yes anywhere."""
        return _ratio(2 * self.tp, 2 * self.tp + self.fp + self.fn)


def proportion(successes: int, n: int) -> Rate:
    """Return a proportion with its Wilson interval."""
    if n == 0:
        return Rate(value=None, n=0)
    from scipy.stats import binomtest

    interval = binomtest(successes, n).proportion_ci(LEVEL, method="wilson")
    return Rate(value=successes / n, n=n, low=float(interval.low), high=float(interval.high))


def confusion(rows: Sequence[Scored]) -> Confusion:
    """Count; an unreadable verdict on a Yes is a miss, on a No a false alarm."""
    said = [(row.label, row.verdict if row.verdict is not None else not row.label) for row in rows]
    return Confusion(
        tp=said.count((True, True)), fp=said.count((False, True)),
        fn=said.count((True, False)), tn=said.count((False, False)),
    )  # fmt: skip


def macro(values: Mapping[str, float | None]) -> float | None:
    """Average over biases; undefined where one of them is."""
    known = [value for value in values.values() if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def macro_f1(rows: Sequence[Scored]) -> Rate:
    """Return the mean of the biases' F1 with a cluster-bootstrap interval (resampling groups)."""

    def statistic(parts: Sequence[Scored]) -> float | None:
        return macro(
            {bias: confusion([r for r in parts if r.bias == bias]).f1 for bias in sorted({r.bias for r in rows})}
        )

    low, high = cluster_bootstrap(rows, [row.group for row in rows], statistic)
    return Rate(value=statistic(rows), n=len(rows), low=low, high=high)


def f1_rate(rows: Sequence[Scored]) -> Rate:
    """Return F1 with a cluster-bootstrap interval."""
    low, high = cluster_bootstrap(rows, [row.group for row in rows], lambda parts: confusion(parts).f1)
    return Rate(value=confusion(rows).f1, n=len(rows), low=low, high=high)


def mean_rate(values: Sequence[float], groups: Sequence[str]) -> Rate:
    """Return a mean with a cluster-bootstrap interval, for rates over rows that share groups."""
    if not values:
        return Rate(value=None, n=0)
    pairs = list(values)
    low, high = cluster_bootstrap(pairs, groups, lambda parts: sum(parts) / len(parts) if parts else None)
    return Rate(value=sum(pairs) / len(pairs), n=len(pairs), low=low, high=high)


def cluster_bootstrap(
    rows: Sequence[T], groups: Sequence[str], statistic: Callable[[Sequence[T]], float | None]
) -> tuple[float | None, float | None]:
    """Return the 95 % percentile interval of a statistic over resampled groups; None with fewer than two groups."""
    import numpy as np

    members: dict[str, list[T]] = {}
    for row, group in zip(rows, groups, strict=True):
        members.setdefault(group, []).append(row)
    names = sorted(members)
    if len(names) < 2:
        return None, None
    generator = np.random.default_rng(0)
    values = []
    for _ in range(RESAMPLES if len(rows) <= 2000 else RESAMPLES // 4):
        drawn = generator.integers(len(names), size=len(names))
        value = statistic([row for k in drawn for row in members[names[k]]])
        if value is not None:
            values.append(value)
    if not values:
        return None, None
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


class Paired(NamedTuple):
    """Two methods on the same rows: how often only one of them was right, and the exact McNemar p."""

    only_first: int
    only_second: int
    n: int
    p: float


def paired_test(first: Sequence[bool], second: Sequence[bool]) -> Paired:
    """Compare two methods' right/wrong on the same rows by the exact McNemar test."""
    from statsmodels.stats.contingency_tables import mcnemar

    both = list(zip(first, second, strict=True))
    only_first, only_second = both.count((True, False)), both.count((False, True))
    table = [[both.count((True, True)), only_first], [only_second, both.count((False, False))]]
    return Paired(only_first, only_second, len(both), float(mcnemar(table, exact=True).pvalue))


def paired_difference(more: int, less: int, n: int) -> Rate:
    """Return (more - less) / n of paired yes/no outcomes with its adjusted Wald interval (Bonett and Price 2012)."""
    if n == 0:
        return Rate(value=None, n=0)
    from scipy.stats import norm

    first, second = (more + 1) / (n + 2), (less + 1) / (n + 2)
    half = float(norm.isf((1 - LEVEL) / 2)) * ((first + second - (first - second) ** 2) / (n + 2)) ** 0.5
    middle = first - second
    return Rate(value=(more - less) / n, n=n, low=max(-1.0, middle - half), high=min(1.0, middle + half))


def fleiss_kappa(table: Sequence[Sequence[int]]) -> Rate:
    """Return Fleiss' kappa of a table (items x categories, counts of raters); undefined for fewer than two raters."""
    if not table or sum(table[0]) < 2:
        return Rate(value=None, n=len(table))
    import numpy as np
    from statsmodels.stats.inter_rater import fleiss_kappa as kappa

    counts = np.asarray(table)
    if len(set(counts.argmax(1))) == 1 and (counts.max(1) == counts.sum(1)).all():
        return Rate(value=None, n=len(table))  # one category for all: agreement by chance is certain
    return Rate(value=float(kappa(counts)), n=len(table))


def ceiling(right_given_wrong: float | None) -> float | None:
    """Return the F1 that a detector blind to D can reach: 2p / (1 + p) with p = P(right on D | wrong on D_bias).

    The best it can do is to say Yes for every wrong decision on D_bias; a share 1 - p of those was wrong on D too.
    """
    return None if right_given_wrong is None else 2 * right_given_wrong / (1 + right_given_wrong)


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
