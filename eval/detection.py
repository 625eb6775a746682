"""Measure a detector on held-out cases, beside the teacher, the content-blind rules and the majority class.

In: `test.jsonl` (Example). Out: `verdicts.jsonl` (Trace), tables.

    rbd detection
    rbd detection from=real detector.engine.model=runs/real/sft/model
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.baselines import RULES, majority_class
from rbd_train.app import BaseConfig, stage
from rbd_train.biases import definitions_for
from rbd_train.detector import standing
from rbd_train.errors import DataError
from rbd_train.metrics import Scored, ceiling, confusion, f1_rate, macro_f1, paired_test, proportion
from rbd_train.records import Example, Trace
from rbd_train.run import Cell, Run, Table
from rbd_train.tables import markdown
from rbd_train.weights import add_scores

Verdicts = Mapping[str, Mapping[str, bool | None]]  # method -> case id -> verdict


@dataclass
class DetectionConfig(BaseConfig):
    """Settings of detection."""

    detector: Any = None  # what is measured
    examples: str | None = None  # path of the held-out examples; default: the output of stage curate


@stage("detection", DetectionConfig)
def main(cfg: DetectionConfig, run: Run) -> float | None:
    """Detect, compare, write."""
    path = Path(cfg.examples) if cfg.examples else run.output_of("curate", "test.jsonl")
    examples = run.read(path, Example)
    detector = cfg.detector.open(run.ledger)
    try:
        cases = [
            e.case if detector.definitions == "all"
            else e.case.model_copy(
                update={"definitions": definitions_for(e.case.id, e.bias, detector.definitions, e.case.definitions)}
            )
            for e in examples
        ]  # fmt: skip
        traces = detector.detect(cases)
    finally:
        detector.close()
    run.write("verdicts.jsonl", traces)
    run.facts |= {"calls": detector.calls(), "detector": detector.name}
    said = verdicts(examples, traces, detector.name)
    rival = best_rule(examples)
    run.table(counts_table(examples))
    run.table(methods_table(examples, said, rival, detector.name))
    run.table(paired_table(examples, said, rival, detector.name))
    run.table(reject_table(traces))
    if run.main:
        add_scores(Path(model_of(cfg.detector)), "\n".join(markdown(table) for table in run.tables))
    rows = scored(examples, said[detector.name])
    f1 = macro_f1(rows)
    run.figure("detection.f1", f1)
    run.figure("detection.best_rule_f1", macro_f1(scored(examples, said["best rule"])))
    right = sum(row.verdict == row.label for row in rows)
    run.figure("detection.accuracy", proportion(right, len(rows)))
    run.figure("detection.coverage", proportion(sum(row.verdict is not None for row in rows), len(rows)))
    for bias in biases_of(examples):
        run.figure(f"detection.f1.{bias}", f1_rate([row for row in rows if row.bias == bias]))
        run.figure(
            f"detection.rule_f1.{bias}", f1_rate([r for r in scored(examples, said["best rule"]) if r.bias == bias])
        )
    return f1.value


def model_of(detector: Any) -> str:
    """Return the folder or name of the model behind a detector; empty where it has none."""
    return str(getattr(detector, "model", None) or getattr(getattr(detector, "engine", None), "model", ""))


def biases_of(examples: Sequence[Example]) -> list[str]:
    """List the biases that occur."""
    return sorted({example.bias for example in examples})


def verdicts(examples: Sequence[Example], traces: Sequence[Trace], detector: str) -> dict[str, dict[str, bool | None]]:
    """Collect what every method says of every case; a missing key means that the method doesn't speak of it."""
    samples: dict[str, list[Trace]] = {}
    for trace in traces:
        samples.setdefault(trace.case_id, []).append(trace)
    said: dict[str, dict[str, bool | None]] = {detector: {i: standing(own).verdict for i, own in samples.items()}}
    for example in examples:
        if example.trace is not None:
            said.setdefault(f"teacher: {example.trace.author}", {})[example.case.id] = example.trace.verdict
    for bias, rule in RULES.items():
        name = f"rule: {rule.__name__.replace('_', ' ')}"
        said[name] = {e.case.id: rule(e.case) for e in examples if e.bias == bias}
    said["majority class"] = {e.case.id: majority_class(examples, e.bias) for e in examples}
    rival = best_rule(examples)
    said["best rule"] = {
        e.case.id: RULES[e.bias](e.case) if rival[e.bias] == "rule" else said["majority class"][e.case.id]
        for e in examples
    }  # fmt: skip
    return {name: verdict for name, verdict in said.items() if verdict}


def best_rule(examples: Sequence[Example]) -> dict[str, str]:
    """Choose, per bias, between its rule and the majority class: on these rows, which favours the rival."""
    chosen = {}
    for bias in biases_of(examples):
        part = [example for example in examples if example.bias == bias]
        by_rule = sum(RULES[bias](example.case) == example.label for example in part) if bias in RULES else 0
        by_class = sum(majority_class(examples, bias) == example.label for example in part)
        chosen[bias] = "rule" if by_rule >= by_class and bias in RULES else "majority class"
    return chosen


