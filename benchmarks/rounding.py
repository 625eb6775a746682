"""What rounding float32 masters into bfloat16 weights costs: held-out loss after four steps on real R1 traces.

    python benchmarks/rounding.py [rate]    shared/data, SmolLM2-135M, 2e-5 unless told; three minutes

The same rows, steps and settings as `sft_throughput.py`. One training; its masters are measured as they are, rounded to
the nearest bfloat16, and rounded by chance, as `rbd sft` saves them. All losses are computed in float32.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import sft_throughput as bench

from rbd_train.modelling import load_model, load_tokenizer, resolve_model


def main() -> None:
    """Train once and print four losses."""
    import torch

    source = resolve_model("embedded")
    bench.RATE = float(sys.argv[1]) if len(sys.argv) > 1 else bench.RATE
    data = bench.rows(source)
    model = load_model(source, "float32")
    losses = {"untrained": bench.held_out(model, data[bench.ROWS :])}
    with tempfile.TemporaryDirectory() as temporary:
        tokenizer = load_tokenizer(source, reasoning=True)
        trainer = bench.ours(source, tokenizer, data[: bench.ROWS], 1, bench.STEPS, Path(temporary))
        trainer.train()
    optimizer = trainer.optimizer.optimizer  # accelerate's wraps ours
    names = {id(weight): name for name, weight in trainer.model.named_parameters()}
    ways = {
        "masters": lambda weight, master: master,
        "to the nearest": lambda weight, master: master.to(torch.bfloat16),
        "by chance": lambda weight, master: weight,
    }
    state = model.state_dict()
    for way, value in ways.items():
        for weight, master in zip(optimizer.weights, optimizer.masters, strict=True):
            state[names[id(weight)]].copy_(value(weight, master).detach())
        losses[way] = bench.held_out(model, data[bench.ROWS :])
    print(json.dumps({"name": "rounding", "rate": bench.RATE, "steps": bench.STEPS, "held_out_loss": losses}))


if __name__ == "__main__":
    os.environ["BENCH_MODEL"] = resolve_model("embedded")
    main()
