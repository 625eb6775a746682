"""Measure the debias loop: accuracy and consistency before and after, repaired and broken verdicts, calls.

In: `records.jsonl` of a judge (its training questions left out), a detector. Out: `revisions.jsonl` (Revision), tables.

    rbd debias judge=embedded
    rbd debias judge=generative engine@judge.engine=http judge.engine.model=Qwen/Qwen2.5-7B-Instruct max_rounds=3
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from eval.rivals import Rights, asked_again, flipped, right_before, rivals_table
from rbd_train.app import BaseConfig, stage
from rbd_train.debias import Decision, debias
from rbd_train.errors import DataError, UsageError
from rbd_train.judge import Judge, Shown
from rbd_train.metrics import Rate, cluster_bootstrap, macro, mean_rate, paired_test, proportion
from rbd_train.records import BiasRecord, Example, Judgement, Revision, Round
from rbd_train.run import Cell, Run, Table


@dataclass
class DebiasConfig(BaseConfig):
    """Settings of debias."""

    judge: Any = None  # the judge that decided the records
    detector: Any = None  # what looks at its decisions
    records: str | None = None  # path of the judged records; default: the output of stage judgements
    trained_on: str | None = None  # path of the detector's training examples; default: the output of stage curate
    max_rounds: int = 2  # how often a decision may be judged again
    position_calls: int = 2  # 2: each order is judged again by itself; 1: both in one call, as published
    limit: int | None = None  # records per bias; null: all
    rivals: bool = False  # compare with cheap rivals on the same decisions; costs two more calls per flagged one


@stage("debias", DebiasConfig)
def main(cfg: DebiasConfig, run: Run) -> float | None:
    """Revise, compare, write."""
    path = Path(cfg.records) if cfg.records else run.output_of("judgements", "records.jsonl")
    trained = Path(cfg.trained_on) if cfg.trained_on else run.output_of("curate", "train.jsonl")
    judged = run.read(path, BiasRecord)
    records, left_out = usable(judged, {e.group for e in run.read(trained, Example)}, cfg.limit)
    judge = cfg.judge.open(run.ledger)
    check_judge(records, judge)
    detector = cfg.detector.open(run.ledger)
    try:
        revisions = debias([decision_of(r) for r in records], judge, detector, cfg.max_rounds, cfg.position_calls)
        rivals = compare(records, revisions, [r for r in judged if r.split == "train"], judge) if cfg.rivals else {}
    finally:
        detector.close()
        judge.engine.backend.close()
    run.write("revisions.jsonl", revisions)
    run.facts |= {"detector calls": detector.calls(), "judge calls": judge.engine.calls, "judge": judge.name}
    outcomes = [outcome_of(record, revision) for record, revision in zip(records, revisions, strict=True)]
    run.table(accuracy_table(outcomes, left_out, judge))
    run.table(changes_table(outcomes))
    run.table(rounds_table(outcomes))
    if rivals:
        run.table(rivals_table(right_before(records), rivals))
        for name, right in rivals.items():
            run.figure(f"debias.method.{name}", proportion(sum(bool(r) for r in right), len(right)))
    return summarise(run, outcomes)


def compare(
    records: Sequence[BiasRecord], revisions: Sequence[Revision], train: Sequence[BiasRecord], judge: Judge
) -> dict[str, Rights]:
    """Put the loop beside its cheap rivals, and beside leaving the decisions alone."""
    last = [turn_of(record, revision.rounds[-1]).right for record, revision in zip(records, revisions, strict=True)]
    return {
        "the loop": last,
        "decisions as they were": right_before(records),
        "flip where the rule fires": flipped(records, train),
        "ask again without feedback": asked_again(records, revisions, judge, None),
        "ask again with another case's reasoning": asked_again(records, revisions, judge, "other"),
    }


class Turn(NamedTuple):
    """How a decision stood after a round: right on D_bias, and right on both; None if unreadable."""

    right: bool | None
    both: bool | None


class Outcome(NamedTuple):
    """One record's way through the loop, as right and wrong; `turns[0]` is before."""

    bias: str
    group: str
    turns: list[Turn]
    flagged: bool
    stop: str
    calls: int


