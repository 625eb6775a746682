"""Several runs side by side: their figures, and paired tests on the items that they share with the first."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from eval.cases import json_rows
from eval.verdicts import voted
from rbd_train.manifest import read_manifest
from rbd_train.metrics import detectable, holm, mean_rate, paired_change, paired_test
from rbd_train.records import Trace
from rbd_train.run import Cell, Run, Table

Rights = dict[str, tuple[str, bool]]  # item -> its group, whether it was right


def tests_table(run: Run, names: Sequence[str]) -> Table:
    """Test every run against the first on the items that both have; what only one has is counted, not hidden."""
    rows: list[list[Cell]] = []
    tests: list[float | None] = []
    for what, read in (("debias: right on D_bias after", loop_rights), ("detection: right verdict", verdict_rights)):
        known = {name: read(run, name) for name in names}
        first = known[names[0]]
        for name in names[1:]:
            theirs = known[name]
            if first is None or theirs is None:
                absent = [n for n in (names[0], name) if known[n] is None]
                rows.append([what, name, 0, None, None, None, None, None, f"stage missing in {', '.join(absent)}"])
                tests.append(None)
                continue
            both = sorted(set(first) & set(theirs))
            groups = [first[key][0] for key in both]
            ours, other = [first[key][1] for key in both], [theirs[key][1] for key in both]
            change = paired_change(ours, other, groups)
            test = paired_test(other, ours, groups) if both else None
            only = (len(first) - len(both), len(theirs) - len(both))
            said = "" if not any(only) else f"items differ: {only[0]} only in {names[0]}, {only[1]} only in {name}"
            rows.append(
                [what, name, len(both), mean_rate([float(x) for x in ours], groups),
                 mean_rate([float(x) for x in other], groups), change, test.p if test else None,
                 detectable(test) if test else None, said]
            )  # fmt: skip
            tests.append(test.p if test else None)
    done = [(*row[:7], p, *row[7:]) for row, p in zip(rows, holm(tests), strict=True)]
    return Table(
        name="runs_tests", title=f"Each run against {names[0]}, on the same items", rows=tuple(done),
        columns=("what", "run", "items of both", names[0], "run's", "delta", "p", "p (Holm)", "smallest detectable",
                 "remark"),
        note="Exact McNemar by question, two-sided.",
    )  # fmt: skip


def loop_rights(run: Run, name: str) -> Rights | None:
    """Say which decisions a run's loop left right; None where it has not run."""
    folder = run.root / name / "debias"
    manifest = read_manifest(folder)
    if manifest is None or manifest["status"] != "complete":
        return None
    records = run.fact_path(manifest, "records")
    gold = {row["id"]: (row["group"], row["pair"]["biased"]["gold"]) for row in json_rows(records) if row["pair"]}
    return {
        row["id"]: (gold[row["id"]][0], _chosen(row["rounds"][-1]["judgements"][-1]) == gold[row["id"]][1])
        for row in json_rows(folder / "revisions.jsonl")
    }


def verdict_rights(run: Run, name: str) -> Rights | None:
    """Say which cases a run's detector got right (as its samples vote); None where it has not run."""
    folder = run.root / name / "detection"
    manifest = read_manifest(folder)
    if manifest is None or manifest["status"] != "complete":
        return None
    path = folder / "verdicts.jsonl"
    run.note_input(path)
    # the texts stay in the file: a hundred thousand traces of R1's length are half a gigabyte
    verdicts = voted(Trace.model_validate({**row, "thinking": None, "reply": ""}) for row in json_rows(path))
    return {
        row["case"]["id"]: (row["group"], verdicts.get(row["case"]["id"]) == row["label"])
        for row in json_rows(run.fact_path(manifest, "examples"))
    }


def _chosen(judgement: Mapping[str, Any]) -> Any:
    choice = judgement["outcome"]["choice"]
    return json.dumps(None) if choice is None else choice  # unreadable equals no gold
