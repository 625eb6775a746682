"""Seconds and memory of `rbd report` on a run of 100,000 decisions, against the bar of 2 minutes and 2 GB.

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

from rbd_train.records import BiasPair, BiasRecord, Item, Judgement, Outcome, Revision, Round, Trace

ROOT = Path(__file__).parents[1]
BAR_S, BAR_GB = 120.0, 2.0


def judged(choice: int) -> Judgement:
    outcome = Outcome(kind="choice", choice=choice)
    return Judgement(item_id="ITEM", judge="judge", fingerprint="f", order=(0, 1), outcome=outcome, reply="Output (a)")


def lines(before: int, after: int) -> tuple[str, str]:
    """One record and its revision as JSON, with ITEM where its number goes; the gold option is 0."""
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
    return record.model_dump_json(), revision.model_dump_json()


def make_run(root: Path, rows: int, name: str = "big") -> None:
    """Write a finished debias stage of so many decisions: a sixth repaired, a sixth still wrong, a sixth broken."""
    kinds = [lines(1, 0), lines(1, 1), lines(0, 1), lines(0, 0), lines(0, 0), lines(0, 0)]
    folder = root / name / "debias"
    folder.mkdir(parents=True)
    records = folder / "records.jsonl"
    with records.open("w") as first, (folder / "revisions.jsonl").open("w") as second:
        for k in range(rows):
            record, revision = kinds[k % len(kinds)]
            first.write(record.replace("ITEM", f"i{k}") + "\n")
            second.write(revision.replace("ITEM", f"i{k}") + "\n")
    code = {"version": "0", "commit": None, "dirty": None}
    manifest = {"stage": "debias", "run": name, "status": "complete", "reason": "", "metric": None, "config": {},
                "inputs": {str(records): {"sha256": "", "rows": rows}}, "outputs": {}, "facts": {}, "seconds": 1.0,
                "code": code, "world_size": 1}  # fmt: skip
    for file, value in (("manifest", manifest), ("tables", []), ("metrics", {})):
        (folder / f"{file}.json").write_text(json.dumps(value))


def main() -> None:
    rows = 5_000 if "quick" in sys.argv else 100_000
    with tempfile.TemporaryDirectory() as folder:
        make_run(Path(folder), rows)
        started = time.perf_counter()
        command = [sys.executable, "-m", "rbd_train.app", "report", "name=big", f"root={folder}"]
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
