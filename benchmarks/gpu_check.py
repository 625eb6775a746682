"""The two ends of launch/gpu_check.sh: `make` writes a random model and rows, `report` reads what training left.

python benchmarks/gpu_check.py [quick]     starts the script itself; without a GPU as a rehearsal, quick: 3 steps
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(os.environ.get("RBD_CHECK_ROOT", "."))  # the script's folder, set for `make` and `report`
DRY = bool(os.environ.get("RBD_CHECK_DRY"))


def start(quick: bool) -> int:
    """Run the script; returns its exit code."""
    import torch

    given = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    given |= {} if torch.cuda.is_available() else {"DRY": "1"}
    given |= {"STEPS": "3"} if quick else {}
    script = Path(__file__).parents[1] / "launch" / "gpu_check.sh"
    return subprocess.run(["bash", str(script)], env=os.environ | given, check=False).returncode


def make() -> None:
    """Write a model of the 1.5B preset's shape (tiny, where dry) with the byte tokenizer, and 128 examples."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from rbd_train.config import compose
    from rbd_train.modelling import resolve_model
    from rbd_train.records import Case, Definition, Example, Trace, View
    from rbd_train.store import write_rows

    source = resolve_model("tiny")
    AutoTokenizer.from_pretrained(source).save_pretrained(ROOT / "model")
    config = AutoConfig.from_pretrained(source)
    if not DRY:
        shape = dict(compose("sft", ["model=r1_qwen_1_5b"])["model"]["shape"])
        config = AutoConfig.for_model(shape.pop("model_type"), **{**config.to_dict(), **shape, "layer_types": None})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(ROOT / "model")
    rows = []
    for number in range(128):
        case = Case(
            id=f"c{number}", definitions=(Definition(name="Verbosity bias", text="preferring the longer output."),),
            question=f"What is {number} + {number}?", judge="judge",
            views=(View(options=(str(2 * number), f"It is{' so' * (number % 40)} {2 * number + 1}."), choice=1),),
        )  # fmt: skip
        thinking = f"{number} + {number} = {2 * number}. " * (4 + number % 20)
        trace = Trace(case_id=case.id, author="check", thinking=thinking, verdict=number % 2 == 0, reply="")
        rows.append(Example(case=case, bias="verbosity", group=str(number), label=number % 2 == 0, trace=trace))
    write_rows(ROOT / "train.jsonl", rows)


def report(out: Path) -> None:
    """Put the speed and the planned memory beside the real one into one JSON object."""
    import torch

    from rbd_train.memory import Shape, model_config, plan_rank
    from rbd_train.modelling import load_tokenizer
    from rbd_train.records import Example
    from rbd_train.sft import render
    from rbd_train.store import read_rows, write_json

    manifest = json.loads((ROOT / "check" / "sft" / "manifest.json").read_text(encoding="utf-8"))
    trainer, speed = manifest["config"]["trainer"], manifest["facts"]["speed"]
    tokenizer = load_tokenizer(str(ROOT / "model"), reasoning=True)
    rows = render(tokenizer, read_rows(ROOT / "train.jsonl", Example), "reasoning")
    micro = trainer["micro_batch"]
    longest = sorted((len(row.input_ids) for row in rows), reverse=True)[:micro]
    supervised = sorted((sum(label != -100 for label in row.labels) for row in rows), reverse=True)[:micro]
    shape = Shape(
        model_config({}, str(ROOT / "model")),
        "float32",
        1,
        sum(longest),
        sum(supervised),
        manifest["facts"]["recompute"],
    )
    gpu = torch.cuda.is_available()
    plan = plan_rank(shape, "zero3", manifest["world_size"], gpu=gpu)
    found: dict[str, Any] = {
        "name": "gpu_check", "device": torch.cuda.get_device_name() if gpu else "cpu (dry run)", "dry": DRY,
        "commit": manifest["code"]["commit"], "processes": manifest["world_size"], "steps": manifest["facts"]["steps"],
        "tokens_per_second": speed["tokens_per_second"], "padding": speed["padding"], "mfu": speed["mfu"],
        "planned_bytes": plan.total, "peak_bytes": speed["peak_bytes"],
        "planned_over_peak": plan.total / speed["peak_bytes"], "attention": manifest["facts"]["attention"],
        "loss": manifest["metric"],
    }  # fmt: skip
    write_json(out, found)
    print(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1:2] == ["make"]:
        make()
    elif sys.argv[1:2] == ["report"]:
        report(Path(sys.argv[2]))
    else:
        sys.exit(start("quick" in sys.argv[1:]))
