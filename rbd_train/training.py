"""How a detector is trained: TRL's trainer, set up from the settings.

TRL owns the loop; `trainer.py` adds to it what a detector at scale needs: row order by global batch, whole checkpoints,
stopping on SIGTERM and Ctrl-C, and what was processed per second.
"""

import importlib.util
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rbd_train.checkpoints import check_fits, newest_whole, numbered
from rbd_train.errors import DataError, IncompleteError
from rbd_train.launched import (
    STOP_FILE,
    agreed,
    check_alike,
    layout,
    on_one_gpu,
    prepare_deepspeed,
    set_precision,
    sharded,
)
from rbd_train.memory import Shape, check_states, gpu_memory, model_config, settle
from rbd_train.modelling import Rendered, add_lora, load_model, pad_id
from rbd_train.run import Run, world_size
from rbd_train.settings import ModelConfig, TrainerConfig, accumulation, check_settings, facts_of
from rbd_train.store import canonical, write_whole

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EAGER_SCORES = 2**20  # attention scores per head and layer of a batch: 2.3 GB over SmolLM2-135M's layers


def make_trainer(
    source: str, model: ModelConfig, tokenizer: "PreTrainedTokenizerBase", rows: Sequence[Rendered],
    held_back: Sequence[Rendered], settings: TrainerConfig, objective: str, seed: int, checkpoints: Path, run: Run,
) -> Any:  # fmt: skip
    """Set up TRL's trainer on rendered rows; its own preparation (templates, truncation at 1024) is switched off.

    Raises:
        UsageError: settings that don't go together, or a machine that lacks what they need.
    """
    import torch
    from transformers import PrinterCallback

    from rbd_train.trainer import Classifier, Distiller, Stopping

    cuda, sharding = torch.cuda.is_available(), sharded()
    check_settings(model, settings, objective, cuda, sharding)
    prepare_deepspeed(cuda)
    shape = longest_pass(model_config(model.shape, source), model, settings, rows, objective)
    warning = check_states(
        shape.config, model.dtype, model.lora_rank, model.four_bit, layout(), world_size(), shape.bf16,
        shape.classifies,
    )  # fmt: skip
    if warning:
        run.say(warning)
    recompute = settle_here(shape, gpu_memory(), run) if cuda else bool(settings.recompute)
    # the arguments come before the model: under ZeRO-3 they announce that weights are sharded while they load (A45)
    joins, flash = objective != "classifier", flash_fits(model.dtype, settings.bf16, cuda)
    args = arguments(settings, seed, checkpoints, cuda, run.main, bool(held_back), joins, flash)
    recompute = agreed(recompute, args.device)
    check_alike(checkpoints.name)
    args.activation_checkpointing = args.gradient_checkpointing = recompute
    module = load_trained(source, model, tokenizer, rows, settings, objective, cuda, flash, seed)
    optimizer = own_optimizer(module, model, settings, args.device)
    held_back = filled(held_back, settings.micro_batch * world_size())
    kind: Any = Classifier if objective == "classifier" else Distiller
    if not cuda and not sharding and world_size() == 1:
        from rbd_train.cpu import CompletionTrainer, keep_freed_memory

        keep_freed_memory()
        kind = Classifier if objective == "classifier" else CompletionTrainer
    trainer = kind(
        model=module, args=args, train_dataset=dataset(rows), eval_dataset=dataset(held_back) if held_back else None,
        processing_class=tokenizer, optimizers=(optimizer, None),
        **({"data_collator": kind.collator(pad_id(tokenizer))} if not args.padding_free else {}),
    )  # fmt: skip
    trainer.prepare_run(settings.global_batch, settings.group_by_length, facts_of(model, settings, objective))
    trainer.remove_callback(PrinterCallback)  # it prints raw dictionaries; events.jsonl has them
    trainer.add_callback(log_to(run))
    trainer.stopping = Stopping(run.folder / STOP_FILE)
    trainer.add_callback(trainer.stopping)
    run.facts |= {
        "distributed": str(trainer.accelerator.distributed_type).removeprefix("DistributedType."),
        "global_batch": settings.global_batch, "accumulation": args.gradient_accumulation_steps,
        "attention": getattr(module.config, "_attn_implementation", None), "padding_free": args.padding_free,
        "recompute": recompute,
    }  # fmt: skip
    return trainer


def longest_pass(
    config: Any, model: ModelConfig, settings: TrainerConfig, rows: Sequence[Rendered], objective: str
) -> Shape:
    """Return the shape of the largest micro-batch there may be: memory must do for it."""
    most = sorted(rows, key=lambda row: -len(row.input_ids))[: settings.micro_batch]
    return Shape(
        config, model.dtype, settings.micro_batch, len(most[0].input_ids),
        max(sum(label != -100 for label in row.labels) for row in most), settings.recompute, model.lora_rank,
        model.four_bit, settings.bf16 is not False, objective == "classifier",
    )  # fmt: skip


