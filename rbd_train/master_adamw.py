"""AdamW for bfloat16 weights with float32 masters, for training without DeepSpeed (which keeps masters of its own).

A bfloat16 weight has 8 bits of mantissa, so that most updates of a small learning rate would round to nothing.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch


class MasterAdamW(torch.optim.AdamW):
    """Step on float32 copies and round the result into the weights; a checkpoint holds the copies."""

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
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.copy_(master)
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