def scored(examples: Sequence[Example], said: Mapping[str, bool | None]) -> list[Scored]:
    """Join labels and verdicts."""
    return [Scored(e.bias, e.group, e.label, said[e.case.id]) for e in examples if e.case.id in said]


def counts_table(examples: Sequence[Example]) -> Table:
    """Print, before any figure, what the judge did on D and D_bias and the ceiling that follows (design 8)."""
    if not examples:
        raise DataError("detection: no held-out example")
    rows: list[tuple[Cell, ...]] = []
    for bias in biases_of(examples):
        part = [example for example in examples if example.bias == bias]
        cells = Counter(example.quadrant for example in part)
        unknown = cells[None] == len(part)
        wrong = cells["TF"] + cells["FF"]
        top = ceiling(cells["TF"] / wrong) if wrong else None
        counts = [None if unknown else cells[name] for name in ("TT", "TF", "FT", "FF")]  # type: ignore[index]
        rows.append(
            (bias, len(part), sum(e.label for e in part), *counts,
             "D is seen" if bias == "position" else None if unknown else top)
        )  # fmt: skip
    return Table(
        name="detection_counts", title="What is to be detected (held-out cases)",
        columns=("bias", "cases", "Yes", "TT", "TF", "FT", "FF", "F1 ceiling"), rows=tuple(rows),
        note="T/F: the judge was right or wrong on D, then on D_bias. A detector can't see D, so its F1 can't pass "
        "2p/(1+p), p = P(right on D | wrong on D_bias). A dash is unknown: imported rows don't say.",
    )  # fmt: skip


def methods_table(examples: Sequence[Example], said: Verdicts, rival: Mapping[str, str], detector: str) -> Table:
    """Put the detector, the teacher, the rules and the majority class side by side."""
    biases = biases_of(examples)
    names = [detector, *(n for n in said if n.startswith("teacher")), "best rule",
             *(n for n in said if n.startswith("rule")), "majority class"]  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    for name in dict.fromkeys(name for name in names if name in said):
        part = scored(examples, said[name])
        counts = confusion(part)
        whole = {row.bias for row in part} == set(biases)
        readable = [row for row in part if row.verdict is not None]
        per_bias: list[Cell] = []
        for bias in biases:
            own = [row for row in part if row.bias == bias]
            per_bias.append(confusion(own).f1 if own else None)
        rows.append(
            (name, len(part), macro_f1(part) if whole else None,
             proportion(counts.tp + counts.tn, len(part)), counts.precision, counts.recall,
             proportion(sum(r.verdict == r.label for r in readable), len(readable)).value,
             len(readable) / len(part) if part else None, *per_bias)
        )  # fmt: skip
    chosen = ", ".join(f"{bias}: {kind}" for bias, kind in rival.items())
    return Table(
        name="detection", title="Detection", rows=tuple(rows),
        columns=("method", "cases", "macro F1", "accuracy", "precision", "recall", "accuracy, readable", "coverage",
                 *(f"F1 {bias}" for bias in biases)),
        note=f"Yes is the positive class; unreadable counts as wrong except in the readable column. Macro: mean over "
        f"biases. Intervals: 95 %, F1 by resampling questions. Best rule (chosen on these rows): {chosen}.",
    )  # fmt: skip


def paired_table(examples: Sequence[Example], said: Verdicts, rival: Mapping[str, str], detector: str) -> Table:
    """Test the detector against the best rule on the same cases: exact McNemar, Holm over the rows."""
    from statsmodels.stats.multitest import multipletests

    tests = []
    for bias in [*biases_of(examples), "all"]:
        part = [e for e in examples if (bias in ("all", e.bias)) and e.case.id in said[detector]]
        ours = [said[detector][e.case.id] == e.label for e in part]
        theirs = [said["best rule"][e.case.id] == e.label for e in part]
        tests.append((bias, paired_test(ours, theirs)))
    adjusted = multipletests([test.p for _, test in tests], method="holm")[1]
    rows = tuple(
        (bias, test.n, test.only_first, test.only_second, test.p, float(p))
        for (bias, test), p in zip(tests, adjusted, strict=True)
    )
    return Table(
        name="detection_paired", title=f"{detector} against the best rule",
        columns=("bias", "cases", "only the detector right", "only the rule right", "p", "p (Holm)"), rows=rows,
        note="Exact McNemar test on the same cases, two-sided.",
    )  # fmt: skip


def reject_table(traces: Sequence[Trace]) -> Table:
    """Count the detector's replies by what they say, and by why they can't be read."""
    states = Counter("Yes" if t.verdict else "No" if t.verdict is False else f"unreadable: {t.reject}" for t in traces)
    rows = tuple((state, count) for state, count in sorted(states.items()))
    return Table(name="detection_replies", title="The detector's replies", columns=("state", "replies"), rows=rows)
