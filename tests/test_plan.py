"""The planner against memory that was measured: DeepSpeed's own tensors, and torch's profiler over real steps."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rbd_train.memory import activations, buffers, completion_loss, model_config, ready, sizes, states
from rbd_train.store import write_rows
from rbd_train.throughput import gpu_peak
from tests.examples import example  # type: ignore[import-not-found]

SHAPE = {
    "model_type": "qwen2", "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4096, "tie_word_embeddings": False,
}  # fmt: skip
SETTINGS = [
    # dtype, rows, length, completion, attention, recompute, autocast, lora_rank
    ("float32", 1, 512, 256, "sdpa", False, False, 0),
    ("float32", 4, 128, 64, "sdpa", False, False, 0),
    ("float32", 2, 512, 500, "sdpa", True, False, 0),
    ("bfloat16", 2, 512, 128, "sdpa", False, False, 0),
    ("float32", 2, 256, 128, "eager", False, False, 0),
    ("float32", 2, 512, 128, "sdpa", False, False, 8),
    ("bfloat16", 2, 512, 256, "sdpa", True, False, 8),
]


def measured(dtype: str, rows: int, length: int, completion: int, attention: str, recompute: bool, autocast: bool,
             lora_rank: int) -> int:  # fmt: skip
    """Return what a real second step allocates at its peak, in bytes, by torch's profiler."""
    import torch
    from transformers import AutoModelForCausalLM

    from rbd_train.modelling import add_lora

    kind = getattr(torch, dtype)
    model: Any = AutoModelForCausalLM.from_config(model_config(SHAPE, None), dtype=kind, attn_implementation=attention)
    if lora_rank:
        model = add_lora(model, lora_rank, lora_rank, 0)
    ready(model, recompute, lora_rank)
    ids = torch.zeros(rows, length, dtype=torch.long)
    completion_loss(model, ids, completion, autocast).backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        completion_loss(model, ids, completion, autocast).backward()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: "-".join(str(x) for x in s))
def test_activations_are_within_a_tenth_of_real_steps(setting: tuple[Any, ...]) -> None:
    dtype, rows, length, completion, attention, recompute, autocast, lora_rank = setting
    planned = activations(
        model_config(SHAPE, None), dtype, rows, length, completion, attention, recompute, autocast, lora_rank
    ).peak
    assert planned == pytest.approx(measured(*setting), rel=0.1)


WORKER = """
import json, sys
from pathlib import Path
import rbd_train.sft as sft, rbd_train.trainer as trainer
import torch
done = trainer.train
def size(tensors):
    seen = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(seen.values())
def train(t, checkpoint):
    done(t, checkpoint)
    optimizer = t.optimizer.optimizer
    stage3 = hasattr(optimizer, "fp32_partitioned_groups_flat")
    masters = optimizer.fp32_partitioned_groups_flat if stage3 else optimizer.single_partition_of_fp32_groups
    moments = [v for s in optimizer.optimizer.state.values() for v in s.values() if torch.is_tensor(v) and v.dim()]
    weights = [p.ds_tensor if stage3 else p for p in t.model.parameters()]
    total = lambda ts: sum(x.numel() * x.element_size() for x in ts)
    Path(sys.argv[-1]).write_text(json.dumps({"weights": total(weights), "optimizer": total(masters) + total(moments)}))
trainer.train = train
from rbd_train.app import main
sys.exit(main(sys.argv[1:-1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("launch", ["zero1", "zero2", "zero3"])
def test_states_are_what_deepspeed_holds(tmp_path: Path, launch: str) -> None:
    """Each rank's tensors inside the engine, after a step; parameters too small to shard are held whole by ZeRO-3."""
    import os

    from rbd_train.config import data_dir
    from rbd_train.modelling import resolve_model

    write_rows(tmp_path / "train.jsonl", [example(n, n % 2 == 0) for n in range(1, 9)])
    (tmp_path / "worker.py").write_text(WORKER)
    words = ["sft", f"root={tmp_path}", f"train=[{tmp_path / 'train.jsonl'}]", "model=tiny", "trainer.max_steps=1"]
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    launcher += [str(data_dir("launch") / f"{launch}.yaml"), "--num_processes", "2", "--mixed_precision", "no"]
    given = os.environ | {"DS_ACCELERATOR": "cpu"}
    worker = [str(tmp_path / "worker.py"), *words, str(tmp_path / "held.json")]
    subprocess.run([*launcher, *worker], check=True, capture_output=True, env=given)
    held = json.loads((tmp_path / "held.json").read_text())
    total, trained, _ = sizes(model_config({}, resolve_model("tiny")), 0, "float32")
    planned = states(total, trained, "float32", launch, 2)
    assert planned.weights == pytest.approx(held["weights"], rel=0.1)
    assert planned.optimizer == pytest.approx(held["optimizer"], rel=0.1)


