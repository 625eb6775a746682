"""Tokens per second of `rbd sft` against `trl sft`: same rows, model, max_length, global batch and optimizer steps.

    python benchmarks/sft_throughput.py          real R1 traces of shared/data, SmolLM2-135M; about 40 minutes
    python benchmarks/sft_throughput.py quick    generated rows on the tiny model, under a minute

The rivals: `trl sft` as a user gets it (its own defaults apart from what must be equal), and TRL tuned by hand: no
recomputation, the fastest of four micro-batches (chosen on one step, as is ours), in bfloat16 by autocast or with
bfloat16 weights; the faster one whose held-out loss is within 1 % of ours is the one that counts (another is run once).
Both read the tokens that rbd renders, as TRL's `input_ids` and `labels`, so that no template differs.
Each side runs in a process of its own, alternating; tokens are counted without padding and over the training loop
alone. After training each model's loss on held-out rows is measured in float32.
"""

import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

QUICK = "quick" in sys.argv
HELD, LENGTH, BATCH, STEPS, RUNS = (8, 512, 8, 2, 1) if QUICK else (24, 2048, 8, 4, 3)
ROWS = BATCH * STEPS  # one pass, so that every side sees the same rows
FOLDERS = [parent / "shared/data" for parent in Path(__file__).resolve().parents]  # beside the checkout, or in it
TRACES = next((folder for folder in FOLDERS if folder.is_dir()), FOLDERS[0]) / "rbd_reasoning_supervision/r1_traces.csv"
RATE = 2e-5


def rows(source: str) -> list[dict[str, list[int]]]:
    """Render ROWS + HELD rows as rbd trains on them."""
    from rbd_train.modelling import load_tokenizer, render_example

    tokenizer = load_tokenizer(source, reasoning=True)
    made = []
    for context, thinking, verdict in texts():
        row = render_example(tokenizer, [{"role": "user", "content": context}], thinking, verdict)
        if len(row.input_ids) <= LENGTH:
            made.append({"input_ids": row.input_ids, "labels": row.labels})
    if len(made) < ROWS + HELD:
        sys.exit(f"error: {len(made)} rows fit in {LENGTH} tokens, {ROWS + HELD} are needed")
    return made[: ROWS + HELD]


def texts() -> list[tuple[str, str, bool]]:
    """Return (context, thinking, verdict) of real traces, or of generated ones where quick."""
    if QUICK:
        return [(f"Is it biased? {'more ' * (n % 30)}{n}", f"It is {n}. " * (1 + n % 9), n % 2 == 0) for n in range(40)]
    if not TRACES.is_file():
        sys.exit(f"error: {TRACES} is not here; `quick` needs no data")
    csv.field_size_limit(10**7)
    found = []
    with TRACES.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            asked = f"{row['instruction']}\n{row['choices']}\n{row['llm_judgment']}"
            thinking = row["without_bias_label_think_content"]
            found.append((asked, thinking, str(row["bias_label"]).strip() in ("1", "1.0", "True", "Yes")))
    return [entry for entry in found if entry[1].strip()]


def child(side: str, micro: int, steps: int, folder: Path) -> None:
    """Train in this process and leave the seconds of the loop and the held-out loss."""
    import torch
    from datasets import Dataset

    from rbd_train.modelling import load_model, load_tokenizer

    torch.set_num_threads(int(os.environ["BENCH_THREADS"]))
    source = os.environ["BENCH_MODEL"]
    data = json.loads((folder / "rows.json").read_text())
    tokenizer = load_tokenizer(source, reasoning=True)
    if side == "rbd":
        trainer = ours(source, tokenizer, data[: BATCH * steps], micro, steps, folder)
    else:
        from trl import SFTConfig, SFTTrainer

        equal: dict[str, Any] = {
            "output_dir": str(folder / "trl"), "max_length": LENGTH, "max_steps": steps, "learning_rate": RATE,
            "per_device_train_batch_size": micro, "gradient_accumulation_steps": BATCH // micro, "seed": 0,
            "report_to": "none", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "logging_steps": 1,
        }  # fmt: skip
        if side != "default":
            equal |= {"activation_checkpointing": False, "bf16": side == "autocast"}
        if side == "weights":
            equal |= {"model_init_kwargs": {"dtype": "bfloat16"}}
        trainer = SFTTrainer(
            model=source, args=SFTConfig(**equal), train_dataset=Dataset.from_list(data[: BATCH * steps]),
            processing_class=tokenizer,
        )  # fmt: skip
    began = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - began
    loss = None
    if steps == STEPS:  # in a model of its own: accelerate leaves its autocast around the trained one's forward
        trained = load_model(source, "float32")
        trained.load_state_dict(trainer.model.state_dict())
        loss = held_out(trained, data[ROWS:])
    print("RESULT " + json.dumps({"seconds": seconds, "loss": loss}))


