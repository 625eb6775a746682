r"""Distil: train a detector on curated traces with TRL's SFTTrainer.

In: `train.jsonl` (Example). Out: `model/` (safetensors, tokenizer with the detector's chat template), `losses.jsonl`.
The context ends with `<think>\n`; loss is taken on `reasoning\n</think>\n\nYes|No` and EOS alone.

    rbd sft model=embedded
    rbd sft model=r1_qwen_7b launch=zero3
"""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rbd_train.app import BaseConfig, stage
from rbd_train.errors import DataError, UsageError
from rbd_train.modelling import Rendered, load_model, load_tokenizer, pad_id, render_example, resolve_model
from rbd_train.prompts.detect import detect_messages
from rbd_train.records import Example
from rbd_train.run import Run, Table, world_size
from rbd_train.store import fingerprint, write_whole

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from trl.trainer.sft_trainer import SFTTrainer


EAGER_SCORES = 2**20  # attention scores per head and layer of a batch: 2.3 GB over SmolLM2-135M's layers


@dataclass
class ModelConfig:
    """The model to train."""

    path: str  # folder, hub name, `embedded` or `tiny`
    dtype: str = "float32"  # of the weights while training; bfloat16 ones get float32 masters in the optimizer
    lora_rank: int = 0  # rank of low-rank adapters on all linear layers (PEFT); 0: train every weight
    lora_alpha: int = 32  # scale of the adapters: alpha / rank


@dataclass
class TrainerConfig:
    """How to train; defaults are the paper's (papers.md 1.6)."""

    learning_rate: float = 1e-5  # peak
    epochs: float = 5.0
    max_steps: int = -1  # optimizer steps; -1: what epochs give
    global_batch: int = 8  # rows per optimizer step, over all processes
    micro_batch: int = 1  # rows per process and forward pass; accumulation follows
    max_length: int = 4096  # tokens; a longer row is dropped and counted, never cut
    max_drop_share: float = 0.2  # stop where more rows than this share are too long
    warmup_share: float = 0.1  # of the optimizer steps
    scheduler: str = "cosine"
    weight_decay: float = 0.01
    bf16: bool | None = None  # compute float32 weights in bfloat16 (autocast); null: where a GPU is at hand
    recompute: bool = False  # recompute activations in the backward pass, to save memory
    group_by_length: bool = True  # batch rows of like length, to pad less
    save_every: int = 0  # optimizer steps between checkpoints that a killed run continues from; 0: none
    log_every: int = 1  # optimizer steps


@dataclass
class SftConfig(BaseConfig):
    """Settings of sft."""

    model: ModelConfig = field(default_factory=lambda: ModelConfig("embedded"))  # what to train (conf/model)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)  # how to train
    train: str | None = None  # path of the examples; default: the output of stage curate


@stage("sft", SftConfig)
def main(cfg: SftConfig, run: Run) -> float | None:
    """Render, show what carries loss, train, save, check."""
    path = Path(cfg.train) if cfg.train else run.output_of("curate", "train.jsonl")
    examples = run.read(path, Example)
    source = resolve_model(cfg.model.path)
    tokenizer = load_tokenizer(source, reasoning=True)
    rows = keep_trainable(render(tokenizer, examples), cfg.trainer.max_length)
    run.table(rows_table(rows))
    check_rows(rows, cfg.trainer.max_length, cfg.trainer.max_drop_share)
    run.say(preview(tokenizer, rows.kept[0]))
    key = fingerprint([run.inputs, cfg.model.path, vars(cfg.trainer), cfg.seed])
    checkpoints = run.folder / f"checkpoints-{key}"
    trainer = make_trainer(source, cfg.model.dtype, tokenizer, rows.kept, vars(cfg.trainer), cfg.seed, checkpoints, run)
    trainer.train(resume_from_checkpoint=last_whole_checkpoint(checkpoints))
    losses = [entry for entry in trainer.state.log_history if "loss" in entry]
    save(trainer, tokenizer, run)
    run.facts |= {
        "steps": trainer.state.global_step,
        "rows": len(rows.kept),
        "tokens": sum(len(r.input_ids) for r in rows.kept),
    }
    if run.main:
        run.outputs["model"] = {"sha256": None, "rows": None}
        first, last = losses[0]["loss"], losses[-1]["loss"]
        run.say(f"{trainer.state.global_step} steps, loss {first:.4f} -> {last:.4f}; model in {run.folder / 'model'}")
        shutil.rmtree(checkpoints, ignore_errors=True)
    return float(losses[-1]["loss"])