def usable(
    records: Sequence[BiasRecord], trained_groups: set[str], limit: int | None
) -> tuple[list[BiasRecord], dict[str, int]]:
    """Leave out what the detector was trained on and what was imported, and count it."""
    left_out = {
        "question is in the detector's training split": 0,
        "training split": 0,
        "imported": 0,
        "over the limit": 0,
    }
    kept: list[BiasRecord] = []
    per_bias: dict[str, int] = {}
    for record in records:
        if record.pair is None:
            left_out["imported"] += 1
        elif record.split == "train":
            left_out["training split"] += 1
        elif record.group in trained_groups:
            left_out["question is in the detector's training split"] += 1
        elif limit is not None and per_bias.get(record.bias, 0) >= limit:
            left_out["over the limit"] += 1
        else:
            per_bias[record.bias] = per_bias.get(record.bias, 0) + 1
            kept.append(record)
    if not kept:
        raise DataError(f"debias: no record is left of {len(records)}; left out: {left_out}")
    return kept, left_out


def check_judge(records: Sequence[BiasRecord], judge: Judge) -> None:
    """Refuse to revise another judge's decisions."""
    for record in records:
        if record.biased is not None and record.biased.fingerprint != judge.fingerprint:
            raise UsageError(
                f"record {record.id} was decided by judge {record.biased.judge} ({record.biased.fingerprint}), but "
                f"judge= is {judge.name} ({judge.fingerprint}); name the judge that decided, or run judgements again"
            )


def decision_of(record: BiasRecord) -> Decision:
    """Turn a record into what the loop revises: for position both orders, else the view of D_bias."""
    assert record.pair is not None and record.plain is not None and record.biased is not None
    biased = (Shown(record.pair.biased, record.biased.order), record.biased)
    if record.bias == "position":
        plain = (Shown(record.pair.plain, record.plain.order), record.plain)
        return Decision(record.id, record.bias, (plain[0], biased[0]), (plain[1], biased[1]))
    return Decision(record.id, record.bias, (biased[0],), (biased[1],))


def outcome_of(record: BiasRecord, revision: Revision) -> Outcome:
    """Say right or wrong after every round (papers.md 1.2: consistency is right on both)."""
    turns = [turn_of(record, entry) for entry in revision.rounds]
    first = revision.rounds[0].trace
    return Outcome(record.bias, record.group, turns, bool(first and first.verdict), revision.stop, revision.calls)


def turn_of(record: BiasRecord, entry: Round) -> Turn:
    """Judge a round's standing decisions."""
    assert record.pair is not None and record.plain is not None
    biased = entry.judgements[-1].right(record.pair.biased.gold)
    plain_judgement: Judgement = entry.judgements[0] if record.bias == "position" else record.plain
    plain = plain_judgement.right(record.pair.plain.gold)
    return Turn(biased, None if None in (biased, plain) else bool(biased and plain))


def accuracy_table(outcomes: Sequence[Outcome], left_out: dict[str, int], judge: Judge) -> Table:
    """Show accuracy on D_bias and consistency, before and after, with a paired test."""
    rows: list[tuple[Cell, ...]] = []
    for bias in [*sorted({o.bias for o in outcomes}), "all"]:
        part = [o for o in outcomes if bias in ("all", o.bias)]
        test = paired_test([bool(o.turns[-1].right) for o in part], [bool(o.turns[0].right) for o in part])
        readable = [o for o in part if o.turns[-1].right is not None]
        rows.append(
            (bias, len(part), rate(part, 0, "right"), rate(part, -1, "right"), gain(part), test.p,
             rate(part, 0, "both"), rate(part, -1, "both"), len(readable) / len(part),
             sum(bool(o.turns[-1].right) for o in readable) / len(readable) if readable else None)
        )  # fmt: skip
    leaning = getattr(judge, "leaning", {})
    planted = f"planted leaning (nats) {dict(leaning)}" if leaning else "as it is"
    return Table(
        name="debias", title="The judge on D_bias, before and after", rows=tuple(rows),
        columns=("bias", "records", "accuracy before", "accuracy after", "gain", "p", "consistency before",
                 "consistency after", "coverage", "after, readable"),
        note=f"Judge {judge.name}: {planted}. Consistency: right on D and on D_bias. Unreadable counts as wrong. "
        f"p: exact McNemar, after against before. Left out: {left_out}.",
    )  # fmt: skip


