"""The settings of a training, their checks, and what a checkpoint and a model card say of them."""

import importlib.util
from dataclasses import dataclass, field
from typing import Any

from rbd_train.errors import UsageError
from rbd_train.launched import layout
from rbd_train.run import world_size

OBJECTIVES = ("reasoning", "label", "classifier")


@dataclass
class ModelConfig:
    """The model to train."""

    path: str  # folder, hub name, `embedded` or `tiny`
    dtype: str = "float32"  # of the weights: float32, or bfloat16 with float32 masters in the optimizer
    lora_rank: int = 0  # rank of low-rank adapters on all linear layers (PEFT); 0: train every weight
    lora_alpha: int = 32  # scale of the adapters: alpha / rank
    four_bit: bool = False  # hold the frozen base in 4 bits (QLoRA; needs bitsandbytes and a GPU)
    licence: str | None = None  # of the base, for the model card
    shape: dict[str, Any] = field(default_factory=dict)  # its config.json in brief, so that plan needs no download


@dataclass
class TrainerConfig:
    """How to train; defaults are the paper's (arXiv 2505.17100)."""

    learning_rate: float = 1e-5  # peak
    epochs: float = 5.0  # passes over the rows
    max_steps: int = -1  # optimizer steps; -1: what epochs give
    global_batch: int = 8  # rows per optimizer step, over all processes
    micro_batch: int = 1  # rows per process and forward pass; accumulation follows
    max_length: int = 4096  # tokens; a longer row is dropped and counted, never cut
    max_drop_share: float = 0.2  # stop where more rows than this share are too long
    warmup_share: float = 0.1  # of the optimizer steps
    scheduler: str = "cosine"  # of the learning rate, by its name in transformers (linear, constant, ...)
    weight_decay: float = 0.01  # AdamW's
    bf16: bool | None = None  # compute float32 weights in bfloat16 (autocast); null: where a GPU is at hand
    recompute: bool | None = None  # recompute activations, to save memory; null: where a GPU's memory needs it
    group_by_length: bool = True  # batch rows of like length, to pad less
    padding_free: bool | None = None  # lay a batch's rows end to end, unpadded; null: with FlashAttention
    liger: bool | None = None  # Liger's kernels; null: where they are installed and a GPU is at hand
    eval_share: float = 0.0  # share of the groups held back to measure the loss on
    eval_every: int = 20  # optimizer steps between those measurements
    save_every: int = 0  # optimizer steps between a killed run's checkpoints; 0: on a signal and at the end


# what a checkpoint doesn't depend on: a run may go on with other values of these
INNOCENT = ("micro_batch", "recompute", "padding_free", "liger", "save_every", "max_drop_share")


def accumulation(global_batch: int, micro_batch: int, processes: int, named: str = "processes") -> int:
    """Return the forward passes per optimizer step.

    Raises:
        UsageError: the global batch is no multiple of what one pass of all processes takes (A44).
    """
    if min(global_batch, micro_batch) < 1 or global_batch % (micro_batch * processes):
        raise UsageError(
            f"trainer.global_batch={global_batch} is no multiple of micro_batch x {named} = "
            f"{micro_batch} x {processes}; accumulation would not be whole"
        )
    return global_batch // (micro_batch * processes)


def check_schedule(settings: Any) -> None:
    """Refuse numbers that no training can go by, of sft's settings or dpo's, before any file is read.

    Raises:
        UsageError: names the key, its value and what it may be.
    """
    from transformers.trainer_utils import SchedulerType

    positive = ("learning_rate", "epochs", "max_length", "global_batch", "micro_batch", "eval_every",
                "reference_batch", "beta")  # fmt: skip
    natural = ("weight_decay", "max_drop_share")
    shares = ("warmup_share", "eval_share")
    for name, value in vars(settings).items():
        wanted = ""
        if name in positive and value <= 0:
            wanted = "must be more than 0"
        elif name in natural and value < 0:
            wanted = "must be at least 0"
        elif name in shares and not 0 <= value < 1:
            wanted = "must be a share, at least 0 and below 1"
        elif name == "save_every" and value < 0:
            wanted = "counts steps, 0 for none"
        elif name == "max_steps" and value != -1 and value < 1:
            wanted = "must be at least 1, or -1 for what epochs give"
        if wanted:
            raise UsageError(f"trainer.{name} is {value}; it {wanted}")
    known = [kind.value for kind in SchedulerType]
    if settings.scheduler not in known:
        raise UsageError(f"trainer.scheduler is {settings.scheduler!r}; choose one of {', '.join(known)}")


