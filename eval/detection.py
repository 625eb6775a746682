"""Measure a detector on held-out cases, beside the teacher, the content-blind rules and the majority class.

In: `test.jsonl` (Example); further test sets are other runs' judged decisions (diagnostic, cross-domain, combined
biases); other detectors are other runs' verdicts on the same cases. Out: `verdicts.jsonl` (Trace), one more file per
further set, tables.

    rbd detection
    rbd detection name=big detector.engine.model=runs/big/sft/model 'also=[diagnostic]' 'compare=[small,label_only]'
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from eval.detection_tables import counts_table, methods_table, names_table, paired_table, reject_table
from eval.grading import curve_table, graded_table, reliability_table
from eval.reliance import reliance_table
from eval.verdicts import BEST, biases_of, macro_over, p_yes, readable, scored, verdicts, voted
from rbd_train.app import BaseConfig, stage
from rbd_train.biases import definitions_for, unnamed
from rbd_train.detector import Detector
from rbd_train.errors import DataError
from rbd_train.manifest import read_manifest
from rbd_train.metrics import accuracy_rate, coverage_rate, f1_rate, macro_f1
from rbd_train.records import BiasRecord, Case, Example, Trace
from rbd_train.run import Run, Table
from rbd_train.tables import counted, markdown
from rbd_train.weights import add_scores


@dataclass
class DetectionConfig(BaseConfig):
    """Settings of detection."""

    detector: Any = None  # what is measured
    examples: str | None = None  # path of the held-out examples; default: the output of stage curate
    also: list[str] = field(default_factory=list)  # runs whose judged decisions are further test sets
    compare: list[str] = field(default_factory=list)  # runs whose detection of the same cases gives further rows
    without_name: bool = False  # detect again with the judge not named: is its capability really used?


class CaseSet(NamedTuple):
    """Cases to detect; the name is empty for the standard set, else that of the run that judged them."""

    name: str
    examples: list[Example]
    left_out: dict[str, int]

    @property
    def suffix(self) -> str:
        """Tell its files, tables and figures from those of the other sets."""
        return f"-{self.name}" if self.name else ""


@stage("detection", DetectionConfig)
def main(cfg: DetectionConfig, run: Run) -> float | None:
    """Detect, compare, write."""
    path = Path(cfg.examples) if cfg.examples else run.output_of("curate", "test.jsonl")
    trained = trained_groups(run)
    sets = [CaseSet("", run.read(path, Example), {}), *(judged_set(run, name, trained) for name in cfg.also)]
    for part in sets:
        if not part.examples:
            raise DataError(
                f"detection: no held-out example in {part.name or path}; left out: {counted(part.left_out)}"
            )
    others = {part.name: other_detectors(run, cfg.compare, part) for part in sets}
    detector = cfg.detector.open(run.ledger)
    try:
        found = [detector.detect(shown_cases(part.examples, detector)) for part in sets]
        unnamed = detector.detect(without_name(shown_cases(sets[0].examples, detector))) if cfg.without_name else []
    finally:
        detector.close()
    run.facts |= {"calls": detector.calls(), "detector": detector.name, "examples": run.named(path)}
    for part, traces in zip(sets, found, strict=True):
        run.write(f"verdicts{part.suffix}.jsonl", traces)
        for table in tables_of(part, traces, detector.name, others[part.name]):
            run.table(table)
        keep_figures(run, part, voted(traces))
    if unnamed:
        run.table(names_table(sets[0].examples, voted(found[0]), voted(unnamed)))
    if run.main:
        told = [markdown(t) for t in run.tables if not t.name.startswith(("detection_curve", "detection_reliability"))]
        add_scores(Path(model_of(cfg.detector)), "\n".join(told))
    return run.summary["detection.f1"].value


def model_of(detector: Any) -> str:
    """Return the folder or name of the model behind a detector; empty where it has none."""
    return str(getattr(detector, "model", None) or getattr(getattr(detector, "engine", None), "model", ""))


def trained_groups(run: Run) -> set[str]:
    """Return the questions that the detector was trained on, where this run knows them."""
    manifest = read_manifest(run.root / run.source / "curate")
    if manifest is None or manifest["status"] != "complete" or not manifest["outputs"]["train.jsonl"]["rows"]:
        return set()
    return {e.group for e in run.read(run.output_of("curate", "train.jsonl"), Example)}


def judged_set(run: Run, name: str, trained: set[str]) -> CaseSet:
    """Make a test set of another run's judged decisions, with its teacher's traces where there are any."""
    records = run.read(run.output_of("judgements", "records.jsonl", name), BiasRecord)
    cases = {case.id: case for case in run.read(run.output_of("judgements", "cases.jsonl", name), Case)}
    manifest = read_manifest(run.root / name / "traces")
    taught: dict[str, Trace] = {}
    if manifest is not None and manifest["status"] == "complete":
        run.check_made_from(run.root / name / "traces", run.output_of("judgements", "cases.jsonl", name))
        for trace in run.read(run.output_of("traces", "traces.jsonl", name), Trace):
            taught.setdefault(trace.case_id, trace)
    reasons = ("decision unreadable", "question is in the training split")
    part = CaseSet(name, [], dict.fromkeys(reasons, 0))
    for record in records:
        if record.label is None:
            part.left_out[reasons[0]] += 1
        elif record.group in trained or record.split == "train":
            part.left_out[reasons[1]] += 1
        else:
            part.examples.append(
                Example(
                    case=cases[record.id], bias=record.bias, group=record.group, label=record.label,
                    quadrant=record.quadrant(), trace=taught.get(record.id),
                )
            )  # fmt: skip
    return part


def other_detectors(run: Run, names: Sequence[str], part: CaseSet) -> dict[str, list[Trace]]:
    """Read what other runs' detectors said of the same cases, by `run: author`.

    Raises:
        DataError: a run has not detected this set, or none of its cases is among these.
    """
    asked = {example.case.id for example in part.examples}
    found: dict[str, list[Trace]] = {}
    for name in names:
        path = run.output_of("detection", f"verdicts{part.suffix}.jsonl", name)
        if not path.is_file() and part.name:
            raise DataError(f"{path}: run {name} has not detected {part.name}; run it with 'also=[{part.name}]'")
        traces = [trace for trace in run.read(path, Trace) if trace.case_id in asked]
        if not traces:
            raise DataError(f"{path}: none of its cases is among the {len(asked)} of this run; compare the same items")
        found[f"{name}: {traces[0].author}"] = traces
    return found


def shown_cases(examples: Sequence[Example], detector: Detector) -> list[Case]:
    """Give every case the definitions that the detector's prompt lists."""
    return [
        e.case if detector.definitions == "all"
        else e.case.model_copy(
            update={"definitions": definitions_for(e.case.id, e.bias, detector.definitions, e.case.definitions)}
        )
        for e in examples
    ]  # fmt: skip


