"""What training takes of each rank's memory, before anything is loaded.

States (weights, gradients, optimizer) are counted as DeepSpeed lays them out (arXiv 1910.02054); activations are
tracked by torch itself over one forward and backward pass on fake tensors, which hold shapes and no data.
"""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from rbd_train.errors import UsageError

BUCKET = 5 * 10**8  # elements of DeepSpeed's default reduce bucket, which accelerate keeps
TILE_ROWS, TILE_COLUMNS = 4096, 32768  # tokens and vocabulary that TRL's fused head scores at a time on a GPU
SPARE = 0.9  # of a GPU's memory may be planned without recomputation: the planner's error is up to a tenth


class States(NamedTuple):
    """Bytes per rank that stay from step to step; with offload, those of the host are counted apart."""

    weights: int
    gradients: int
    optimizer: int  # AdamW's two moments, and float32 masters where weights are in bfloat16 or sharded
    host: int  # what CPU offload moves to the host's memory, per rank


class Activations(NamedTuple):
    """Bytes per rank of one forward and backward pass, beyond weights and gradients."""

    kept: int  # held for the backward pass, logits apart
    logits: int  # of the supervised tokens; on a GPU those of one tile
    peak: int  # all that is there at the worst moment: what is kept, logits, and what the moment itself needs


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
    held = states(total, trained, dtype, sharding, processes, shape.four_bit)
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
    held = states(total, trained, working, sharding, processes, four_bit)
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


def sizes(config: Any, lora_rank: int, dtype: str, classifies: bool = False) -> tuple[int, int, int]:
    """Count parameters, trained parameters and bytes of buffers of a model that is never made."""
    with fake() as made:
        model = made(config, dtype, "sdpa", lora_rank, classifies)
        total = sum(weight.numel() for weight in model.parameters())
        trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
        buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    return total, trained, buffers


def states(total: int, trained: int, dtype: str, sharding: str, processes: int, four_bit: bool = False) -> States:
    """Count the states of one rank.

    Args:
        total: parameters of the model.
        trained: those that are trained.
        dtype: of the weights in the forward pass. Under ZeRO with mixed precision this is bfloat16.
        sharding: empty (one process), ddp, zero1, zero2, zero3, zero3_offload or fsdp2.
        processes: ranks.
        four_bit: the frozen weights are held in 4 bits with their scales (4.5 bits in all).
    """
    width = 4 if dtype == "float32" else 2
    shard = processes if sharding not in ("", "ddp") else 1
    weights = width * total
    if four_bit:
        weights = round((total - trained) * 4.5 / 8) + width * trained
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


def activations(
    config: Any, dtype: str, rows: int, length: int, completion: int, attention: str = "sdpa", recompute: bool = False,
    autocast: bool = False, lora_rank: int = 0, head: str = "whole",
) -> Activations:  # fmt: skip
    """Track one forward and backward pass of a micro-batch under fake tensors.

    Args:
        config: transformers' config of the model.
        dtype: of the weights.
        rows: of the micro-batch.
        length: tokens per row, padding included.
        completion: supervised tokens per row; logits are computed for these alone.
        attention: sdpa (as FlashAttention: no scores are kept) or eager.
        recompute: whether layers are recomputed in the backward pass.
        autocast: compute float32 weights in bfloat16.
        lora_rank: of adapters; 0: every weight is trained.
        head: how the loss is computed: whole (`cpu.CompletionTrainer`), tiles (TRL on a GPU) or labels (a classifier).
    """
    few, more = [
        _tracked(config, layers, dtype, rows, length, completion, attention, recompute, autocast, lora_rank, head)
        for layers in (2, 3)
    ]
    # every layer is alike, so each adds the same: two and three layers give the line on which all lie
    kept, peak = (few[k] + (more[k] - few[k]) * (config.num_hidden_layers - 2) for k in range(2))
    width = 2 if autocast or dtype == "bfloat16" else 4
    if head != "whole":
        tile = min(rows * completion, TILE_ROWS) * min(config.vocab_size, TILE_COLUMNS) * width
        return Activations(kept, tile if head == "tiles" else 0, peak)
    logits = rows * completion * config.vocab_size * (width + 4 + 4)  # as computed, in float32, and its log-softmax
    # of the logits their float32 log-softmax alone is still there after the forward pass
    return Activations(max(0, kept - rows * completion * config.vocab_size * 4), logits, peak)


def _tracked(
    config: Any, layers: int, dtype: str, rows: int, length: int, completion: int, attention: str, recompute: bool,
    autocast: bool, lora_rank: int, head: str,
) -> tuple[int, int]:  # fmt: skip
    """Return what is kept after the forward pass, and the peak beyond weights and gradients."""
    import torch
    from torch.distributed._tools.mem_tracker import MemTracker

    with fake() as made:
        model = made(with_layers(config, layers), dtype, attention, lora_rank, head == "labels")
        ready(model, recompute, lora_rank)
        ids = torch.zeros(rows, length, dtype=torch.long)
        weights = sum(weight.numel() * weight.element_size() for weight in model.parameters())
        gradients = sum(w.numel() * w.element_size() for w in model.parameters() if w.requires_grad)
        for weight in model.parameters():  # as in every pass but the first: gradients stay, so they are no part of it
            weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
        tracker = MemTracker()
        if lora_rank:  # it hooks every weight, which torch refuses where one is frozen; gradients are there already
            track = tracker._track_module_params_and_buffers
            tracker._track_module_params_and_buffers = (  # type: ignore[method-assign]
                lambda module, install_grad_hooks=True: track(module, False)
            )
        tracker.track_external(model, ids)
        with tracker:
            loss = completion_loss(model, ids, completion, autocast, head)
            kept = _total(tracker, "current") - weights - gradients
            loss.backward()
        return kept, _total(tracker, "peak") - weights - gradients


