"""What makes training on a CPU bearable; nothing here is used where a GPU is at hand."""

import ctypes
from typing import Any

from rbd_train.trainer import Distiller

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4


def keep_freed_memory() -> None:
    """Let glibc keep freed memory: giving it back after every tensor was measured at half the training time."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc alone
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(_M_TOP_PAD, 2**28)


class CompletionTrainer(Distiller):
    """Compute logits for completion tokens alone: without Triton, TRL scores every position of the batch."""

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the mean negative log-likelihood of the supervised tokens; labels have shape (batch, tokens)."""
        import torch

        module = model.get_base_model() if hasattr(model, "peft_config") else model
        labels = inputs["labels"][:, 1:]
        given = {key: inputs[key] for key in ("attention_mask", "position_ids") if key in inputs}
        hidden = module.base_model(input_ids=inputs["input_ids"], use_cache=False, **given).last_hidden_state[:, :-1]
        mask = labels != -100
        logits = module.get_output_embeddings()(hidden[mask]).float()  # (supervised tokens, vocabulary)
        total = torch.nn.functional.cross_entropy(logits, labels[mask], reduction="sum")
        loss = total / (mask.sum() if num_items_in_batch is None else num_items_in_batch)
        return (loss, {"loss": loss}) if return_outputs else loss