def check_model(model: ModelConfig) -> None:
    """Refuse a model's settings that no training can go by, before any file is read.

    Raises:
        UsageError: names the key, its value and what it may be.
    """
    if model.lora_rank < 0:
        raise UsageError(f"model.lora_rank is {model.lora_rank}; it must be at least 1, or 0 to train every weight")
    if model.lora_rank and model.lora_alpha < 1:
        raise UsageError(f"model.lora_alpha is {model.lora_alpha}; it must be at least 1, since it scales the adapters")
    if model.dtype not in ("float32", "bfloat16"):
        raise UsageError(f"model.dtype is {model.dtype!r}; choose float32 or bfloat16")


def check_objective(objective: str) -> None:
    """Refuse an objective that there isn't.

    Raises:
        UsageError: names those there are.
    """
    if objective not in OBJECTIVES:
        raise UsageError(f"objective is {objective!r}; choose one of {', '.join(OBJECTIVES)}")


def check_together(model: ModelConfig, settings: TrainerConfig, objective: str, sharding: str) -> None:
    """Refuse settings that don't go together on any machine.

    Raises:
        UsageError: names the keys and the way out.
    """
    if model.four_bit and not model.lora_rank:
        raise UsageError("model.four_bit=true freezes the base, so there is nothing to train: set model.lora_rank=16")
    if model.four_bit and sharding:
        raise UsageError(f"model.four_bit=true under {sharding}: 4-bit weights aren't sharded; use launch=ddp")
    if settings.padding_free and objective == "classifier":
        raise UsageError("trainer.padding_free=true: a classifier reads one row at a time; set it to false")
    if sharding == "fsdp2" and model.dtype == "bfloat16":
        raise UsageError("FSDP2 keeps no float32 masters of bfloat16 weights; set model.dtype=float32, or use zero3")


def check_settings(model: ModelConfig, settings: TrainerConfig, objective: str, cuda: bool, sharding: str) -> None:
    """Refuse what can't work on this machine or under this launch, before weights are loaded.

    Raises:
        UsageError: names the keys and the way out.
    """
    check_together(model, settings, objective, sharding)
    if model.four_bit and (not cuda or importlib.util.find_spec("bitsandbytes") is None):
        raise UsageError("model.four_bit=true needs a GPU and the package bitsandbytes; without them set it to false")
    if settings.liger and (not cuda or importlib.util.find_spec("liger_kernel") is None):
        raise UsageError("trainer.liger=true needs a GPU and the package liger-kernel; without them set it to null")
    if sharding == "fsdp2" and not cuda:
        raise UsageError("FSDP2 needs a GPU: without one accelerate trains under DDP and says nothing; use launch=ddp")


def facts_of(model: ModelConfig, settings: TrainerConfig, objective: str) -> dict[str, Any]:
    """Return what a checkpoint says of itself."""
    return {
        "processes": world_size(), "sharding": layout(), "objective": objective, "lora_rank": model.lora_rank,
        "global_batch": settings.global_batch,
    }  # fmt: skip


def told_settings(model: ModelConfig, trainer: Any, launch: str | None, **others: Any) -> dict[str, Any]:
    """Return the settings that a model card lists: all that the weights depend on."""
    apart = ("path", "licence", "shape")  # the card names the base and its licence itself
    return {
        **others, "launch": launch or layout() or "none", "processes": world_size(),
        **{f"model.{key}": value for key, value in vars(model).items() if key not in apart},
        **{f"trainer.{key}": value for key, value in vars(trainer).items()},
    }  # fmt: skip
