"""Cheap rivals of the debias loop: what a correction must beat before it means anything.

Each revises the same decisions: flip where a content-blind rule fires, ask again without feedback, and ask again with
another case's reasoning. The last two ask about the decisions that the detector flagged, so they cost the same calls.
Flipping where the detector says Yes is no cheap rival, but what the detector could do without the judge.
"""

from collections.abc import Mapping, Sequence

from eval.baselines import Rule, rule_feedback, rule_of
from rbd_train.biases import case_of
from rbd_train.debias import LABEL, Rejudge
from rbd_train.judge import Shown
from rbd_train.metrics import holm, mean_rate, paired_test
from rbd_train.records import BiasPair, BiasRecord, Example, Judgement, Revision
from rbd_train.run import Cell, Table

DETECTOR_ALONE = "flip where the detector says Yes"
Rights = list[bool | None]  # per record: right on D_bias, None if unreadable


def right_before(records: Sequence[BiasRecord]) -> Rights:
    """Say which decisions on D_bias were right."""
    return [r.biased.right(r.pair.biased.gold) if r.biased and r.pair else None for r in records]


def flipped(records: Sequence[BiasRecord], train: Sequence[Example]) -> Rights:
    """Flip a choice between two options where the bias's rule fires; whether a bias is flipped is decided on train."""
    rules = {bias: rule for bias in {record.bias for record in records} if (rule := rule_of(bias)) is not None}
    flips = {
        bias: rule for bias, rule in rules.items() if _gain([e for e in train if e.bias == bias], rule) > 0
    }  # fmt: skip
    right = right_before(records)
    for k, record in enumerate(records):
        if record.bias in flips and _chosen(record) and flips[record.bias](case_of(record, "known")):
            right[k] = not right[k]
    return right


def flipped_by_detector(records: Sequence[BiasRecord], revisions: Sequence[Revision]) -> Rights:
    """Flip a choice between two options where the detector says Yes: what its verdict is worth without the judge."""
    right = right_before(records)
    for k, (record, revision) in enumerate(zip(records, revisions, strict=True)):
        trace = revision.rounds[0].trace
        if trace is not None and trace.verdict and _chosen(record):
            right[k] = not right[k]
    return right


def rights_after(records: Sequence[BiasRecord], revisions: Sequence[Revision]) -> Rights:
    """Say which decisions on D_bias are right after the loop."""
    return [
        revision.rounds[-1].judgements[-1].right(_judged(record)[0].biased.gold)
        for record, revision in zip(records, revisions, strict=True)
    ]


def asked_again(records: Sequence[BiasRecord], revisions: Sequence[Revision], judge: Rejudge, feedback: str) -> Rights:
    """Ask again, once, about what the detector flagged.

    Args:
        records: what was decided.
        revisions: what the loop did.
        judge: the judge that decided.
        feedback: `none`, `label` (that it is biased, no more), `rule` (the content-blind rule's words), or `other`
            (another case's reasoning).
    """
    flagged = [k for k, revision in enumerate(revisions) if len(revision.rounds) > 1]
    said: list[str | None] = [None if feedback == "none" else LABEL] * len(flagged)
    if feedback == "other":
        said = [_another(records, revisions, flagged, k) for k in flagged]
    if feedback == "rule":
        said = [rule_feedback(case_of(records[k], "known"))[0] for k in flagged]
    shown = [Shown(pair.biased, biased.order) for pair, biased in (_judged(records[k]) for k in flagged)]
    before = [_judged(records[k])[1] for k in flagged]
    right = right_before(records)
    for k, judgement in zip(flagged, judge.rejudge(shown, before, said), strict=True):
        right[k] = judgement.right(_judged(records[k])[0].biased.gold)
    return right


def rivals_table(records: Sequence[BiasRecord], after: Mapping[str, Rights], train: Sequence[Example]) -> Table:
    """Compare methods on the same decisions; the first one is tested against each of the others."""
    known = {example.bias for example in train if example.quadrant is not None}
    unknown = sorted({record.bias for record in records if rule_of(record.bias) is not None} - known)
    before, groups = right_before(records), [record.group for record in records]
    (first, ours), *_ = after.items()
    tests = {
        name: paired_test([bool(x) for x in ours], [bool(x) for x in right], groups)
        for name, right in after.items() if name != first
    }  # fmt: skip
    adjusted = dict(zip(tests, holm([test.p for test in tests.values()]), strict=True))
    rows: list[tuple[Cell, ...]] = []
    for name, right in after.items():
        changed = [(bool(b), bool(a)) for b, a in zip(before, right, strict=True)]
        answered = [k for k, x in enumerate(right) if x is not None]
        kept = [k for k, (b, _) in enumerate(changed) if b]
        rows.append(
            (name, len(right), mean_rate([float(a) for _, a in changed], groups), len(answered) / len(right),
             mean_rate([float(bool(right[k])) for k in answered], [groups[k] for k in answered]),
             changed.count((False, True)), changed.count((True, False)),
             mean_rate([float(not changed[k][1]) for k in kept], [groups[k] for k in kept]),
             tests[name].p if name in tests else None, adjusted.get(name))
        )  # fmt: skip
    return Table(
        name="debias_rivals", title="The loop against cheap rivals", rows=tuple(rows),
        columns=("method", "records", "accuracy on D_bias", "answered", "accuracy, answered", "repaired", "broken",
                 "share broken", "p, the loop against it", "p (Holm)"),
        note="All biases pooled, same decisions; exact McNemar by question. Not answered (abstained, unreadable) "
        "counts as wrong. Whether a bias's choices are flipped where its rule fires was decided on training examples"
        + (f"; there is none of {', '.join(unknown)}, whose choices stay." if unknown else "."),
    )  # fmt: skip


def _gain(examples: Sequence[Example], rule: Rule) -> int:
    """Count what flipping would repair less what it would break, where it is known which decisions were right."""
    fired = [e.quadrant for e in examples if len(e.case.views[-1].options) == 2 and rule(e.case)]
    return sum({"F": 1, "T": -1}[quadrant[1]] for quadrant in fired if quadrant is not None)


def _chosen(record: BiasRecord) -> bool:
    """Tell whether every decision of a record is a choice between two options, so that it can be flipped."""
    judged = [record.biased, *([record.plain] if record.bias == "position" else [])]
    return len(_judged(record)[0].biased.options) == 2 and all(j and j.outcome.choice is not None for j in judged)


def _another(
    records: Sequence[BiasRecord], revisions: Sequence[Revision], flagged: Sequence[int], k: int
) -> str | None:
    """Return the reasoning about the next flagged decision of the same bias that asks another question."""
    turn = [*flagged[flagged.index(k) + 1 :], *flagged[: flagged.index(k)]]
    others = [o for o in turn if records[o].bias == records[k].bias and records[o].group != records[k].group]
    trace = revisions[others[0]].rounds[0].trace if others else None
    return trace.thinking if trace else None


def _judged(record: BiasRecord) -> tuple[BiasPair, Judgement]:
    assert record.pair is not None and record.biased is not None
    return record.pair, record.biased
