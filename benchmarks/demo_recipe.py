"""Try the demo's recipe without its test questions: on training material alone, a part of which is held out.

Templates, names, things, a decade of large numbers and the small numbers 5 and 8 are kept from training and asked
afterwards, so that a recipe can be chosen before any test question is seen. About ten minutes on two cores.

    python benchmarks/demo_recipe.py [runs folder]
"""

import json
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

from rbd_train.app import main as rbd
from rbd_train.config import data_dir
from rbd_train.sources import generated
from rbd_train.sources.generated import Material

HELD = tuple(range(51, 61))
SETTINGS = {"source.test": "36", "sham": "false", "rivals": "false"}


def hold_out() -> None:
    """Replace the generator's material: what was test is not there any more, a part of what was train is test."""
    all_of = generated.MATERIAL["train"]
    generated.MATERIAL["train"] = Material(
        all_of.templates[:9], all_of.names[:8], all_of.things[:8],
        tuple(x for x in all_of.large if x not in HELD), tuple(y for y in all_of.small if y not in (5, 8)),
    )  # fmt: skip
    generated.MATERIAL["test"] = Material(all_of.templates[9:], all_of.names[8:], all_of.things[8:], HELD, (5, 8))


def stages(root: str) -> list[list[str]]:
    """Read the demo's own commands up to detection, so that what is tried is what the demo does."""
    text = (data_dir("launch") / "demo.sh").read_text(encoding="utf-8").replace("\\\n", " ")
    text = text.replace("$run", f"root={root} name=recipe seed=11").replace("${TRAIN:-", "").replace("}", "")
    found = []
    for line in text.splitlines():
        words = shlex.split(line) if line.startswith("rbd ") else []
        if words and words[1] not in ("debias", "report"):
            kept = [word for word in words[1:] if word.split("=")[0] not in SETTINGS]
            found.append([*kept, *(["source.test=36"] if words[1] == "pairs" else [])])
    return found


def report(root: Path) -> None:
    """Print how many held-out cases were judged wrongly, per bias."""
    labels = {row["id"]: row for row in rows(root / "recipe" / "judgements" / "records.jsonl")}
    wrong, asked = Counter[str](), Counter[str]()
    for verdict in rows(root / "recipe" / "detection" / "verdicts.jsonl"):
        record = labels[verdict["case_id"]]
        if verdict["author"] == "detector" and record["label"] is not None:
            asked[record["bias"]] += 1
            wrong[record["bias"]] += verdict["verdict"] != record["label"]
    for bias in sorted(asked):
        print(f"{bias}: {wrong[bias]} of {asked[bias]} wrong")
    print(f"all: {wrong.total()} of {asked.total()} wrong")


def rows(path: Path) -> list[dict[str, object]]:
    """Read JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--stage"]:  # a process per stage, each with the other material
        hold_out()
        sys.exit(rbd(sys.argv[2:]))
    folder = sys.argv[1] if len(sys.argv) > 1 else "runs"
    for words in stages(folder):
        subprocess.run([sys.executable, __file__, "--stage", *words], check=True)
    report(Path(folder))
