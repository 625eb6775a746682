"""Measure the debias loop: accuracy and consistency before and after, repaired and broken verdicts, calls.

In: `records.jsonl` of a judge (its training questions left out), a detector. Out: `revisions.jsonl` (Revision), tables.

    rbd debias judge=embedded
    rbd debias judge=generative engine@judge.engine=http judge.engine.model=Qwen/Qwen2.5-7B-Instruct max_rounds=3
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from eval.debias_tables import (
    Cost,
    Outcome,
    accuracy_table,
    changes_table,
    cost_table,
    gain,
    macro_gain,
    macro_rate,
    outcome_of,
    parts_of,
    rate,
    readable,
    readable_table,
    rounds_table,
    sensitive,
    share,
    unbiased_table,
)
from eval.judge_baselines import BASELINES, panel, rights
from eval.rivals import (
    DETECTOR_ALONE,
    Rights,
    asked_again,
    flipped,
    flipped_by_detector,
    right_before,
    rights_after,
    rivals_table,
)
from rbd_train.app import BaseConfig, stage
from rbd_train.debias import Decision, debias
from rbd_train.detector import Detector, EngineDetector, TemplateTeacher
from rbd_train.errors import DataError, UsageError
from rbd_train.judge import Judge, Shown
from rbd_train.metrics import Rate, mean_rate
from rbd_train.records import BiasRecord, Example, Judgement, Revision
from rbd_train.run import Run
from rbd_train.tables import counted


@dataclass
class DebiasConfig(BaseConfig):
    """Settings of debias."""

    judge: Any = None  # the judge that decided the records
    detector: Any = None  # what looks at its decisions
    records: str | None = None  # path of the judged records; default: the output of stage judgements
    trained_on: list[str] = field(default_factory=list)  # paths of what the detector was trained on; default: curate's
    max_rounds: int = 2  # how often a decision may be judged again
    position_calls: int = 2  # 2: each order is judged again by itself; 1: both in one call, as published
    limit: int | None = None  # records per bias; null: all
    feedback: str = "reasoning"  # what the judge reads of the detector's reply: reasoning, label, or none (ask again)
    without_name: bool = False  # the detector isn't told the judge's name
    unbiased: bool = True  # run the loop on D too, where nothing is to be repaired, to know its harm
    rivals: bool = False  # compare with cheap rivals on the same decisions; costs four more calls per flagged one
    baselines: list[str] = field(default_factory=list)  # abstain, warning, plan, calibrated: on the same items
    compare: list[str] = field(default_factory=list)  # runs whose judges decided the same pairs: a row each, and a vote


@stage("debias", DebiasConfig)
def main(cfg: DebiasConfig, run: Run) -> float | None:
    """Revise, compare, write."""
    if cfg.max_rounds < 1:
        raise UsageError(f"max_rounds is {cfg.max_rounds}; a decision is judged again once at least")
    path = Path(cfg.records) if cfg.records else run.output_of("judgements", "records.jsonl")
    trained = [Path(file) for file in cfg.trained_on] or [run.output_of("curate", "train.jsonl")]
    judged = run.read(path, BiasRecord)
    train = [example for file in trained for example in run.read(file, Example)]
    records, left_out = usable(judged, {example.group for example in train}, cfg.limit)
    judge = cfg.judge.open(run.ledger)
    check_judge(records, judge)
    others = {name: other_judge(run, name, records) for name in cfg.compare}
    detector = cfg.detector.open(run.ledger)
    try:
        started = time.perf_counter()
        revise = partial(debias, judge=judge, detector=detector, max_rounds=cfg.max_rounds, feedback=cfg.feedback,
                         position_calls=cfg.position_calls, without_name=cfg.without_name)  # fmt: skip
        revisions = revise([decision_of(r) for r in records])
        cost = cost_of(judge, detector, time.perf_counter() - started, revisions)
        cued = [r for r in records if r.bias != "position"] if cfg.unbiased else []
        unbiased = revise([decision_on_d(r) for r in cued])
        rivals = compare(records, revisions, train, judge) if cfg.rivals else {}
        rivals |= baselines(cfg.baselines, records, revisions, judge, others)
    finally:
        detector.close()
        judge.engine.backend.close()
    run.write("revisions.jsonl", revisions)
    run.facts |= {"detector calls": detector.calls(), "judge calls": judge.engine.calls, "judge": judge.name}
    run.facts |= {"planted": getattr(judge, "planted", {}), "records": run.named(path)}
    outcomes = [outcome_of(record, revision) for record, revision in zip(records, revisions, strict=True)]
    told = accuracy_table(outcomes, left_out, judge), readable_table(outcomes), changes_table(outcomes)
    for table in (*told, rounds_table(outcomes)):
        run.table(table)
    run.table(cost_table(outcomes, cost))
    if cued:
        run.write("unbiased.jsonl", unbiased)
        run.table(unbiased_table(cued, unbiased))
    if rivals:
        run.table(rivals_table(records, rivals, train))
        for name, right in rivals.items():
            share = mean_rate([float(bool(r)) for r in right], [record.group for record in records])
            run.figure(f"debias.method.{name}", share)
    return summarise(run, outcomes, cued, unbiased)


def compare(
    records: Sequence[BiasRecord], revisions: Sequence[Revision], train: Sequence[Example], judge: Judge
) -> dict[str, Rights]:
    """Put the loop beside its cheap rivals, and beside leaving the decisions alone."""
    traces = [entry.trace for revision in revisions for entry in revision.rounds]
    again = {
        "ask again without feedback": "none", "ask again with another case's reasoning": "other",
        "ask again with the label only": "label", "ask again with the rule's words": "rule",
    }  # fmt: skip
    if any(trace.verdict and not trace.thinking for trace in traces if trace):  # a verdict alone: there is none to give
        del again["ask again with another case's reasoning"]
    return {
        "the loop": rights_after(records, revisions),
        "decisions as they were": right_before(records),
        "flip where the rule fires": flipped(records, train),
        DETECTOR_ALONE: flipped_by_detector(records, revisions),
        **{name: asked_again(records, revisions, judge, feedback) for name, feedback in again.items()},
    }


def baselines(
    names: Sequence[str], records: Sequence[BiasRecord], revisions: Sequence[Revision], judge: Judge,
    others: Mapping[str, list[Judgement]],
) -> dict[str, Rights]:  # fmt: skip
    """Decide the same items by the baselines named, by other judges, and by the vote of all of them.

    Raises:
        UsageError: there is no such baseline.
    """
    for name in names:
        if name not in BASELINES:
            raise UsageError(f"baselines: there is no {name!r}; choose from {', '.join(BASELINES)}")
    found = {"the loop": rights_after(records, revisions)} if names or others else {}
    found |= {name.replace("_", " "): BASELINES[name](records, judge) for name in names}
    for name, judged in others.items():
        found[f"judge {judged[0].judge} ({name})"] = rights(records, judged)
    if len(others) > 1:
        found[f"panel vote of {1 + len(others)} judges"] = panel(records, list(others.values()))
    return found


def other_judge(run: Run, name: str, records: Sequence[BiasRecord]) -> list[Judgement]:
    """Read what another run's judge decided on the same items of D_bias, in the same order.

    Raises:
        DataError: it has not decided one of them.
    """
    path = run.output_of("judgements", "records.jsonl", name)
    theirs = {record.id: record for record in run.read(path, BiasRecord)}
    for record in records:
        known = theirs.get(record.id)
        if known is None or known.biased is None or known.pair != record.pair:
            raise DataError(f"{path}: no decision on record {record.id}, or on another text; judge the same pairs")
    return [judged for record in records if (judged := theirs[record.id].biased) is not None]


def cost_of(judge: Judge, detector: Detector, seconds: float, revisions: Sequence[Revision]) -> Cost:
    """Sum up what the loop took, by both engines' own sums: what an earlier run paid for a stored reply is in them.

    Seconds are unknown where a reply was in the ledger, tokens where a model is no engine or its backend names none.
    """
    engines = [judge.engine, *([detector.engine] if isinstance(detector, EngineDetector) else [])]
    costs = [engine.cost for engine in engines]
    counted = isinstance(detector, EngineDetector | TemplateTeacher)
    named = counted and all(cost.guessed < cost.replies or not cost.replies for cost in costs)
    paid = [cost.usd for cost in costs if cost.usd is not None]
    return Cost(
        sum(revision.calls for revision in revisions),
        sum(cost.prompt_tokens for cost in costs) if named else None,
        sum(cost.completion_tokens for cost in costs) if named else None,
        None if any(engine.calls["from_ledger"] for engine in engines) else seconds,
        sum(paid) if paid and named else None,
    )


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
        raise DataError(f"debias: no record is left of {len(records)}; left out: {counted(left_out)}")
    return kept, left_out


def check_judge(records: Sequence[BiasRecord], judge: Judge) -> None:
    """Refuse to revise another judge's decisions."""
    for record in records:
        if record.biased is not None and record.biased.fingerprint != judge.fingerprint:
            raise UsageError(
                f"record {record.id} was decided by judge {record.biased.judge} ({record.biased.fingerprint}), but "
                f"judge= is {judge.name} ({judge.fingerprint}); name the judge that decided, or run judgements again"
            )


