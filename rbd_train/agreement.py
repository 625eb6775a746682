"""Agreement between raters beyond chance; None where nothing varies, so that chance explains everything."""

from collections import Counter
from collections.abc import Hashable, Sequence


def kappa(first: Sequence[Hashable], second: Sequence[Hashable]) -> float | None:
    """Return Cohen's kappa of two raters."""
    from sklearn.metrics import cohen_kappa_score

    if not first or len({*first, *second}) < 2:
        return None
    names = {name: k for k, name in enumerate(dict.fromkeys([*first, *second]))}
    return float(cohen_kappa_score([names[x] for x in first], [names[x] for x in second]))


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
