"""P(yes) instead of Yes and No: ranking, calibration, and a threshold chosen on a development split."""

from collections.abc import Mapping, Sequence

from eval.verdicts import Verdicts
from rbd_train.calibration import best_threshold, graded, reliability, roc_auc
from rbd_train.metrics import Scored, f1_rate
from rbd_train.records import Example, uniform
from rbd_train.run import Cell, Table

Probabilities = Mapping[str, Mapping[str, float]]  # method -> case id -> P(yes)


def in_development(group: str) -> bool:
    """Put half of the questions into the development split, by a hash: the same ones in every run."""
    return uniform("development", group) < 0.5


def graded_table(examples: Sequence[Example], said: Verdicts, known: Probabilities) -> Table:
    """Say what P(yes) is worth, and what a threshold chosen on one half of the questions does on the other."""
    rows: list[tuple[Cell, ...]] = []
    for name, p in known.items():
        part = [e for e in examples if e.case.id in p]
        known_rows = ([p[e.case.id] for e in part], [e.label for e in part], [e.group for e in part])
        found, auc = graded(*known_rows), roc_auc(*known_rows)
        development = [e for e in part if in_development(e.group)]
        rest = [e for e in part if not in_development(e.group)]
        threshold = best_threshold([p[e.case.id] for e in development], [e.label for e in development])
        by_verdict = [Scored("", e.group, e.label, said[name][e.case.id]) for e in rest]
        passed = None if threshold is None else [Scored("", e.group, e.label, p[e.case.id] >= threshold) for e in rest]
        rows.append(
            (name, len(part), auc, found.average_precision, found.brier, found.ece, len(development), threshold,
             len(rest), f1_rate(by_verdict), None if passed is None else f1_rate(passed))
        )  # fmt: skip
    return Table(
        name="detection_graded", title="P(yes), and a threshold in place of the verdict", rows=tuple(rows),
        columns=("method", "cases", "ROC AUC", "average precision", "Brier", "calibration error", "development cases",
                 "threshold", "other cases", "F1, verdict", "F1, threshold"),
        note="P(yes): at the verdict's token, averaged over the samples of a case. The threshold has the best F1 on "
        "the development half of the questions; both F1 (all biases pooled) are on the other half. Intervals: 95 %, "
        "by question. Calibration error: mean gap over ten bins; few cases make it larger, so that it has no interval.",
    )  # fmt: skip


def reliability_table(examples: Sequence[Example], known: Probabilities) -> Table:
    """Show how often Yes was true, by how sure the detector was."""
    rows: list[tuple[Cell, ...]] = []
    for name, p in known.items():
        part = [e for e in examples if e.case.id in p]
        for found in reliability([p[e.case.id] for e in part], [e.label for e in part], [e.group for e in part]):
            rows.append((name, found.mean, found.yes.n, found.yes))
    return Table(
        name="detection_reliability", title="Reliability", columns=("method", "mean P(yes)", "cases", "truly Yes"),
        rows=tuple(rows), note="Ten bins of equal width; calibrated is where the two figures are equal.",
    )  # fmt: skip


def curve_table(examples: Sequence[Example], known: Probabilities) -> Table:
    """Show what each threshold finds and what it costs: the points of the ROC and the precision-recall curve."""
    rows: list[tuple[Cell, ...]] = []
    for name, p in known.items():
        part = [e for e in examples if e.case.id in p]
        yes = sum(e.label for e in part)
        levels = sorted({p[e.case.id] for e in part}, reverse=True)
        for threshold in levels[:: max(1, len(levels) // 40)]:
            flagged = [e for e in part if p[e.case.id] >= threshold]
            found = sum(e.label for e in flagged)
            rows.append(
                (name, threshold, found / yes if yes else None,
                 (len(flagged) - found) / (len(part) - yes) if len(part) > yes else None, found / len(flagged))
            )  # fmt: skip
    return Table(
        name="detection_curve", title="What each threshold finds", rows=tuple(rows),
        columns=("method", "threshold", "found (recall)", "false alarms", "precision"),
    )  # fmt: skip
