"""Pairs per second of `rbd dpo` against `trl dpo`: same pairs, model, max_length, global batch, one epoch.

    python benchmarks/dpo_throughput.py          RewardBench pairs of shared/data, SmolLM2-135M; about half an hour
    python benchmarks/dpo_throughput.py quick    generated pairs on the tiny model, under a minute

Wall time counts all from the weights on disk: set-up, the reference pass, one epoch. The rivals: TRL as a user
gets it (its own defaults apart from what must be equal), and TRL tuned by hand (precomputed reference, no
recomputation, the fastest of bfloat16 weights or autocast and of the micro-batches, chosen on a few pairs, as is ours).
Each side runs in a process of its own, alternating, and orders the rows as it does for its users.

That all train the same is tried apart: a few steps in float32 over the rows as they lie, at a rate that moves the loss.
Where a side's loss of any step is off ours by more than TOLERANCE of how far ours moved from ln 2, the figures are
printed and the exit code is 1 (a little is allowed: the sides end their answers in other tokens).
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

QUICK = "quick" in sys.argv
LENGTH, BATCH, PAIRS, RUNS = (512, 8, 16, 1) if QUICK else (768, 8, 32, 3)
FOLDERS = [parent / "shared/data" for parent in Path(__file__).resolve().parents]  # beside the checkout, or in it
DATA = next((folder for folder in FOLDERS if folder.is_dir()), FOLDERS[0]) / "preference/rewardbench_filtered.parquet"
CHECK = "check" in sys.argv
RATE, BETA = (1e-4 if CHECK else 5e-6), 0.1
STEPS, TOLERANCE = (2 if QUICK else 3), 0.1  # of the check: steps of a batch each, and a share of the move


def pairs(source: str) -> list[dict[str, Any]]:
    """Return PAIRS conversational pairs that fit in LENGTH tokens."""
    from rbd_train.modelling import load_tokenizer

    tokenizer = load_tokenizer(source, reasoning=False)
    found = []
    for question, chosen, rejected in texts():
        longest = max(len(tokenizer.encode(question + text)) for text in (chosen, rejected))
        if longest < LENGTH - 64:
            made = {
                "prompt": [("user", question)],
                "chosen": [("assistant", chosen)],
                "rejected": [("assistant", rejected)],
            }
            found.append({key: [{"role": r, "content": c} for r, c in turns] for key, turns in made.items()})
    if len(found) < PAIRS:
        sys.exit(f"error: {len(found)} pairs fit in {LENGTH} tokens, {PAIRS} are needed")
    return found[:PAIRS]


def texts() -> list[tuple[str, str, str]]:
    """Return (question, chosen, rejected) of real pairs, or of generated ones where quick."""
    if QUICK:
        return [
            (f"Add {n} and 3.", f" It is {n + 3}." * (1 + n % 5), f" It is {n + 4}." * (1 + n % 4)) for n in range(40)
        ]
    if not DATA.is_file():
        sys.exit(f"error: {DATA} is not here; `quick` needs no data")
    from rbd_train.sources.preference import PreferenceSource

    return [(q.question, q.right, q.wrong or "") for q in PreferenceSource(str(DATA), "rewardbench").load(0).questions]


def child(side: str, micro: int, count: int, folder: Path) -> None:
    """Train in this process and leave the seconds and the losses."""
    import torch

    torch.set_num_threads(int(os.environ["BENCH_THREADS"]))
    source = os.environ["BENCH_MODEL"]
    data = json.loads((folder / "pairs.json").read_text())[:count]
    began = time.perf_counter()
    trainer = ours(source, data, micro, folder) if side == "rbd" else theirs(side, source, data, micro, folder)
    if CHECK:
        trainer._get_train_sampler = lambda *given: torch.utils.data.SequentialSampler(trainer.train_dataset)
    trainer.train()
    seconds = time.perf_counter() - began
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print("RESULT " + json.dumps({"seconds": seconds, "losses": losses}))


def ours(source: str, data: list[dict[str, Any]], micro: int, folder: Path) -> Any:
    """Set up what `rbd dpo model.dtype=bfloat16` sets up; the reference is computed anew each time."""
    from rbd_train.dpo import DpoTrainerConfig, make_trainer, render
    from rbd_train.modelling import load_tokenizer
    from rbd_train.records import Preference
    from rbd_train.run import Run
    from rbd_train.settings import ModelConfig

    run = Run(folder, "bench", "dpo", "bench", {})
    run.folder.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(source, reasoning=False)
    preferences = [
        Preference.model_validate({"id": str(k), **row, "source": "bench", "split": "train", "group": str(k)})
        for k, row in enumerate(data)
    ]
    rendered, dropped = render(tokenizer, preferences, LENGTH)
    assert not dropped, f"{len(dropped)} of {len(data)} pairs were dropped: the sides would train on other rows"
    settings = DpoTrainerConfig(
        beta=BETA, learning_rate=RATE, global_batch=BATCH, micro_batch=micro, max_length=LENGTH, warmup_share=0.0,
        scheduler="linear", reference_batch=micro,
    )  # fmt: skip
    reference = folder / f"reference-{time.time_ns()}.json"
    model = ModelConfig(source, dtype="float32" if QUICK or CHECK else "bfloat16")
    return make_trainer(source, model, settings, tokenizer, rendered, 0, folder / "checkpoints", reference, run)


def theirs(side: str, source: str, data: list[dict[str, Any]], micro: int, folder: Path) -> Any:
    """Set up TRL's trainer: `default`, or tuned with `autocast` or bfloat16 `weights`."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    from rbd_train.modelling import load_tokenizer

    equal: dict[str, Any] = {
        "output_dir": str(folder / f"trl-{time.time_ns()}"), "max_length": LENGTH, "num_train_epochs": 1, "beta": BETA,
        "learning_rate": RATE, "per_device_train_batch_size": micro, "gradient_accumulation_steps": BATCH // micro,
        "seed": 0, "report_to": "none", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True,
        "logging_steps": 1,
    }  # fmt: skip
    if side != "default":
        equal |= {"precompute_ref_log_probs": True, "activation_checkpointing": False, "bf16": side == "autocast"}
    if CHECK:
        equal |= {"bf16": False, "model_init_kwargs": {"dtype": "float32"}}
    elif side == "weights":
        equal |= {"model_init_kwargs": {"dtype": "bfloat16"}}
    return DPOTrainer(
        model=source, args=DPOConfig(**equal), train_dataset=Dataset.from_list(data),
        processing_class=load_tokenizer(source, reasoning=False),
    )  # fmt: skip


