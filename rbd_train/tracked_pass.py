"""One training pass as torch's own memory tracker sees it, on fake tensors, which hold shapes and no data."""

from typing import Any, NamedTuple

TILE_ROWS, TILE_COLUMNS = 4096, 32768  # tokens and vocabulary that TRL's fused head scores at a time on a GPU


class Activations(NamedTuple):
    """Bytes per rank of one forward and backward pass, beyond weights and gradients."""

    kept: int  # held for the backward pass, logits apart
    logits: int  # of the supervised tokens; on a GPU those of one tile
    peak: int  # all that is there at the worst moment: what is kept, logits, and what the moment itself needs


def sizes(config: Any, lora_rank: int, dtype: str, classifies: bool = False) -> tuple[int, int, int]:
    """Count parameters, trained parameters and bytes of buffers of a model that is never made."""
    with fake() as made:
        model = made(config, dtype, "sdpa", lora_rank, classifies)
        total = sum(weight.numel() for weight in model.parameters())
        trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
        buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    return total, trained, buffers


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
