"""Numbers with their n, coverage and interval, over scipy, scikit-learn and statsmodels.

Undefined is None, never 0 and never NaN. A rate counts all rows (unreadable as wrong) unless its name says readable.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rbd_train.intervals import LEVEL, adjusted_wald, bootstrap_sums, clustered_wilson, design_effect, wilson
from rbd_train.intervals import cluster_bootstrap as cluster_bootstrap
from rbd_train.records import Record

if TYPE_CHECKING:
    from rbd_train.intervals import Array


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
    """Counts with Yes as the positive class; an unreadable verdict is counted as the wrong one (arXiv 2505.17100)."""

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
    import numpy as np

    biases = sorted({row.bias for row in rows})
    if not biases:
        return Rate(value=None, n=0)
    counts = np.zeros((len(rows), len(biases), 3))  # per row and bias: tp, fp, fn
    for k, row in enumerate(rows):
        counts[k, biases.index(row.bias)] = _f1_counts(row)
    value = macro({bias: confusion([r for r in rows if r.bias == bias]).f1 for bias in biases})
    low, high = bootstrap_sums(
        counts.reshape(len(rows), -1), [row.group for row in rows],
        lambda sums: _f1(sums.reshape(*sums.shape[:-1], len(biases), 3)).mean(axis=-1),
    )  # fmt: skip
    if value is not None and low == high:  # no resample differs: what the biases' own intervals leave open
        parts = [f1_rate([r for r in rows if r.bias == bias]) for bias in biases]
        low, high = (
            macro({str(k): r.low for k, r in enumerate(parts)}),
            macro({str(k): r.high for k, r in enumerate(parts)}),
        )
    return Rate(
        value=value, n=len(rows), low=low if value is not None else None, high=high if value is not None else None
    )


def f1_rate(rows: Sequence[Scored]) -> Rate:
    """Return F1 with a cluster-bootstrap interval.

    Where every resample gives the same F1 (all verdicts right, say), the bootstrap knows nothing: then F1 = 2J/(1+J)
    with J = tp/(tp+fp+fn), a share whose Wilson interval over the groups that have a Yes bounds it.
    """
    import numpy as np
    from scipy.stats import norm

    value = confusion(rows).f1
    if value is None:
        return Rate(value=None, n=len(rows))
    low, high = bootstrap_sums(np.array([_f1_counts(row) for row in rows]), [row.group for row in rows], _f1)
    if low is not None and low == high:
        size = len({row.group for row in rows if any(_f1_counts(row))})
        bounds = wilson(value / (2 - value), size, float(norm.ppf(1 - (1 - LEVEL) / 2)))
        low, high = (2 * j / (1 + j) for j in bounds)
    return Rate(value=value, n=len(rows), low=low, high=high)


def mean_rate(values: Sequence[float], groups: Sequence[str]) -> Rate:
    """Return a mean over rows that share groups, with an interval that knows so; one group gives no interval.

    Shares (values 0 and 1) take Wilson's interval at the effective sample size, other values the cluster bootstrap.
    """
    import numpy as np

    if not values:
        return Rate(value=None, n=0)
    found = np.asarray(values, dtype=float)
    if not np.isin(found, (0.0, 1.0)).all():
        rows = np.column_stack([found, np.ones(len(found))])
        low, high = bootstrap_sums(rows, groups, lambda sums: sums[..., 0] / sums[..., 1])
    else:
        low, high = clustered_wilson(found, groups)
    return Rate(value=float(found.mean()), n=len(values), low=low, high=high)


def accuracy_rate(rows: Sequence[Scored]) -> Rate:
    """Return the share of right verdicts, with an interval that knows shared groups."""
    return mean_rate([float(row.verdict == row.label) for row in rows], [row.group for row in rows])


def precision_rate(rows: Sequence[Scored]) -> Rate:
    """Return the share of true Yes among Yes, as the counts have it: an unreadable verdict on a No is a false alarm."""
    said = [row for row in rows if row.verdict or (row.verdict is None and not row.label)]
    return mean_rate([float(row.label) for row in said], [row.group for row in said])


def recall_rate(rows: Sequence[Scored]) -> Rate:
    """Return the share of found Yes among true Yes; an unreadable verdict finds nothing."""
    yes = [row for row in rows if row.label]
    return mean_rate([float(row.verdict is True) for row in yes], [row.group for row in yes])


def coverage_rate(rows: Sequence[Scored]) -> Rate:
    """Return the share of verdicts that can be read."""
    return mean_rate([float(row.verdict is not None) for row in rows], [row.group for row in rows])


class Paired(NamedTuple):
    """Two methods on the same rows: how often only one of them was right, the exact p, and its mid-p variant.

    `size` is the effective number of rows: n over the design effect of their differences.
    """

    only_first: int
    only_second: int
    n: int
    p: float
    mid_p: float
    size: float


def paired_test(first: Sequence[bool], second: Sequence[bool], groups: Sequence[str] | None = None) -> Paired:
    """Compare two methods' right/wrong on the same rows by the exact McNemar test, two-sided.

    With groups, the signs of whole groups are flipped: rows of one question count together, and for groups of one row
    this is McNemar's test. The mid-p variant counts half of what is as extreme as the found (Fagerland et al. 2013).
    """
    both = list(zip(first, second, strict=True))
    lead: dict[Any, int] = {}
    for k, ((a, b), group) in enumerate(zip(both, groups or range(len(both)), strict=True)):
        lead[group if groups else k] = lead.get(group if groups else k, 0) + int(a) - int(b)
    p, mid_p = _sign_flip([abs(value) for value in lead.values() if value], abs(sum(lead.values())))
    size = float(len(both))
    if groups and size:
        differences = [int(a) - int(b) for a, b in both]
        size = size / design_effect(differences, groups) if len(set(groups)) > 1 else 1.0
    return Paired(both.count((True, False)), both.count((False, True)), len(both), p, mid_p, size)


def holm(values: Sequence[float | None]) -> list[float | None]:
    """Correct p-values for their number (Holm); an undefined one stays so and isn't counted."""
    from statsmodels.stats.multitest import multipletests

    known = [p for p in values if p is not None]
    corrected = iter(multipletests(known, method="holm")[1] if known else ())
    return [None if p is None else float(next(corrected)) for p in values]