def without_name(cases: Sequence[Case]) -> list[Case]:
    """Leave the judge unnamed."""
    return [unnamed(case) for case in cases]


def tables_of(
    part: CaseSet, traces: Sequence[Trace], detector: str, others: Mapping[str, Sequence[Trace]]
) -> list[Table]:
    """Make every table of one test set; a further set says so in title and name."""
    said = verdicts(part.examples, traces, detector, others)
    graded = {name: p_yes(rows) for name, rows in {detector: traces, **others}.items()}
    graded = {name: known for name, known in graded.items() if known}
    tables = [
        counts_table(part.examples),
        methods_table(part.examples, said, detector),
        paired_table(part.examples, said, detector),
        reliance_table(part.examples, said),
        *([graded_table(part.examples, said, graded), reliability_table(part.examples, graded),
           curve_table(part.examples, graded)] if graded else []),
        reject_table(traces),
    ]  # fmt: skip
    if not part.name:
        return tables
    out = f"Test set {part.name}; left out: {counted(part.left_out)}."
    return [
        table.model_copy(
            update={"name": f"{table.name}{part.suffix}", "title": f"{table.title} ({part.name})",
                    "note": f"{out} {table.note}".strip()}
        )
        for table in tables
    ]  # fmt: skip


def keep_figures(run: Run, part: CaseSet, said: Mapping[str, bool | None]) -> None:
    """Keep the headline figures of a set."""
    name = f"detection{part.suffix}"
    rows = scored(part.examples, said)
    methods = verdicts(part.examples, [], "")
    rival, accurate = (scored(part.examples, methods.get(name, {})) for name in BEST)
    biases = biases_of(part.examples)
    run.figure(f"{name}.f1", macro_f1(rows))
    run.figure(f"{name}.best_rule_f1", macro_over(rival, biases))
    run.figure(f"{name}.best_rule_accuracy", accuracy_rate(accurate))
    run.figure(f"{name}.f1_readable", macro_over(readable(rows), biases))
    run.figure(f"{name}.accuracy", accuracy_rate(rows))
    run.figure(f"{name}.coverage", coverage_rate(rows))
    for bias in biases:
        run.figure(f"{name}.f1.{bias}", f1_rate([row for row in rows if row.bias == bias]))
        run.figure(f"{name}.rule_f1.{bias}", f1_rate([row for row in rival if row.bias == bias]))