def test_what_fits_and_what_would(rbd: Callable[..., Any]) -> None:
    words = ("plan", "++model.shape=" + str(SHAPE).replace("'", "").replace("False", "false"), "trainer.max_length=256")
    said = rbd(*words, "launch=zero3", "gpus=8", "gpu_gb=80")
    assert said.code == 0 and "It fits in 80 GiB" in said.out, said.err
    said = rbd(*words, "gpus=1", "trainer.global_batch=8", "gpu_gb=0.05")
    assert said.code == 0 and "does not fit" in said.out and "What would make it fit" in said.out
    said = rbd(*words, "calls=1000", "price_in=1", "price_out=2", "gpus=1")
    assert said.code == 0 and "1.670" in said.out  # 650 x 1000 + 510 x 2000 tokens, a million each a dollar


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("r1_qwen_1_5b", 1.777e9), ("r1_qwen_7b", 7.616e9), ("r1_llama_8b", 8.030e9), ("r1_qwen_14b", 14.770e9)],
)
def test_presets_have_the_size_of_their_models(name: str, parameters: float) -> None:
    from rbd_train.config import compose

    total, _, _ = sizes(model_config(compose("sft", [f"model={name}"])["model"]["shape"], None), 0, "bfloat16")
    assert total == pytest.approx(parameters, rel=1e-3)


def test_states_that_cant_fit_are_refused_before_loading(rbd: Callable[..., Any], tmp_path: Path) -> None:
    from rbd_train.modelling import resolve_model

    config = json.loads((Path(resolve_model("tiny")) / "config.json").read_text())
    (tmp_path / "huge").mkdir()
    (tmp_path / "huge" / "config.json").write_text(json.dumps({**config, "hidden_size": 2**16, "vocab_size": 10**6}))
    for file in Path(resolve_model("tiny")).glob("token*"):
        (tmp_path / "huge" / file.name).write_bytes(file.read_bytes())
    for file in Path(resolve_model("tiny")).glob("*.jinja"):
        (tmp_path / "huge" / file.name).write_bytes(file.read_bytes())
    write_rows(tmp_path / "train.jsonl", [example(n, n % 2 == 0) for n in range(1, 9)])
    said = rbd("sft", f"train=[{tmp_path / 'train.jsonl'}]", "model=plain", f"model.path={tmp_path / 'huge'}")
    assert said.code == 2 and "it can't fit" in said.err and "rbd plan" in said.err


def test_gpus_are_known_by_name() -> None:
    assert gpu_peak("NVIDIA H100 80GB HBM3") == 989e12 and gpu_peak("NVIDIA H100 PCIe") == 756e12
    assert gpu_peak("NVIDIA A100-SXM4-80GB") == 312e12 and gpu_peak("Some Card") is None


def test_layouts_are_counted_as_they_are_kept() -> None:
    """FSDP2 shards like ZeRO-3; DDP holds gradients twice; DeepSpeed's bucket is whole, however little is trained."""
    total = 7 * 10**9
    whole, sharded, offloaded = (
        states(total, total, "float32", kind, 8) for kind in ("ddp", "fsdp2", "zero3_offload")
    )  # fmt: skip
    assert whole.weights == 4 * total and sharded.weights == sharded.gradients == 4 * total // 8
    assert (offloaded.weights, offloaded.gradients, offloaded.optimizer) == (0, 0, 0)
    assert offloaded.host == (4 + 4 + 12 + 4) * total // 8
    assert buffers("ddp", 8, total, total, "bfloat16") == 2 * total and buffers("ddp", 1, total, total, "bfloat16") == 0
    assert buffers("zero2", 8, total, 10**6, "bfloat16") == buffers("zero2", 1, total, total, "bfloat16") == 10**9


def test_what_is_proposed_can_be_done(rbd: Callable[..., Any]) -> None:
    """More GPUs need a global batch that they share, and what is set already is no remedy."""
    said = rbd("plan", "model=r1_qwen_7b", "gpu_gb=1")
    assert said.code == 0, said.err
    tables = Path("runs/default/plan/tables.json").read_text()
    assert "launch=zero3 gpus=16 trainer.recompute=true trainer.global_batch=16" in tables
    assert rbd("plan", "name=b", "model=r1_qwen_7b", "launch=zero3", "gpus=16", "trainer.global_batch=16").code == 0
    for word, told in (("gpus=0", "gpus is 0"), ("gpu=H1000", "choose one of H200")):
        said = rbd("plan", "name=c", "model=r1_qwen_7b", word)
        assert said.code == 2 and told in said.err
