"""Float32 masters of bfloat16 weights, and their rounding into weights without losing what was learnt.

A bfloat16 weight has 8 bits of mantissa, so that most updates of a small learning rate are less than half a unit of it:
masters gather them, and rounding to the nearest value would take them back (docs/training.md has what that costs).
Rounded up as often as the remainder is large (arXiv 1502.02551, section 3), weights are their masters on average.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch


def rounded(values: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """Round float32 values to bfloat16: up with the probability that the remainder is of a unit; exact ones stay."""
    bits = values.detach().contiguous().view(torch.int32)
    noise = torch.randint(2**16, bits.shape, dtype=torch.int32, device=bits.device, generator=draw)
    # the upper 16 bits of a float32 are a bfloat16; what the lower ones carry into them is the rounding
    return ((bits + noise) & -(2**16)).view(torch.float32).to(torch.bfloat16)


class MasterAdamW(torch.optim.AdamW):
    """Step on float32 copies and round the result into the weights; a checkpoint holds the copies.

    For training without DeepSpeed, which keeps masters of its own.
    """

    def __init__(self, weights: Iterable[torch.nn.Parameter], **settings: Any) -> None:
        """Copy the weights."""
        self.weights = [weight for weight in weights if weight.requires_grad]
        masters = [torch.nn.Parameter(weight.detach().float().clone()) for weight in self.weights]
        super().__init__(masters, fused=True, **settings)
        self.masters = masters

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take the gradients of the weights over to their masters, step, and round back."""
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
        loss = super().step(closure)
        taken = next((int(kept["step"]) for kept in self.state.values()), 0)
        draw = torch.Generator(self.masters[0].device).manual_seed(
            taken
        )  # by the step: equal on all ranks, and resumed
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.copy_(rounded(master, draw) if weight.dtype == torch.bfloat16 else master)
            master.grad = None
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Add the masters, without which a resumed run would start from rounded weights."""
        return super().state_dict() | {"masters": [master.detach() for master in self.masters]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the masters back."""
        state = dict(state_dict)
        for master, saved in zip(self.masters, state.pop("masters"), strict=True):
            master.data.copy_(saved)
        super().load_state_dict(state)


def follow_masters(module: torch.nn.Module) -> bool:
    """Round DeepSpeed's masters into the weights anew, as it has rounded to the nearest; False where there are none.

    Every rank takes part: a master is gathered from its shards, one weight at a time.
    """
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    weights = [weight for weight in module.parameters() if weight.requires_grad and weight.dtype == torch.bfloat16]
    draw: dict[torch.device, torch.Generator] = {}
    for weight in weights:
        master = safe_get_full_fp32_param(weight)
        generator = draw.setdefault(master.device, torch.Generator(master.device).manual_seed(0))
        with torch.no_grad(), deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
            weight.copy_(rounded(master, generator))
    return bool(weights)


@torch.no_grad()
def merge(adapted: Any) -> Any:
    """Merge PEFT's adapters into their base and return it; a bfloat16 base is rounded as after a step of training."""
    from peft.tuners.lora import LoraLayer

    draw = torch.Generator().manual_seed(0)
    for module in adapted.modules():
        layer: Any = module
        if isinstance(module, LoraLayer) and layer.get_base_layer().weight.dtype == torch.bfloat16:
            weight = layer.get_base_layer().weight
            weight.copy_(rounded(weight.float() + layer.get_delta_weight("default").float(), draw))
            layer.lora_B["default"].weight.zero_()  # so that PEFT adds nothing below
    return adapted.merge_and_unload()