def settle_here(shape: Shape, room: int, run: Run) -> bool:
    """Say whether activations are to be recomputed on a GPU of `room` bytes; warn where even so it may not do."""
    settled, plan = settle(shape, layout(), world_size(), room)
    how = "recomputing activations" if settled.recompute else "without recomputation"
    told = f"planned memory, {how}: {plan.total / 2**30:.1f} GiB of {room / 2**30:.1f} GiB per GPU"
    if plan.total > room:
        told = f"warning: {told}: it may not fit; `rbd plan` with the same keys says which setting would"
    run.say(told)
    run.facts["planned_bytes"] = plan.total
    return bool(settled.recompute)


def flash_fits(dtype: str, bf16: bool | None, cuda: bool) -> bool:
    """Tell whether FlashAttention can be used: installed, on a GPU, and not on float32, which it can't read."""
    found = cuda and importlib.util.find_spec("flash_attn") is not None
    return found and (bf16 is not False or dtype == "bfloat16")


def arguments(
    settings: TrainerConfig, seed: int, checkpoints: Path, cuda: bool, main: bool, evaluates: bool, joins: bool,
    flash: bool,
) -> Any:  # fmt: skip
    """Return TRL's arguments; `joins`: a language model, whose rows FlashAttention can keep apart end to end."""
    from trl.trainer.sft_config import SFTConfig as TrlConfig

    free = joins and flash if settings.padding_free is None else settings.padding_free
    liger = cuda and importlib.util.find_spec("liger_kernel") is not None
    args = TrlConfig(
        output_dir=str(checkpoints), learning_rate=settings.learning_rate, num_train_epochs=settings.epochs,
        max_steps=settings.max_steps, per_device_train_batch_size=settings.micro_batch,
        per_device_eval_batch_size=settings.micro_batch, prediction_loss_only=True,
        gradient_accumulation_steps=accumulation(settings.global_batch, settings.micro_batch, world_size()),
        max_length=None, packing=False, padding_free=free,
        warmup_steps=settings.warmup_share, lr_scheduler_type=settings.scheduler, weight_decay=settings.weight_decay,
        bf16=set_precision(settings.bf16, cuda),
        use_liger_kernel=liger if settings.liger is None else settings.liger,
        # a classifier has no language model's head to fuse the loss with
        liger_kernel_config=None if joins else {"fused_linear_cross_entropy": False},
        use_cpu=not cuda, seed=seed, data_seed=seed, logging_steps=1,
        report_to="none", save_strategy="steps" if settings.save_every else "no",
        save_steps=settings.save_every or 1, save_total_limit=1,
        eval_strategy="steps" if evaluates else "no", eval_steps=settings.eval_every,
        ddp_find_unused_parameters=False,
        disable_tqdm=not (main and sys.stderr.isatty()), dataset_kwargs={"skip_prepare_dataset": True},
        dataloader_pin_memory=cuda, remove_unused_columns=True, logging_nan_inf_filter=False,
    )  # fmt: skip
    return on_one_gpu(args)