def ready(model: Any, recompute: bool, lora_rank: int) -> None:
    """Set a model up for a training pass, as the trainer does."""
    model.train()
    if recompute:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        if lora_rank:
            model.enable_input_require_grads()


def with_layers(config: Any, layers: int) -> Any:
    """Return a config of fewer layers, or of more: a model of one layer is measured with two and three."""
    import copy

    other = copy.deepcopy(config)
    other.num_hidden_layers = layers
    if getattr(other, "layer_types", None):
        kinds = config.layer_types
        other.layer_types = [kinds[layer % len(kinds)] for layer in range(layers)]
    return other


def completion_loss(model: Any, ids: Any, completion: int, autocast: bool, head: str = "whole") -> Any:
    """Return the loss of the last `completion` tokens of every row (`head`: see `activations`)."""
    import torch

    module = model.get_base_model() if hasattr(model, "peft_config") else model
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        if head == "labels":
            module.config.pad_token_id = 0  # more rows than one ask for it
            logits = module(input_ids=ids, use_cache=False).logits.float()
            return torch.nn.functional.cross_entropy(logits, torch.zeros(len(ids), dtype=torch.long))
        hidden = module.base_model(input_ids=ids, use_cache=False).last_hidden_state
        scored = hidden[:, -completion - 1 : -1].flatten(0, 1)
        if head == "tiles":
            tile = torch.bfloat16 if autocast else scored.dtype
            return _tiled_head()(scored, module.get_output_embeddings().weight, tile)
        logits = module.get_output_embeddings()(scored).float()
        return torch.nn.functional.cross_entropy(logits, ids[:, -completion:].flatten())


def _tiled_head() -> Any:
    """Return a function that takes the memory of TRL's fused head (trl/kernels/chunked_logprob.py), and computes none.

    Forward and backward hold one tile of logits; gradients of hidden states and of the head gather in float32.
    """
    import torch

    class Tiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: Any, weight: Any, dtype: Any) -> Any:
            ctx.save_for_backward(hidden, weight)
            ctx.dtype = dtype
            tile(hidden, weight, dtype)
            return hidden.new_zeros(())

        @staticmethod
        def backward(ctx: Any, *given: Any) -> Any:
            hidden, weight = ctx.saved_tensors
            sums = [
                torch.zeros_like(part, dtype=torch.float32) if needed else None
                for part, needed in zip((hidden, weight), ctx.needs_input_grad, strict=False)
            ]
            tile(hidden, weight, ctx.dtype)
            return *(s if s is None else s.to(p.dtype) for s, p in zip(sums, (hidden, weight), strict=True)), None

    def tile(hidden: Any, weight: Any, dtype: Any) -> None:
        held = hidden.new_empty((min(len(hidden), TILE_ROWS), min(len(weight), TILE_COLUMNS)), dtype=dtype)
        part = weight[:TILE_COLUMNS].to(dtype)
        del held, part

    return Tiled.apply


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


class fake:  # noqa: N801
    """Within it, `made(...)` makes models of fake tensors."""

    def __enter__(self) -> Any:
        """Enter torch's fake mode."""
        from torch._subclasses.fake_tensor import FakeTensorMode
        from transformers import masking_utils

        # rows without data can't be looked at for packing: each layer would keep a mask, as none does in training
        self.found = masking_utils.find_packed_sequence_indices
        masking_utils.find_packed_sequence_indices = lambda *args, **kwargs: None
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)  # type: ignore[no-untyped-call]
        self.mode.__enter__()
        return self._made

    def __exit__(self, *error: Any) -> None:
        """Leave it."""
        from transformers import masking_utils

        self.mode.__exit__(*error)
        masking_utils.find_packed_sequence_indices = self.found

    @staticmethod
    def _made(config: Any, dtype: str, attention: str, lora_rank: int, classifies: bool) -> Any:
        import torch
        from torch._subclasses.fake_tensor import unset_fake_temporarily
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

        from rbd_train.modelling import add_lora

        kind: Any = AutoModelForSequenceClassification if classifies else AutoModelForCausalLM
        # made without data first: PEFT moves its adapters about, which fake tensors don't allow
        with unset_fake_temporarily(), torch.device("meta"):  # type: ignore[no-untyped-call]
            model = kind.from_config(config, dtype=getattr(torch, dtype), attn_implementation=attention)
            model = add_lora(model, lora_rank, lora_rank, 0) if lora_rank else model
        model.to_empty(device="cpu")
        (model.get_base_model() if lora_rank else model).tie_weights()
        return model


def _total(tracker: Any, which: str) -> int:
    import torch

    return int(tracker.get_tracker_snapshot(which)[torch.device("cpu")]["Total"])
