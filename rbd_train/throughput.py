"""What training processed: tokens per second without padding, the padding's share, MFU, peak memory."""

import resource
import time
from typing import Any, NamedTuple

PEAK = {  # dense bfloat16 FLOP/s of one GPU, from the makers' data sheets
    "H200 NVL": 835e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "A100": 312e12,
    "B200": 2250e12, "L40S": 362e12, "L4": 121e12, "A10G": 70e12, "A10": 125e12,
}  # fmt: skip


class Speed(NamedTuple):
    """What a training run processed; None where it can't be known."""

    tokens: int  # real ones, over all processes
    tokens_per_second: float
    padding: float  # share of the positions computed
    mfu: float | None  # model FLOP/s over the GPUs' peak
    peak_bytes: int  # of the rank that took most: GPU memory, on a CPU the process


class Throughput:
    """Counts on each rank; `speed` sums over ranks."""

    def __init__(self, model: Any, device: Any) -> None:
        """Count for a model (its size and shape give the FLOPs)."""
        config = model.config
        self.device, self.tokens, self.positions, self.attended = device, 0, 0, 0
        self.started = self.ended = time.perf_counter()
        named = list(model.named_parameters())
        # an embedding is looked up
        sizes = {name: numbers_in(weight) for name, weight in named}
        lookup = 0 if getattr(config, "tie_word_embeddings", False) else config.vocab_size * config.hidden_size
        self.weights = sum(sizes.values()) - lookup
        self.trained = sum(sizes[name] for name, weight in named if weight.requires_grad) / max(1, sum(sizes.values()))
        self.per_pair = 12 * config.num_hidden_layers * config.hidden_size / 2  # causal: half of the pairs

    def note(self, inputs: Any) -> None:
        """Count one micro-batch; padded ones have a mask, unpadded ones positions."""
        ids = inputs["input_ids"]
        self.positions += ids.numel()
        lengths = inputs["attention_mask"].sum(-1) if "attention_mask" in inputs else inputs["cu_seq_lens_q"].diff()
        self.tokens += int(lengths.sum())
        self.attended += int((lengths.long() ** 2).sum())

    def flops(self) -> float:
        """Return this rank's model FLOPs: forward 2, and backward 2 for activations and 2 for the trained weights."""
        return float((4 + 2 * self.trained) * self.weights * self.tokens + self.per_pair * self.attended)

    def speed(self) -> Speed:
        """Sum over ranks; every rank calls it."""
        import torch
        from torch import distributed

        cuda = self.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        sums = torch.tensor([self.tokens, self.positions, self.flops()], dtype=torch.float64, device=self.device)
        most = torch.tensor([float(peak), self.ended - self.started], dtype=torch.float64, device=self.device)
        ranks = 1
        if distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(sums)
            distributed.all_reduce(most, op=distributed.ReduceOp.MAX)
            ranks = distributed.get_world_size()
        tokens, positions, flops = sums.tolist()
        bytes_, seconds = most.tolist()
        known = gpu_peak(torch.cuda.get_device_name()) if cuda else None
        return Speed(
            int(tokens), tokens / max(seconds, 1e-9), 1 - tokens / positions if positions else 0.0,
            flops / seconds / ranks / known if known else None, int(bytes_),
        )  # fmt: skip


def numbers_in(weight: Any) -> int:
    """Count a parameter's numbers: a ZeRO-3 one holds its shape apart, and so does a 4-bit one, packed two a byte."""
    packed = getattr(weight, "quant_state", None)
    return int(packed.shape.numel() if packed is not None else getattr(weight, "ds_numel", weight.numel()))


def gpu_peak(name: str) -> float | None:
    """Return a GPU's dense bfloat16 FLOP/s; None where it isn't known."""
    words = set(name.replace("-", " ").split())
    return next((peak for key, peak in PEAK.items() if set(key.split()) <= words), None)