def load_trained(
    source: str, model: ModelConfig, tokenizer: "PreTrainedTokenizerBase", rows: Sequence[Rendered],
    settings: TrainerConfig, objective: str, cuda: bool, flash: bool, seed: int,
) -> Any:  # fmt: skip
    """Load the model with the attention that suits the rows, and with adapters where they are asked for."""
    import torch

    # on a CPU eager attention was measured at twice the tokens/s, but it keeps every score: only for short rows
    scores = settings.micro_batch * max(len(row.input_ids) for row in rows) ** 2
    attention = "flash_attention_2" if flash else "eager" if not cuda and scores <= EAGER_SCORES else None
    extra: dict[str, Any] = {}
    if objective == "classifier":
        extra = {"num_labels": 2, "pad_token_id": pad_id(tokenizer), "id2label": {0: "No", 1: "Yes"}}
    if model.four_bit:
        from transformers import BitsAndBytesConfig

        extra["quantization_config"] = BitsAndBytesConfig(  # type: ignore[no-untyped-call]
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
        extra["device_map"] = {"": int(os.environ.get("LOCAL_RANK", "0"))}
    torch.manual_seed(seed)  # a classifier's head is drawn while loading: the same one on every rank
    module = load_model(source, model.dtype, attention, **extra)
    for key, value in model.shape.items():
        if getattr(module.config, key) != value:
            raise DataError(
                f"model {source}: its {key} is {getattr(module.config, key)}, but model.shape.{key}={value}, "
                "which plan works with; correct conf/model"
            )
    return add_lora(module, model.lora_rank, model.lora_alpha, seed) if model.lora_rank else module


def own_optimizer(module: Any, model: ModelConfig, settings: Any, device: Any) -> Any:
    """Return the optimizer that keeps float32 masters of bfloat16 weights; None where the trainer's own does."""
    if model.dtype != "bfloat16" or sharded():
        return None
    from rbd_train.masters import MasterAdamW

    # masters are made where the weights will be: the trainer moves the weights alone, when it is made
    placed = module if model.four_bit else module.to(device)
    return MasterAdamW(placed.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay)


def dataset(rows: Sequence[Rendered]) -> Any:
    """Return rows as the trainer reads them."""
    from datasets import Dataset

    return Dataset.from_list([{"input_ids": row.input_ids, "labels": row.labels} for row in rows])


def filled(rows: Sequence[Rendered], batch: int) -> list[Rendered]:
    """Fill the last batch of all processes with rows that carry no loss; accelerate would count rows twice (A47)."""
    silent = [rows[-1]._replace(labels=[-100] * len(rows[-1].labels))] if rows else []
    return [*rows, *silent * (-len(rows) % batch)]


def log_to(run: Run) -> Any:
    """Return a callback that writes each logged step to the run's events and its tracker."""
    from transformers import TrainerCallback

    class LogToRun(TrainerCallback):  # type: ignore[misc]
        def on_log(
            self, args: Any, state: Any, control: Any, logs: Mapping[str, float] | None = None, **kwargs: Any
        ) -> None:
            numbers = {key: value for key, value in (logs or {}).items() if isinstance(value, int | float)}
            for name, words in (("loss", "loss"), ("eval_loss", "held-out loss")):
                if not math.isfinite(numbers.get(name, 0.0)):
                    raise DataError(
                        f"{run.stage}: the {words} of step {state.global_step} is {numbers[name]}: training has "
                        f"diverged; lower trainer.learning_rate ({args.learning_rate}), and see that the rows are sound"
                    )
            run.event("train", step=state.global_step, **numbers)

    return LogToRun()


def to_continue(checkpoints: Path, facts: Mapping[str, Any], run: Run) -> Path | None:
    """Find the newest whole checkpoint, and refuse one that can't be read, before weights are loaded (A43)."""
    newest = newest_whole(checkpoints)
    for told in newest.passed_over:
        run.say(f"passed over {told}")
    if newest.passed_over and newest.folder is None:
        run.say("no whole checkpoint is left: training starts anew")
    for other in sorted(path for path in run.folder.glob("checkpoints-*") if path != checkpoints and numbered(path)):
        run.say(
            f"{other} is of a training with other settings or rows; it is left there: remove it when it is done with"
        )
    if newest.folder is not None:
        check_fits(newest.folder, facts)
        run.say(f"continuing from {newest.folder}")
    return newest.folder


def train_to_the_end(trainer: Any, checkpoint: Path | None, run: Run) -> None:
    """Train, from a checkpoint where there is one.

    Raises:
        IncompleteError: SIGTERM came; a checkpoint is written and the same command continues.
        KeyboardInterrupt: the same, of Ctrl-C.
    """
    from rbd_train.trainer import train

    check_alike(str(checkpoint and checkpoint.name))
    train(trainer, str(checkpoint) if checkpoint else None)
    if trainer.unsaved:
        run.say(f"{trainer.unsaved}; the trained weights alone may still fit, and are written next")
    if trainer.stopping.stopped:
        kind = KeyboardInterrupt if trainer.stopping.interrupted else IncompleteError
        raise kind(
            f"{run.stage}: stopped after step {trainer.state.global_step} of {trainer.state.max_steps}, as asked; "
            "a checkpoint is written and the same command continues"
        )


def report_speed(trainer: Any, rows: int, tokens: int, run: Run) -> None:
    """Write the losses and say how fast training was; every rank takes part in the sums."""
    speed = trainer.throughput.speed()
    losses = [entry for entry in trainer.state.log_history if "loss" in entry]
    run.facts |= {
        "steps": trainer.state.global_step,
        "rows": rows,
        "tokens": tokens,
        "speed": speed._asdict(),
        "held_out_loss": held_out_loss(trainer),
    }
    if not run.main:
        return
    written = [canonical({"step": entry["step"], "loss": entry["loss"]}) for entry in losses]
    write_whole(run.folder / "losses.jsonl", "\n".join(written) + "\n")
    run.note_output("losses.jsonl")
    run.event("speed", **{key: value for key, value in speed._asdict().items() if value is not None})
    mfu = "" if speed.mfu is None else f", MFU {speed.mfu:.1%}"
    run.say(
        f"{speed.tokens_per_second:.0f} tokens/s without padding, padding {speed.padding:.1%} of what was computed"
        f"{mfu}, peak memory {speed.peak_bytes / 2**30:.2f} GiB"
    )
    first, last = losses[0]["loss"], losses[-1]["loss"]
    held = held_out_loss(trainer)
    run.say(
        f"{trainer.state.global_step} steps, loss {first:.4f} -> {last:.4f}"
        f"{'' if held is None else f', held-out loss {held:.4f}'}; model in {run.folder / 'model'}"
    )


def held_out_loss(trainer: Any) -> float | None:
    """Return the last loss measured on what is held back: the mean over its tokens; None where nothing is."""
    found = [float(entry["eval_loss"]) for entry in trainer.state.log_history if "eval_loss" in entry]
    return found[-1] if found else None
