"""How far P(yes) can be believed: ranking (ROC, PR), calibration, and a threshold from a development split."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from rbd_train.intervals import draws, interval
from rbd_train.metrics import Rate, mean_rate

if TYPE_CHECKING:
    from rbd_train.intervals import Array

BINS = 10


class Bin(NamedTuple):
    """One bar of a reliability plot: the mean P(yes) of its rows and the share of true Yes among them."""

    mean: float
    yes: Rate


class Graded(NamedTuple):
    """What P(yes) is worth; None where a class is missing, so that there is nothing to rank."""

    average_precision: float | None
    brier: float | None
    ece: float | None


def graded(p_yes: Sequence[float], labels: Sequence[bool]) -> Graded:
    """Measure probabilities against labels; the calibration error is the mean gap over ten bins, weighted by rows."""
    from sklearn.metrics import average_precision_score, brier_score_loss

    if not labels:
        return Graded(None, None, None)
    bins = reliability(p_yes, labels, [str(k) for k in range(len(labels))])
    gap = sum(b.yes.n * abs(b.mean - (b.yes.value or 0.0)) for b in bins) / len(labels)
    both = len(set(labels)) == 2
    return Graded(
        average_precision=float(average_precision_score(labels, p_yes)) if both else None,
        brier=float(brier_score_loss(labels, p_yes)), ece=gap,
    )  # fmt: skip


def roc_auc(p_yes: Sequence[float], labels: Sequence[bool], groups: Sequence[str]) -> Rate:
    """Return the chance that a true Yes gets more than a true No (ties half), with a cluster-bootstrap interval."""
    import numpy as np

    if len(set(labels)) < 2:
        return Rate(value=None, n=len(labels))
    names, member = np.unique(np.asarray(groups), return_inverse=True)
    levels, place = np.unique(np.asarray(p_yes), return_inverse=True)
    truth = np.asarray(labels, dtype=bool)

    def area(weights: "Array") -> "Array":
        """Take (resamples, groups) weights."""
        yes, no = np.zeros((2, len(weights), len(levels)))
        for counts, mask in ((yes, truth), (no, ~truth)):
            np.add.at(counts.T, place[mask], weights[:, member[mask]].T)
        wins = (yes * (no.cumsum(axis=1) - no / 2)).sum(axis=1)
        return np.asarray(wins / (yes.sum(axis=1) * no.sum(axis=1)))

    with np.errstate(invalid="ignore"):
        values = [area(weights) for weights in draws(len(names), len(labels))]
    known = np.concatenate(values) if values else np.zeros(0)
    low, high = interval(known[~np.isnan(known)], len(names))
    return Rate(value=float(area(np.ones((1, len(names))))[0]), n=len(labels), low=low, high=high)


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