def ours(source: str, tokenizer: Any, data: list[dict[str, list[int]]], micro: int, steps: int, folder: Path) -> Any:
    """Set up what `rbd sft model.dtype=bfloat16` sets up."""
    from rbd_train.modelling import Rendered
    from rbd_train.run import Run
    from rbd_train.settings import ModelConfig, TrainerConfig
    from rbd_train.training import make_trainer

    run = Run(folder, "bench", "sft", "bench", {})
    run.folder.mkdir(parents=True, exist_ok=True)
    settings = TrainerConfig(
        learning_rate=RATE, max_steps=steps, global_batch=BATCH, micro_batch=micro, max_length=LENGTH,
        warmup_share=0.0, scheduler="linear", weight_decay=0.0,
    )  # fmt: skip
    made = [Rendered(row["input_ids"], row["labels"]) for row in data]
    model = ModelConfig(source, dtype="bfloat16")
    return make_trainer(source, model, tokenizer, made, [], settings, "reasoning", 0, folder / "checkpoints", run)


def held_out(model: Any, data: list[dict[str, list[int]]]) -> float:
    """Return the mean loss per supervised token, in float32."""
    import torch

    model.eval()
    total, count = 0.0, 0
    with torch.inference_mode():
        for row in data:
            labels = torch.tensor([row["labels"]])
            keep = int((labels[0] != -100).sum()) + 1
            logits = model(input_ids=torch.tensor([row["input_ids"]]), logits_to_keep=keep).logits[0, :-1].float()
            total += float(torch.nn.functional.cross_entropy(logits, labels[0, -(keep - 1) :], reduction="sum"))
            count += keep - 1
    return total / count


def run(side: str, micro: int, folder: Path, steps: int = STEPS) -> dict[str, float]:
    """Run one side in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "child", side, str(micro), str(steps), str(folder), *sys.argv[1:]],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    told = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not told:
        raise RuntimeError(f"{side} with micro-batch {micro} failed\n{done.stderr[-3000:]}")
    return dict(json.loads(told[-1].removeprefix("RESULT ")))


def fastest(side: str, tries: list[int], folder: Path) -> int:
    """Return the micro-batch that takes one step soonest; one that doesn't fit into memory is none."""

    def seconds(micro: int) -> float:
        try:
            return run(side, micro, folder, steps=1)["seconds"]
        except RuntimeError as error:
            print(str(error).split("\n", 1)[0], flush=True)
            return float("inf")

    return tries[0] if len(tries) == 1 else min(tries, key=seconds)


def main() -> None:
    """Alternate the sides and print medians."""
    from rbd_train.modelling import resolve_model

    os.environ["BENCH_MODEL"] = resolve_model("tiny" if QUICK else "embedded")
    os.environ.setdefault("BENCH_THREADS", str(os.cpu_count()))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data = rows(os.environ["BENCH_MODEL"])
        (folder / "rows.json").write_text(json.dumps(data))
        tokens = sum(len(row["input_ids"]) for row in data[:ROWS])
        tries = [8] if QUICK else [1, 2, 4, 8]
        sides = ["rbd", "default", "autocast", *([] if QUICK else ["weights"])]
        best = {side: 8 if side == "default" else fastest(side, tries, folder) for side in sides}
        found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
        for number in range(RUNS):
            for side in found if number % 2 == 0 else reversed(found):
                if found[side] and abs(found["rbd"][0]["loss"] / found[side][0]["loss"] - 1) > 0.01:
                    continue  # no rival: it has learnt something else
                found[side].append(run(side, best[side], folder))
                print(side, best[side], found[side][-1], flush=True)
    speed = {side: tokens / statistics.median(r["seconds"] for r in results) for side, results in found.items()}
    loss = {side: statistics.median(r["loss"] for r in results) for side, results in found.items()}
    apart = {side: loss["rbd"] / loss[side] - 1 for side in sides[1:]}
    runs = {side: len(results) for side, results in found.items()}
    same = [
        side for side in sides[2:] if abs(apart[side]) <= 0.01
    ]  # bfloat16 weights without masters lose most of what they learn
    tuned = max(same or sides[2:], key=lambda side: speed[side])
    print(json.dumps({
        "name": "sft_throughput", "ratio": speed["rbd"] / speed["default"], "ours": speed["rbd"],
        "theirs": speed["default"], "unit": "tokens/s without padding", "rival": "trl sft, its defaults",
        "ratios": {side: speed["rbd"] / speed[side] for side in sides[1:]}, "speeds": speed, "tuned": tuned,
        "same_loss": {side: abs(apart[side]) <= 0.01 for side in sides[1:]},
        "micro_batches": best, "held_out_loss": loss,
        "loss_difference": apart,
        "runs": runs, "steps": STEPS, "threads": os.environ["BENCH_THREADS"], "quick": QUICK,
    }))  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
    else:
        main()
