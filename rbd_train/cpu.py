"""What makes training on a CPU bearable; nothing here is used where a GPU is at hand."""

import ctypes
from typing import Any

from trl.trainer.sft_trainer import SFTTrainer

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4


def keep_freed_memory() -> None:
    """Let glibc keep freed memory: giving it back after every tensor was measured at half the training time."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc alone
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(_M_TOP_PAD, 2**28)


class CompletionTrainer(SFTTrainer):
    """Compute logits for completion tokens alone: without Triton, TRL scores every position of the batch."""

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the mean negative log-likelihood of the supervised tokens; labels have shape (batch, tokens)."""
        import torch

        labels = inputs["labels"][:, 1:]
        hidden = model.base_model(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False
        ).last_hidden_state[:, :-1]  # fmt: skip
        mask = labels != -100
        logits = model.get_output_embeddings()(hidden[mask]).float()  # (supervised tokens, vocabulary)
        total = torch.nn.functional.cross_entropy(logits, labels[mask], reduction="sum")
        loss = total / (mask.sum() if num_items_in_batch is None else num_items_in_batch)
        return (loss, {"loss": loss}) if return_outputs else loss