class Rows(NamedTuple):
    """What became of the examples."""

    kept: list[Rendered]
    too_long: int
    untrainable: int


def render(tokenizer: "PreTrainedTokenizerBase", examples: Sequence[Example]) -> list[Rendered]:
    """Render every example to ids and labels."""
    rendered = []
    for example in examples:
        if example.trace is None or example.trace.thinking is None or example.trace.verdict is None:
            raise DataError(f"example {example.case.id}: no readable trace; was it written by curate?")
        messages = detect_messages(example.case)
        rendered.append(render_example(tokenizer, messages, example.trace.thinking, example.trace.verdict))
    return rendered


def keep_trainable(rendered: Sequence[Rendered], max_length: int) -> Rows:
    """Drop rows that are too long (cutting would keep the reasoning and lose label and EOS) or carry no loss."""
    kept = [row for row in rendered if len(row.input_ids) <= max_length]
    trainable = [row for row in kept if any(label != -100 for label in row.labels)]
    return Rows(trainable, len(rendered) - len(kept), len(kept) - len(trainable))


def rows_table(rows: Rows) -> Table:
    """Count rows kept, too long, without a trainable token."""
    lengths = sorted(len(row.input_ids) for row in rows.kept)
    trained = sum(label != -100 for row in rows.kept for label in row.labels)
    middle = lengths[len(lengths) // 2] if lengths else None
    return Table(
        name="sft", title="Rows to train on",
        columns=("kept", "too long", "without a trainable token", "median tokens", "longest", "tokens", "with loss"),
        rows=((len(rows.kept), rows.too_long, rows.untrainable, middle, lengths[-1] if lengths else None,
               sum(lengths), trained),),
    )  # fmt: skip


def check_rows(rows: Rows, max_length: int, max_drop_share: float) -> None:
    """Stop where nothing, or too little, is left.

    Raises:
        DataError: says how many rows are left, and names trainer.max_length.
    """
    total = len(rows.kept) + rows.too_long + rows.untrainable
    if not rows.kept:
        raise DataError(
            f"sft: 0 of {total} rows are left; {rows.too_long} exceed trainer.max_length={max_length} tokens"
        )
    if rows.too_long > max_drop_share * total:
        raise DataError(
            f"sft: {rows.too_long} of {total} rows exceed trainer.max_length={max_length} tokens; "
            f"raise it, or trainer.max_drop_share (now {max_drop_share})"
        )


def preview(tokenizer: "PreTrainedTokenizerBase", row: Rendered) -> str:
    """Show one example with the tokens that carry loss between ⟦ and ⟧."""
    start = next(i for i, label in enumerate(row.labels) if label != -100)
    context, trained = tokenizer.decode(row.input_ids[:start]), tokenizer.decode(row.input_ids[start:])
    return f"The first example; loss is taken between ⟦ and ⟧:\n{context}⟦{trained}⟧"


def accumulation(global_batch: int, micro_batch: int, processes: int) -> int:
    """Return the forward passes per optimizer step.

    Raises:
        UsageError: the global batch is no multiple of what one pass of all processes takes (A44).
    """
    if min(global_batch, micro_batch) < 1 or global_batch % (micro_batch * processes):
        raise UsageError(
            f"trainer.global_batch={global_batch} is no multiple of micro_batch x processes = "
            f"{micro_batch} x {processes}; accumulation would not be whole"
        )
    return global_batch // (micro_batch * processes)


def make_trainer(
    source: str, dtype: str, tokenizer: "PreTrainedTokenizerBase", rows: Sequence[Rendered],
    settings: Mapping[str, Any], seed: int, checkpoints: Path, run: Run,
) -> "SFTTrainer":  # fmt: skip
    """Set up TRL's trainer on rendered rows; its own preparation (templates, truncation at 1024) is switched off."""
    import torch
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl.trainer.sft_config import SFTConfig as TrlConfig
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling, SFTTrainer

    cuda = torch.cuda.is_available()
    sharded = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    save_every = 0 if sharded else settings["save_every"]  # resuming shards is another issue's
    # the arguments come first: under ZeRO-3 they announce that weights are to be sharded while they load (A45)
    args = TrlConfig(
        output_dir=str(checkpoints), learning_rate=settings["learning_rate"], num_train_epochs=settings["epochs"],
        max_steps=settings["max_steps"], per_device_train_batch_size=settings["micro_batch"],
        gradient_accumulation_steps=accumulation(settings["global_batch"], settings["micro_batch"], world_size()),
        max_length=None, packing=False,
        warmup_steps=settings["warmup_share"], lr_scheduler_type=settings["scheduler"],
        weight_decay=settings["weight_decay"], bf16=cuda if settings["bf16"] is None else settings["bf16"],
        activation_checkpointing=settings["recompute"], use_cpu=not cuda, seed=seed, data_seed=seed,
        train_sampling_strategy="group_by_length" if settings["group_by_length"] else "random",
        logging_steps=settings["log_every"], logging_first_step=True, report_to="none",
        save_strategy="steps" if save_every else "no", save_steps=save_every or 1, save_total_limit=1,
        disable_tqdm=not (run.main and sys.stderr.isatty()), dataset_kwargs={"skip_prepare_dataset": True},
        dataloader_pin_memory=cuda, remove_unused_columns=True,
    )  # fmt: skip
    # on a CPU eager attention was measured at twice the tokens/s, but it keeps every score: only for short rows
    scores = settings["micro_batch"] * max(len(row.input_ids) for row in rows) ** 2
    model = load_model(source, dtype, "eager" if not cuda and scores <= EAGER_SCORES else None)
    optimizer = None
    if dtype == "bfloat16" and not sharded:
        from rbd_train.master_adamw import MasterAdamW

        weights = model.parameters()
        optimizer = MasterAdamW(weights, lr=settings["learning_rate"], weight_decay=settings["weight_decay"])
    data = Dataset.from_list([{"input_ids": r.input_ids, "labels": r.labels, "length": len(r.input_ids)} for r in rows])
    kind = SFTTrainer
    if not cuda and world_size() == 1 and not sharded:
        from rbd_train.cpu import CompletionTrainer, keep_freed_memory

        keep_freed_memory()
        kind = CompletionTrainer
    trainer = kind(
        model=model, args=args, train_dataset=data, processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(pad_token_id=pad_id(tokenizer)),
        optimizers=(optimizer, None),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)  # it prints raw dictionaries; events.jsonl has them
    trainer.add_callback(log_to(run))
    run.facts |= {
        "distributed": str(trainer.accelerator.distributed_type).removeprefix("DistributedType."),
        "global_batch": settings["global_batch"], "accumulation": args.gradient_accumulation_steps,
    }  # fmt: skip
    return trainer


def last_whole_checkpoint(folder: Path) -> str | None:
    """Return the newest checkpoint that was written to its end: trainer_state.json is the last file of one."""
    found = [path for path in folder.glob("checkpoint-*") if (path / "trainer_state.json").is_file()]
    return str(max(found, key=lambda path: int(path.name.split("-")[1]))) if found else None


def save(trainer: "SFTTrainer", tokenizer: "PreTrainedTokenizerBase", run: Run) -> None:
    """Save weights and tokenizer, whole or not at all; every rank takes part, since ZeRO-3 gathers shards (A42)."""
    from rbd_train.store import canonical

    part = run.folder / "model.part"
    if run.main:
        shutil.rmtree(part, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    trainer.save_model(str(part))
    trainer.accelerator.wait_for_everyone()
    if not run.main:
        return
    tokenizer.save_pretrained(part)
    for leftover in ("training_args.bin", "README.md"):  # a pickle, and a card that says nothing
        (part / leftover).unlink(missing_ok=True)
    check_saved(trainer, part)
    losses = [canonical({"step": e["step"], "loss": e["loss"]}) for e in trainer.state.log_history if "loss" in e]
    write_whole(run.folder / "losses.jsonl", "\n".join(losses) + "\n")
    shutil.rmtree(run.folder / "model", ignore_errors=True)
    os.replace(part, run.folder / "model")


def check_saved(trainer: "SFTTrainer", folder: Path) -> None:
    """Compare the saved tensors with the trained parameters; a shard that was saved alone has size 0.

    Raises:
        DataError: a tensor is missing or of another shape.
    """
    from safetensors import safe_open

    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            found |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    for name, parameter in trainer.accelerator.unwrap_model(trainer.model).named_parameters():
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))  # under ZeRO-3 a parameter itself is empty
        if found.get(name) != shape:
            raise DataError(f"{folder}: tensor {name} is {found.get(name)}, expected {shape}; not saved whole")


def log_to(run: Run) -> Any:
    """Return a callback that writes each logged step to the run's events and its tracker."""
    from transformers import TrainerCallback

    class LogToRun(TrainerCallback):  # type: ignore[misc]
        """Write each logged step to the run's events and its tracker."""

        def on_log(
            self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any
        ) -> None:
            run.event(
                "train", step=state.global_step, **{k: v for k, v in (logs or {}).items() if isinstance(v, int | float)}
            )

    return LogToRun()
