"""Have a teacher write reasoning about every case: DeepSeek-R1 over HTTP by default, k samples per case.

The teacher is a detector whose engine is R1: it sees the case, never gold or label. In: `cases.jsonl` (and, to leave
cases of the test split out, `records.jsonl`), or the published CSV. Out: `traces.jsonl` (Trace).

    rbd traces teacher.engine.model=deepseek-ai/DeepSeek-R1 teacher.samples=4
    rbd traces imported=r1_traces.csv
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rbd_train.app import BaseConfig, stage
from rbd_train.detector import EngineDetector
from rbd_train.records import BiasRecord, Case, Trace
from rbd_train.run import Run, Table
from rbd_train.sources.rbd import read_reasoning
from rbd_train.tables import replies_table


@dataclass
class TracesConfig(BaseConfig):
    """Settings of traces."""

    teacher: Any = None  # who writes the traces
    imported: str | None = None  # the published reasoning-supervision CSV, instead of asking a teacher
    test_split: bool = True  # ask the teacher about test cases too, to have its row in the detection table


@stage("traces", TracesConfig)
def main(cfg: TracesConfig, run: Run) -> float | None:
    """Collect traces, count what can't be read, write."""
    if cfg.imported is not None:
        traces = read_reasoning(Path(cfg.imported)).traces
        run.note_input(Path(cfg.imported), len(traces))
    else:
        cases = run.read(run.output_of("judgements", "cases.jsonl"), Case)
        if not cfg.test_split:
            records = run.read(run.output_of("judgements", "records.jsonl"), BiasRecord)
            test = {record.id for record in records if record.split == "test"}
            cases = [case for case in cases if case.id not in test]
        teacher = cfg.teacher.open(run.ledger)
        try:
            traces = teacher.detect(cases)
        finally:
            teacher.close()
        run.facts["calls"] = teacher.calls()
        if isinstance(teacher, EngineDetector):
            run.table(
                replies_table("traces", teacher.engine, teacher.engine.states, Counter(state_of(t) for t in traces))
            )
    run.write("traces.jsonl", traces)
    run.table(traces_table(traces))
    readable = sum(trace.verdict is not None for trace in traces)
    return readable / len(traces) if traces else None


def state_of(trace: Trace) -> str:
    """Name what a trace says, for a count."""
    return f"unreadable: {trace.reject}" if trace.verdict is None else "Yes" if trace.verdict else "No"


def traces_table(traces: Sequence[Trace]) -> Table:
    """Count the traces by what they say, and by why they can't be read."""
    states = Counter(state_of(trace) for trace in traces)
    template = any(trace.provenance.get("template") for trace in traces)
    author = ", ".join(sorted({trace.author for trace in traces}))
    note = f"author: {author}" + (" (a template, not a model)" if template else "")
    rows = tuple((state, count) for state, count in sorted(states.items()))
    return Table(name="traces", title="Traces", columns=("state", "traces"), rows=rows, note=note)
