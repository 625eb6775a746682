"""What a launch decides for its workers: how states are sharded, in which precision, and the file that stops them.

accelerate tells it by the environment, which one process without a launch file doesn't have.
"""

import os
from typing import Any

from rbd_train.errors import DataError, UsageError
from rbd_train.run import world_size

STOP_FILE = "stop"  # made by the launching process when it is told to stop; workers finish their step and save


def sharded() -> str:
    """Return how states are sharded over ranks: empty, zero1, zero2, zero3 or fsdp2."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        return f"zero{os.environ.get('ACCELERATE_DEEPSPEED_ZERO_STAGE', '2')}"
    return "fsdp2" if os.environ.get("ACCELERATE_USE_FSDP") == "true" else ""


def offloads() -> bool:
    """Tell whether weights or optimizer are kept in the host's memory."""
    kinds = ("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE")
    return sharded() == "zero3" and any(os.environ.get(kind, "none") != "none" for kind in kinds)


def layout() -> str:
    """Return how states are laid out, by the name of its launch file: as `sharded`, with offload told apart."""
    return "zero3_offload" if offloads() else sharded()


def set_precision(bf16: bool | None, cuda: bool) -> bool:
    """Decide on autocast, for the launch file too: its own word counts where TRL's arguments say nothing."""
    chosen = cuda if bf16 is None else bf16
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16" if chosen else "no"
    return chosen


def on_one_gpu(args: Any) -> Any:
    """Let one process use one GPU: transformers would split each batch over all that it sees, and multiply it."""
    if world_size() == 1 and args.n_gpu > 1:
        args._n_gpu = 1
    return args


def agreed(recompute: bool, device: Any) -> bool:
    """Recompute on all ranks where one has to: under ZeRO-3 they gather weights once more where they do."""
    import torch
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return recompute
    flag = torch.tensor(int(recompute), device=device)
    distributed.all_reduce(flag, op=distributed.ReduceOp.MAX)
    return bool(flag.item())


def check_alike(read: str) -> None:
    """Refuse ranks that read different files: they would train apart, or wait for each other for ever.

    Args:
        read: names what this rank read; a checkpoint, or a fingerprint of settings and inputs.

    Raises:
        DataError: names what two ranks read.
    """
    from accelerate.utils import gather_object

    if world_size() == 1:
        return
    ranks: list[str] = gather_object([read])
    other = next((number for number, each in enumerate(ranks) if each != ranks[0]), None)
    if other is not None:
        raise DataError(
            f"rank 0 has {ranks[0]}, rank {other} has {ranks[other]}: they read other data, another model or another "
            "checkpoint; on several machines root must be one shared folder, and every file the same"
        )


def prepare_deepspeed(cuda: bool) -> None:
    """Build DeepSpeed's optimizer for host memory, where offload needs it, before weights are loaded (A46).

    On a CPU keep it from compiling shm_comm, which inference alone calls: two minutes on two cores, with no word.

    Raises:
        UsageError: it can't be built: no C++ compiler, or no CUDA headers.
    """
    if not sharded().startswith("zero"):
        return
    import deepspeed

    if not cuda:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if os.environ.get("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none") == "none":
        return
    from deepspeed.ops.op_builder import CPUAdamBuilder

    try:
        CPUAdamBuilder().load(verbose=False)
    except Exception as error:
        told = str(error).strip().split("\n", 1)[0][:200]
        raise UsageError(
            f"CPU offload needs DeepSpeed's cpu_adam, which can't be built here ({told}); install a C++ compiler (and, "
            "with a GPU, the CUDA headers of torch's version), or use launch=zero3"
        ) from error
