"""Agreement between raters beyond chance; None where nothing varies, so that chance explains everything."""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from rbd_train.intervals import bootstrap_sums, clustered_wilson
from rbd_train.metrics import Rate

if TYPE_CHECKING:
    from rbd_train.intervals import Array


def kappa(first: Sequence[Hashable], second: Sequence[Hashable]) -> float | None:
    """Return Cohen's kappa of two raters."""
    from sklearn.metrics import cohen_kappa_score

    if not first or len({*first, *second}) < 2:
        return None
    names = {name: k for k, name in enumerate(dict.fromkeys([*first, *second]))}
    return float(cohen_kappa_score([names[x] for x in first], [names[x] for x in second]))


def kappa_rate(first: Sequence[Hashable], second: Sequence[Hashable], groups: Sequence[str]) -> Rate:
    """Return Cohen's kappa with a cluster-bootstrap interval.

    Where no resample differs (always the same answer), the agreement's own interval bounds it, chance as found.
    """
    import numpy as np

    value = kappa(first, second)
    if value is None:
        return Rate(value=None, n=len(first))
    names = {name: k for k, name in enumerate(dict.fromkeys([*first, *second]))}
    size = len(names)
    cells = np.eye(size * size)[[names[a] * size + names[b] for a, b in zip(first, second, strict=True)]]

    def chance(sums: "Array") -> "Array":
        table = sums.reshape(*sums.shape[:-1], size, size)
        expected = (table.sum(axis=-1) * table.sum(axis=-2)).sum(axis=-1)
        return np.asarray(expected / table.sum(axis=(-1, -2)) ** 2)

    def found(sums: "Array") -> "Array":
        agreed = sums[..., :: size + 1].sum(axis=-1) / sums.sum(axis=-1)
        return np.asarray((agreed - chance(sums)) / (1 - chance(sums)))

    low, high = bootstrap_sums(cells, groups, found)
    if low is not None and low == high:
        same = np.array([float(a == b) for a, b in zip(first, second, strict=True)])
        expected = float(chance(cells.sum(axis=0)))
        bounds = clustered_wilson(same, groups)
        low, high = (None if bound is None else (bound - expected) / (1 - expected) for bound in bounds)
    return Rate(value=value, n=len(first), low=low, high=high)


def krippendorff(units: Sequence[Sequence[Hashable | None]]) -> float | None:
    """Return Krippendorff's alpha for nominal values; None entries are missing (Krippendorff 2011).

    The common Python package is under the GPL, so that its few lines are ours.

    Args:
        units: per unit, what each rater said.
    """
    kept = [known for unit in units if len(known := [value for value in unit if value is not None]) > 1]
    totals = Counter(value for unit in kept for value in unit)
    n = sum(totals.values())
    expected = n * n - sum(count * count for count in totals.values())
    if not expected:
        return None
    apart = sum((len(unit) ** 2 - sum(c * c for c in Counter(unit).values())) / (len(unit) - 1) for unit in kept)
    return 1 - (n - 1) * apart / expected
