"""What training takes of each rank's memory, before anything is loaded.

States (weights, gradients, optimizer) are counted as DeepSpeed lays them out (arXiv 1910.02054); activations are
tracked by torch itself (`tracked_pass.py`).
"""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from rbd_train.errors import UsageError
from rbd_train.tracked_pass import Activations, activations, sizes, with_layers

BUCKET = 5 * 10**8  # elements of DeepSpeed's default reduce bucket, which accelerate keeps
SPARE = 0.9  # of a GPU's memory may be planned without recomputation: the planner's error is up to a tenth


class States(NamedTuple):
    """Bytes per rank that stay from step to step; with offload, those of the host are counted apart."""

    weights: int
    gradients: int
    optimizer: int  # AdamW's two moments, and float32 masters where weights are in bfloat16 or sharded
    host: int  # what CPU offload moves to the host's memory, per rank


class Shape(NamedTuple):
    """A model and the pass it makes: `rows` of `length` tokens, `completion` of each supervised."""

    config: Any
    dtype: str
    rows: int
    length: int
    completion: int
    recompute: bool | None  # None: not decided yet, see `settle`
    lora_rank: int = 0
    four_bit: bool = False
    bf16: bool = True  # whether a GPU computes in bfloat16
    classifies: bool = False  # whether a two-label head is trained, which needs no logits over the vocabulary


class Plan(NamedTuple):
    """Bytes of one rank."""

    parameters: int
    trained: int
    states: States
    activations: Activations
    moment: int  # what the pass's worst moment, or the optimizer's step, needs beyond activations and logits
    buffers: int
    total: int
    host: int  # of the host's memory, per rank


def plan_rank(shape: Shape, sharding: str, processes: int, gpu: bool) -> Plan:
    """Plan what one rank holds.

    `gpu`: ZeRO and FSDP compute in bfloat16, float32 weights are autocast otherwise, and logits are scored in tiles.
    """
    zero, halves = sharding.startswith("zero"), gpu and shape.bf16
    dtype = "bfloat16" if halves and zero else shape.dtype
    total, trained, constant = sizes(shape.config, shape.lora_rank, dtype, shape.classifies)
    quantized = in_four_bits(shape.config, total, trained) if shape.four_bit else 0
    held = states(total, trained, dtype, sharding, processes, quantized)
    # FSDP keeps float32 shards and gathers them as bfloat16, so that autocast casts, and keeps, nothing
    computed = "bfloat16" if halves and sharding == "fsdp2" else dtype
    head = "labels" if shape.classifies else "tiles" if gpu else "whole"
    passed = activations(
        shape.config, computed, shape.rows, shape.length, shape.completion, recompute=bool(shape.recompute),
        autocast=halves and computed == "float32", lora_rank=shape.lora_rank, head=head,
    )  # fmt: skip
    between = buffers(sharding, processes, total, trained, dtype) + constant
    if sharding == "fsdp2" and processes > 1:
        between += gathered_at_once(shape, computed)
    # MasterAdamW holds float32 gradients during its step, when no activation is left
    step = 4 * trained if dtype == "bfloat16" and not zero else 0
    peak = max(passed.peak, step)
    moment = max(0, peak - passed.kept - passed.logits)
    total_bytes = held.weights + held.gradients + held.optimizer + peak + between
    return Plan(total, trained, held, passed, moment, between, total_bytes, held.host)


def settle(shape: Shape, sharding: str, processes: int, room: float) -> tuple[Shape, Plan]:
    """Plan one rank of a GPU of `room` bytes; recomputation that isn't decided is chosen only where it is needed."""
    if shape.recompute is None:
        shape = shape._replace(recompute=False)
        plan = plan_rank(shape, sharding, processes, gpu=True)
        if plan.total <= SPARE * room:
            return shape, plan
        shape = shape._replace(recompute=True)
    return shape, plan_rank(shape, sharding, processes, gpu=True)


def fitting(plan: Plan, bytes_per_rank: float, host_bytes: float, ranks_per_machine: int) -> bool:
    """Tell whether a plan fits in a rank's memory and its host's."""
    return plan.total <= bytes_per_rank and plan.host * ranks_per_machine <= host_bytes


