"""How far P(yes) can be believed: ranking (ROC, PR), calibration, and a threshold from a development split."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from rbd_train.intervals import LEVEL, draws, interval, wilson
from rbd_train.metrics import Rate, mean_rate

if TYPE_CHECKING:
    from rbd_train.intervals import Array

BINS = 10


class Bin(NamedTuple):
    """One bar of a reliability plot: the mean P(yes) of its rows and the share of true Yes among them."""

    mean: float
    yes: Rate


class Graded(NamedTuple):
    """What P(yes) is worth; undefined where a class is missing, so that there is nothing to rank."""

    average_precision: Rate
    brier: Rate
    ece: float | None


def graded(p_yes: Sequence[float], labels: Sequence[bool], groups: Sequence[str]) -> Graded:
    """Measure probabilities against labels; the calibration error is the mean gap over ten bins, weighted by rows.

    It has no interval: chance alone makes a gap of every bin, and once more of every resample's.
    """
    gap = sum(b.yes.n * abs(b.mean - (b.yes.value or 0.0)) for b in reliability(p_yes, labels, groups))
    return Graded(
        average_precision=average_precision(p_yes, labels, groups),
        brier=mean_rate([(p - label) ** 2 for p, label in zip(p_yes, labels, strict=True)], groups),
        ece=gap / len(labels) if labels else None,
    )


def average_precision(p_yes: Sequence[float], labels: Sequence[bool], groups: Sequence[str]) -> Rate:
    """Return the mean precision at the true Yes, highest P(yes) first, with a cluster-bootstrap interval.

    Where no resample differs (every Yes stands above every No), Wilson's over the groups that have a Yes bounds it.
    """
    import numpy as np
    from scipy.stats import norm

    if len(set(labels)) < 2:
        return Rate(value=None, n=len(labels))
    names, member = np.unique(np.asarray(groups), return_inverse=True)
    levels, place = np.unique(-np.asarray(p_yes), return_inverse=True)
    truth = np.asarray(labels, dtype=bool)

    def averaged(weights: "Array") -> "Array":
        """Take (resamples, groups) weights."""
        yes, shown = np.zeros((2, len(weights), len(levels)))
        for counts, mask in ((yes, truth), (shown, np.ones(len(truth), dtype=bool))):
            np.add.at(counts.T, place[mask], weights[:, member[mask]].T)
        precision = yes.cumsum(axis=1) / np.maximum(shown.cumsum(axis=1), 1)
        return np.asarray((yes * precision).sum(axis=1) / yes.sum(axis=1))

    with np.errstate(invalid="ignore"):
        drawn = [averaged(weights) for weights in draws(len(names), len(labels))]
    known = np.concatenate(drawn) if drawn else np.zeros(0)
    low, high = interval(known[~np.isnan(known)], len(names))
    value = float(averaged(np.ones((1, len(names))))[0])
    if low is not None and low == high:
        low, high = wilson(value, len(np.unique(member[truth])), float(norm.ppf(1 - (1 - LEVEL) / 2)))
    return Rate(value=value, n=len(labels), low=low, high=high)


def roc_auc(p_yes: Sequence[float], labels: Sequence[bool], groups: Sequence[str]) -> Rate:
    """Return the chance that a true Yes gets more than a true No, ties half.

    The interval is the logit's, its variance that of the rows' own chances summed by group (Obuchowski 1997): near 1 a
    bootstrap is too narrow. Where no group differs (a perfect separation), Wilson's over the rarer class's groups
    bounds it; with a class in one group alone there is none.
    """
    import numpy as np
    from scipy.special import expit, logit
    from scipy.stats import t as student

    if len(set(labels)) < 2:
        return Rate(value=None, n=len(labels))
    truth, p = np.asarray(labels, dtype=bool), np.asarray(p_yes, dtype=float)
    names, member = np.unique(np.asarray(groups), return_inverse=True)
    lead = np.where(truth, _above(p, p[~truth]), 1 - _above(p, p[truth]))  # over the rows of the other class
    area, count = float(lead[truth].mean()), len(names)
    fewest = min(len(np.unique(member[mask])) for mask in (truth, ~truth))
    if fewest < 2:
        return Rate(value=area, n=len(labels))
    share = (lead - area) / np.where(truth, truth.sum(), (~truth).sum())
    spread = float(count / (count - 1) * (np.bincount(member, weights=share) ** 2).sum()) ** 0.5
    z = float(student.ppf(1 - (1 - LEVEL) / 2, count - 1))
    if spread < 1e-9 or not 0 < area < 1:
        low, high = wilson(area, fewest, z)
    else:
        half = z * spread / (area * (1 - area))
        low, high = float(expit(logit(area) - half)), float(expit(logit(area) + half))
    return Rate(value=area, n=len(labels), low=low, high=high)


def _above(values: "Array", others: "Array") -> "Array":
    """Say per value what share of the others it is above, ties half."""
    import numpy as np

    ordered = np.sort(others)
    return (np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right")) / (2 * len(ordered))


def reliability(p_yes: Sequence[float], labels: Sequence[bool], groups: Sequence[str]) -> list[Bin]:
    """Sort rows into ten bins of equal width; empty ones are left out."""
    rows: dict[int, list[tuple[float, bool, str]]] = {}
    for p, label, group in zip(p_yes, labels, groups, strict=True):
        rows.setdefault(min(BINS - 1, int(p * BINS)), []).append((p, label, group))
    return [
        Bin(sum(p for p, *_ in part) / len(part), mean_rate([float(r[1]) for r in part], [r[2] for r in part]))
        for _, part in sorted(rows.items())
    ]


def best_threshold(p_yes: Sequence[float], labels: Sequence[bool]) -> float | None:
    """Return the threshold with the highest F1 (Yes from there on); None without a Yes.

    Midway between neighbours, so that rounding in the last digit decides nothing; of equal ones, the nearest to a half.
    """
    import numpy as np
    from sklearn.metrics import precision_recall_curve

    if not any(labels):
        return None
    precision, recall, known = precision_recall_curve(labels, p_yes)
    f1 = np.round(2 * precision * recall / np.maximum(precision + recall, 1e-12), 12)[:-1]
    middles = (known + np.concatenate([[0.0], known[:-1]])) / 2
    best = min(np.flatnonzero(f1 == f1.max()), key=lambda k: abs(middles[k] - 0.5))
    return float(middles[best])