def run(side: str, micro: int, folder: Path, count: int = PAIRS, check: bool = False) -> dict[str, Any]:
    """Run one side in a process of its own."""
    words = [*sys.argv[1:], *(["check"] if check else [])]
    done = subprocess.run(
        [sys.executable, __file__, "child", side, str(micro), str(count), str(folder), *words],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    told = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not told:
        raise RuntimeError(f"{side} with micro-batch {micro} failed\n{done.stderr[-3000:]}")
    return dict(json.loads(told[-1].removeprefix("RESULT ")))


def fastest(sides: list[str], tries: list[int], folder: Path) -> tuple[str, int]:
    """Return the side and micro-batch that take a few pairs soonest; one that doesn't fit into memory is none."""

    def seconds(choice: tuple[str, int]) -> float:
        try:
            return float(run(*choice, folder, count=BATCH)["seconds"])
        except RuntimeError as error:
            print(str(error).split("\n", 1)[0], flush=True)
            return float("inf")

    choices = [(side, micro) for side in sides for micro in tries]
    return choices[0] if len(choices) == 1 else min(choices, key=seconds)


def off(mine: list[float], other: list[float]) -> float:
    """Return the largest difference of two runs' losses as a share of how far the first moved from ln 2."""
    moved = max(abs(loss - math.log(2)) for loss in mine)
    return max(abs(a - b) for a, b in zip(mine, other, strict=True)) / moved if moved else float("inf")


def main() -> None:
    """Alternate the sides and print medians."""
    from rbd_train.modelling import resolve_model

    os.environ["BENCH_MODEL"] = resolve_model("tiny" if QUICK else "embedded")
    os.environ.setdefault("BENCH_THREADS", str(os.cpu_count()))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "pairs.json").write_text(json.dumps(pairs(os.environ["BENCH_MODEL"])))
        tries = [8] if QUICK else [1, 2, 4, 8]
        best = {"rbd": fastest(["rbd"], tries, folder), "default": ("default", 8)}
        best["tuned"] = fastest(["autocast"] if QUICK else ["autocast", "weights"], tries, folder)
        found: dict[str, list[dict[str, Any]]] = {side: [] for side in ("rbd", "default", "tuned")}
        for number in range(RUNS):
            for side in found if number % 2 == 0 else reversed(found):
                found[side].append(run(*best[side], folder))
                print(side, best[side], found[side][-1], flush=True)
        checked = {side: run(*best[side], folder, STEPS * BATCH, check=True)["losses"] for side in found}
    speed = {side: PAIRS / statistics.median(r["seconds"] for r in results) for side, results in found.items()}
    loss = {side: statistics.mean(results[0]["losses"]) for side, results in found.items()}
    apart = {side: off(checked["rbd"], checked[side]) for side in ("default", "tuned")}
    print(json.dumps({
        "name": "dpo_throughput", "ratio": speed["rbd"] / speed["default"], "ours": speed["rbd"],
        "theirs": speed["default"], "unit": "pairs/s, reference pass included", "rival": "trl dpo, its defaults",
        "ratios": {side: speed["rbd"] / speed[side] for side in ("default", "tuned")}, "speeds": speed,
        "micro_batches": best, "losses": {side: results[0]["losses"] for side, results in found.items()},
        "loss_difference": {side: loss["rbd"] - loss[side] for side in ("default", "tuned")},
        "check": {"losses": checked, "off": apart, "tolerance": TOLERANCE, "rate": 1e-4},
        "runs": RUNS, "pairs": PAIRS, "threads": os.environ["BENCH_THREADS"], "quick": QUICK,
    }))  # fmt: skip
    if max(apart.values()) > TOLERANCE:
        sys.exit(f"error: over the same rows the losses are off by {apart} of ours' move, above {TOLERANCE}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
    else:
        main()