def check_states(
    config: Any, dtype: str, lora_rank: int, four_bit: bool, sharding: str, processes: int, bf16: bool,
    classifies: bool = False,
) -> str:  # fmt: skip
    """Compare the states with this machine's memory before weights are loaded; returns a warning or nothing.

    Raises:
        UsageError: the states alone can't fit.
    """
    import psutil
    import torch

    gpu = torch.cuda.is_available()
    total, trained, _ = sizes(config, lora_rank, dtype, classifies)
    working = "bfloat16" if gpu and bf16 and sharding.startswith("zero") else dtype
    quantized = in_four_bits(config, total, trained) if four_bit else 0
    held = states(total, trained, working, sharding, processes, quantized)
    here = min(processes, torch.cuda.device_count()) if gpu else processes
    room = gpu_memory() if gpu else psutil.virtual_memory().total // here
    need = held.weights + held.gradients + held.optimizer + (0 if gpu else held.host)
    told = f"weights, gradients and optimizer take {need / 2**30:.1f} GiB of {room / 2**30:.1f} GiB per process"
    host = psutil.virtual_memory().total
    if gpu and held.host * here > host:
        raise UsageError(
            f"{held.host * here / 2**30:.1f} GiB go to the host's memory, which has {host / 2**30:.1f}: it can't fit; "
            "`rbd plan` with the same keys says which setting would"
        )
    if need > room:
        raise UsageError(f"{told}: it can't fit; `rbd plan` with the same keys says which setting would")
    return f"{told}; activations come on top: `rbd plan` tells" if need > 0.8 * room else ""


def gpu_memory() -> int:
    """Return the bytes of this rank's own GPU: asking of another one opens a context there that stays."""
    import torch

    return int(torch.cuda.mem_get_info(int(os.environ.get("LOCAL_RANK", "0")))[1])


def in_four_bits(config: Any, total: int, trained: int) -> int:
    """Count the parameters that bitsandbytes holds in 4 bits: all frozen ones but embedding and head."""
    kept = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    return int(total - trained - kept)


def states(total: int, trained: int, dtype: str, sharding: str, processes: int, quantized: int = 0) -> States:
    """Count the states of one rank.

    Args:
        total: parameters of the model.
        trained: those that are trained.
        dtype: of the weights in the forward pass. Under ZeRO with mixed precision this is bfloat16.
        sharding: empty (one process), ddp, zero1, zero2, zero3, zero3_offload or fsdp2.
        processes: ranks.
        quantized: parameters that are held in 4 bits with their scales (4.5 bits in all).
    """
    width = 4 if dtype == "float32" else 2
    shard = processes if sharding not in ("", "ddp") else 1
    weights = round(quantized * 4.5 / 8) + width * (total - quantized)
    gradients, moments = width * trained, 8 * trained
    # DeepSpeed steps on a float32 copy of its shard in every dtype; so does MasterAdamW where weights are bfloat16
    masters = 4 * trained if sharding.startswith("zero") or width == 2 else 0
    if sharding in ("zero3", "zero3_offload", "fsdp2"):
        weights //= shard
    if sharding in ("zero2", "zero3", "zero3_offload", "fsdp2"):
        gradients //= shard
    optimizer = (moments + masters) // shard
    if sharding == "zero3_offload":  # all live on the host, gradients twice: as they come, and in float32
        return States(0, 0, 0, weights + gradients + optimizer + 4 * trained // shard)
    return States(weights, gradients, optimizer, 0)


def buffers(sharding: str, processes: int, total: int, trained: int, dtype: str) -> int:
    """Return the bytes of communication buffers: a reduce bucket, and under ZeRO-3 what is gathered at a time."""
    width = 4 if dtype == "float32" else 2
    if sharding == "ddp" and processes > 1:
        return width * trained  # DDP's buckets hold the gradients once more
    if sharding.startswith("zero3"):  # the bucket is made whole, however little is trained
        return width * (BUCKET + (min(10**9, total) if processes > 1 else 0))  # stage3_max_live_parameters
    return width * BUCKET if sharding.startswith("zero") else 0


def gathered_at_once(shape: Shape, dtype: str) -> int:
    """Return the bytes of whole weights and gradients under FSDP: those of embedding and head, and of two layers."""
    # one layer computes while the next one is gathered: as much as a model of two layers has
    total, trained, _ = sizes(with_layers(shape.config, 2), shape.lora_rank, dtype, shape.classifies)
    return (4 if dtype == "float32" else 2) * (total + trained)


def model_config(shape: Mapping[str, Any], source: str | None) -> Any:
    """Return transformers' config of a model: from its own files, or from `model.shape`.

    Raises:
        UsageError: neither is at hand.
    """
    from transformers import AutoConfig

    settings = dict(shape)
    if settings:
        return AutoConfig.for_model(settings.pop("model_type"), **settings)
    try:
        return AutoConfig.from_pretrained(str(source), trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"model {source!r}: its config.json isn't at hand; give model.shape what it says (as conf/model/r1_*.yaml)"
        ) from error