def detectable(test: Paired, power: float = 0.8) -> float | None:
    """Return the smallest paired difference that a test's rows would show with this power at 5 %; None if none can be.

    Connor's formula (1987): n = (z_a sqrt(d) + z_b sqrt(d - x^2))^2 / x^2 with d the share of discordant rows, and n
    their effective number, since the test goes by question.
    """
    from scipy.optimize import brentq
    from scipy.stats import norm

    discordant, n = test.only_first + test.only_second, test.size
    if discordant == 0:
        return None
    share, z_a, z_b = discordant / test.n, float(norm.ppf(1 - (1 - LEVEL) / 2)), float(norm.ppf(power))

    def lacking(x: float) -> float:
        return float(x * n**0.5 - z_a * share**0.5 - z_b * max(0.0, share - x * x) ** 0.5)

    return float(brentq(lacking, 0.0, share)) if lacking(share) > 0 else None


def paired_difference(more: int, less: int, n: int) -> Rate:
    """Return (more - less) / n of paired yes/no outcomes with its adjusted Wald interval (Bonett and Price 2012)."""
    if n == 0:
        return Rate(value=None, n=0)
    low, high = adjusted_wald(more / n, less / n, n, 0)
    return Rate(value=(more - less) / n, n=n, low=low, high=high)


def paired_change(before: Sequence[bool], after: Sequence[bool], groups: Sequence[str]) -> Rate:
    """Return how the share of true outcomes changes on the same rows, with an interval that knows shared groups.

    A change may be of either sign even where all that were seen have one: no share's interval, no bootstrap of them.
    """
    changes = [int(b) - int(a) for a, b in zip(before, after, strict=True)]
    if not changes:
        return Rate(value=None, n=0)
    n, count = len(changes), len(set(groups))
    if count < 2:
        return Rate(value=sum(changes) / n, n=n)
    size = n / design_effect(changes, groups)
    low, high = adjusted_wald(changes.count(1) / n, changes.count(-1) / n, size, count)
    return Rate(value=sum(changes) / n, n=n, low=low, high=high)


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


def _f1_counts(row: Scored) -> tuple[int, int, int]:
    """Say what a row adds to tp, fp and fn."""
    counts = confusion([row])
    return counts.tp, counts.fp, counts.fn


def _f1(sums: "Array") -> "Array":
    """Return F1 of (..., 3) sums of tp, fp, fn; NaN where there is no Yes."""
    return 2 * sums[..., 0] / (2 * sums[..., 0] + sums[..., 1] + sums[..., 2])  # type: ignore[no-any-return]


def _sign_flip(sizes: Sequence[int], found: int) -> tuple[float, float]:
    """Return P(|T| >= found) and its mid-p for T the sum of sizes with signs drawn by coin; exact."""
    import numpy as np
    from scipy.signal import convolve
    from scipy.stats import binom

    law = np.ones(1)  # of (T + sum of sizes) / 2
    for size, count in sorted(Counter(sizes).items()):
        part = np.zeros(size * count + 1)
        part[::size] = binom.pmf(np.arange(count + 1), count, 0.5)
        law = part if len(law) == 1 else np.clip(convolve(law, part), 0.0, 1.0)
    steps = (sum(sizes) - found) // 2  # T <= -found
    p = 1.0 if found == 0 else 2 * float(law[: steps + 1].sum())
    return min(1.0, p), min(1.0, p) - float(law[steps]) * (1.0 if found else 0.5)


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