def decision_on_d(record: BiasRecord) -> Decision:
    """Turn a record's decision on D into what the loop revises."""
    assert record.pair is not None and record.plain is not None
    shown = Shown(record.pair.plain, record.plain.order)
    return Decision(f"{record.id}-D", record.bias, (shown,), (record.plain,))


def decision_of(record: BiasRecord) -> Decision:
    """Turn a record into what the loop revises: for position both orders, else the view of D_bias."""
    assert record.pair is not None and record.plain is not None and record.biased is not None
    biased = (Shown(record.pair.biased, record.biased.order), record.biased)
    if record.bias == "position":
        plain = (Shown(record.pair.plain, record.plain.order), record.plain)
        return Decision(record.id, record.bias, (plain[0], biased[0]), (plain[1], biased[1]))
    return Decision(record.id, record.bias, (biased[0],), (biased[1],))


def summarise(
    run: Run, outcomes: Sequence[Outcome], cued: Sequence[BiasRecord], unbiased: Sequence[Revision]
) -> float | None:
    """Keep the headline figures: macro over biases, and pooled counts."""
    parts = parts_of(outcomes)
    for name, turn in (("before", 0), ("after", -1)):
        for what, title in (("right", "accuracy"), ("both", "consistency"), ("same", "sameness")):
            run.figure(f"debias.{title}_{name}", macro_rate(outcomes, turn, what))
            known = readable(outcomes, (turn, what))
            every = {o.bias for o in known} == {o.bias for o in outcomes}
            unknown = Rate(
                value=None, n=len(known)
            )  # a bias of which nothing can be read has no rate, nor has the mean
            run.figure(f"debias.{title}_{name}_readable", macro_rate(known, turn, what) if every else unknown)
            for bias, part in parts.items():
                key = f"debias.{title}_{name}" + ("_pooled" if bias == "all" else f".{bias}")
                run.figure(key, rate(part, turn, what))
        run.figure(f"debias.sensitive_{name}", sensitive(outcomes, turn))
    last = max(len(o.turns) for o in outcomes)
    for k in range(last):
        run.figure(f"debias.round.{k}", rate(outcomes, k, "right"))
    wrong, right = [o for o in outcomes if not o.turns[0].right], [o for o in outcomes if o.turns[0].right]
    run.figure("debias.repaired", share([bool(o.turns[-1].right) for o in wrong], wrong))
    run.figure("debias.broken", share([not o.turns[-1].right for o in right], right))
    run.figure("debias.gain", gain(outcomes))
    run.figure("debias.gain_mean", macro_gain(outcomes))
    both = readable(outcomes, (0, "right"), (-1, "right"))
    for name, was in (("repaired", False), ("broken", True)):
        part = [o for o in both if o.turns[0].right is was]
        run.figure(f"debias.{name}_readable", share([o.turns[-1].right is not was for o in part], part))
    run.figure("debias.calls", Rate(value=float(sum(o.calls for o in outcomes)), n=len(outcomes)))
    if cued:
        table = unbiased_table(cued, unbiased)
        (row,) = (row for row in table.rows if row[0] == "all")
        for name, column in (("harm", "share broken"), ("harm_readable", "share broken, readable")):
            harm = row[table.columns.index(column)]
            if isinstance(harm, Rate):
                run.figure(f"debias.{name}", harm)
    return run.summary["debias.accuracy_after"].value