def changes_table(outcomes: Sequence[Outcome]) -> Table:
    """Count what the loop did: flagged, repaired, broken, and how it ended."""
    rows: list[tuple[Cell, ...]] = []
    stops = ("no_bias", "max_rounds", "unreadable")
    for bias in [*sorted({o.bias for o in outcomes}), "all"]:
        part = [o for o in outcomes if bias in ("all", o.bias)]
        wrong, right = [o for o in part if not o.turns[0].right], [o for o in part if o.turns[0].right]
        repaired, broken = sum(bool(o.turns[-1].right) for o in wrong), sum(not o.turns[-1].right for o in right)
        rows.append(
            (bias, len(part), sum(o.flagged for o in part), f"{repaired} of {len(wrong)}", f"{broken} of {len(right)}",
             proportion(broken, len(right)), *(sum(o.stop == stop for o in part) for stop in stops),
             sum(o.calls for o in part))
        )  # fmt: skip
    return Table(
        name="debias_changes", title="What the loop changed", rows=tuple(rows),
        columns=("bias", "records", "flagged", "repaired", "broken", "share broken", "ended: no bias seen",
                 "ended: rounds used up", "ended: unreadable", "calls"),
        note="Repaired: right after, of those wrong before. Broken: wrong after, of those right before. "
        "Calls: the detector's and the judge's, after the first judgement.",
    )  # fmt: skip


def rounds_table(outcomes: Sequence[Outcome]) -> Table:
    """Show accuracy on D_bias after each round."""
    last = max(len(o.turns) for o in outcomes)
    rows: list[tuple[Cell, ...]] = []
    for bias in [*sorted({o.bias for o in outcomes}), "all"]:
        part = [o for o in outcomes if bias in ("all", o.bias)]
        rows.append((bias, *(rate(part, min(k, last), "right") for k in range(last))))
    columns = ("bias", *(f"after round {k}" if k else "before" for k in range(last)))
    return Table(name="debias_rounds", title="Accuracy on D_bias by round", columns=columns, rows=tuple(rows))


def rate(outcomes: Sequence[Outcome], turn: int, what: str) -> Rate:
    """Return a rate after a turn (the last one reached, where a decision ended before), clustered by question."""
    values = [o.turns[turn] if turn < len(o.turns) else o.turns[-1] for o in outcomes]
    return mean_rate([float(bool(getattr(value, what))) for value in values], [o.group for o in outcomes])


def macro_rate(outcomes: Sequence[Outcome], turn: int, what: str) -> Rate:
    """Return the mean over biases of a rate after a turn, with a cluster-bootstrap interval."""
    biases = sorted({o.bias for o in outcomes})

    def statistic(part: Sequence[Outcome]) -> float | None:
        means: dict[str, float | None] = {}
        for bias in biases:
            own = [float(bool(getattr(o.turns[min(turn, len(o.turns) - 1)], what))) for o in part if o.bias == bias]
            means[bias] = sum(own) / len(own) if own else None
        return macro(means)

    low, high = cluster_bootstrap(outcomes, [o.group for o in outcomes], statistic)
    return Rate(value=statistic(outcomes), n=len(outcomes), low=low, high=high)


def gain(outcomes: Sequence[Outcome]) -> Rate:
    """Return the change in accuracy, paired, clustered by question."""
    changes = [float(bool(o.turns[-1].right)) - float(bool(o.turns[0].right)) for o in outcomes]
    return mean_rate(changes, [o.group for o in outcomes])


def summarise(run: Run, outcomes: Sequence[Outcome]) -> float | None:
    """Keep the headline figures: macro over biases, and pooled counts."""
    by_bias = {bias: [o for o in outcomes if o.bias == bias] for bias in sorted({o.bias for o in outcomes})}
    for name, turn in (("before", 0), ("after", -1)):
        for what, title in (("right", "accuracy"), ("both", "consistency")):
            per_bias = {bias: rate(part, turn, what) for bias, part in by_bias.items()}
            pooled = rate(outcomes, turn, what)
            run.figure(f"debias.{title}_{name}", macro_rate(outcomes, turn, what))
            run.figure(f"debias.{title}_{name}_pooled", pooled)
            for bias, found in per_bias.items():
                run.figure(f"debias.{title}_{name}.{bias}", found)
    wrong, right = [o for o in outcomes if not o.turns[0].right], [o for o in outcomes if o.turns[0].right]
    run.figure("debias.repaired", proportion(sum(bool(o.turns[-1].right) for o in wrong), len(wrong)))
    run.figure("debias.broken", proportion(sum(not o.turns[-1].right for o in right), len(right)))
    run.figure("debias.gain", gain(outcomes))
    run.figure("debias.calls", Rate(value=float(sum(o.calls for o in outcomes)), n=len(outcomes)))
    return run.summary["debias.accuracy_after"].value
