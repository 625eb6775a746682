"""Seconds and memory of `rbd report` on two runs of 100,000 decisions and verdicts, against 2 minutes and 2 GB.

python benchmarks/report_size.py [quick]
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rbd_train.records import (
    BiasPair,
    BiasRecord,
    Case,
    Example,
    Item,
    Judgement,
    Outcome,
    Revision,
    Round,
    Trace,
    View,
)

ROOT = Path(__file__).parents[1]
BAR_S, BAR_GB = 120.0, 2.0


def judged(choice: int) -> Judgement:
    outcome = Outcome(kind="choice", choice=choice)
    return Judgement(item_id="ITEM", judge="judge", fingerprint="f", order=(0, 1), outcome=outcome, reply="Output (a)")


def lines(before: int, after: int) -> tuple[str, ...]:
    """One record, its revision, example and verdict as JSON, with ITEM where its number goes; the gold option is 0."""
    item = Item(id="ITEM", question="What is ITEM? <b>" + "why " * 60, options=("right " * 40, "wrong " * 60), gold=0,
                group="gITEM")  # fmt: skip
    pair = BiasPair(id="ITEM", bias="verbosity", source="s", plain=item, biased=item)
    record = BiasRecord(id="ITEM", group="gITEM", bias="verbosity", order="stored", pair=pair, plain=judged(0),
                        biased=judged(before), label=before == 1)  # fmt: skip
    thinking = "It is longer. " * 150  # as long as R1's
    flagged = Trace(case_id="ITEM", author="d", thinking=thinking, verdict=before != after,
                    reply=f"<think>\n{thinking}\n</think>\n\nYes")  # fmt: skip
    rounds = [Round(judgements=(judged(before),), trace=flagged)]
    rounds += [Round(judgements=(judged(after),), trace=None)] if before != after else []
    revision = Revision(id="ITEM", rounds=tuple(rounds), stop="max_rounds", calls=2)
    case = Case(id="ITEM", definitions=(), question=item.question, views=(View(options=item.options, choice=before),),
                judge="judge")  # fmt: skip
    example = Example(case=case, bias="verbosity", group="gITEM", label=before == 1, trace=flagged)
    return tuple(row.model_dump_json() for row in (record, revision, example, flagged))


def make_run(root: Path, rows: int, name: str = "big") -> None:
    """Write finished debias and detection of so many decisions: a sixth repaired, still wrong and broken each."""
    kinds = [lines(1, 0), lines(1, 1), lines(0, 1), lines(0, 0), lines(0, 0), lines(0, 0)]
    for stage, files, fact in (
        ("debias", ("records", "revisions"), "records"), ("detection", ("examples", "verdicts"), "examples"),
    ):  # fmt: skip
        folder = root / name / stage
        folder.mkdir(parents=True)
        first = 2 * (stage == "detection")
        for place, file in enumerate(files, first):
            with (folder / f"{file}.jsonl").open("w") as out:
                for k in range(rows):
                    out.write(kinds[k % len(kinds)][place].replace("ITEM", f"i{k}") + "\n")
        manifest = {"stage": stage, "run": name, "status": "complete", "reason": "", "metric": None, "config": {},
                    "inputs": {}, "outputs": {}, "facts": {fact: f"{name}/{stage}/{fact}.jsonl"}, "seconds": 1.0,
                    "code": {"version": "0", "commit": None, "dirty": None}, "world_size": 1}  # fmt: skip
        for file, value in (("manifest", manifest), ("tables", []), ("metrics", {})):
            (folder / f"{file}.json").write_text(json.dumps(value))


def main() -> None:
    rows = 5_000 if "quick" in sys.argv else 100_000
    with tempfile.TemporaryDirectory() as folder:
        for name in ("big", "other"):
            make_run(Path(folder), rows, name)
        started = time.perf_counter()
        command = [sys.executable, "-m", "rbd_train.app", "report", "name=big", "runs=[big,other]", f"root={folder}"]
        subprocess.run(command, check=True, stdout=sys.stderr, env=os.environ | {"PYTHONPATH": str(ROOT)})
        seconds = time.perf_counter() - started
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = used.ru_utime + used.ru_stime
        gigabytes = used.ru_maxrss / 2**20
        page = (Path(folder) / "big" / "report" / "index.html").stat().st_size / 2**20
    print(f"{rows} rows: {seconds:.1f} s, {gigabytes:.2f} GB at most, page {page:.1f} MB", file=sys.stderr)
    found = {
        "name": "report_size", "ratio": BAR_S / seconds, "ours": seconds, "theirs": BAR_S, "unit": "s",
        "rival": f"the bar ({BAR_S:.0f} s, {BAR_GB:.0f} GB)", "cpu_s": cpu_s, "gigabytes": gigabytes,
        "page_mb": page, "rows": rows, "runs": 1,
    }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()
