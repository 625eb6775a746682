"""The planner against memory that was measured: DeepSpeed's own tensors, and torch's profiler over real steps."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rbd_train.memory import SPARE, Shape, buffers, in_four_bits, model_config, plan_rank, settle, states
from rbd_train.modelling import Rendered
from rbd_train.run import Run
from rbd_train.settings import ModelConfig, TrainerConfig
from rbd_train.store import write_rows
from rbd_train.throughput import gpu_peak
from rbd_train.tracked_pass import activations, completion_loss, ready, sizes, with_layers
from rbd_train.training import longest_pass, settle_here
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


GIB = 2**30


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


def small(**changed: Any) -> Shape:
    return Shape(model_config(SHAPE, None), "bfloat16", 2, 512, 256, None)._replace(**changed)


def test_recomputation_is_chosen_where_memory_needs_it() -> None:
    kept, plan = settle(small(), "", 1, 80 * GIB)
    assert kept.recompute is False
    for room, recompute in ((plan.total / SPARE, False), (plan.total / SPARE - 8, True)):
        assert settle(small(), "", 1, room)[0].recompute is recompute
    told, less = settle(small(recompute=True), "", 1, 80 * GIB)  # what is set stays
    assert told.recompute is True and less.total < plan.total


def test_sft_warns_of_a_pass_that_may_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path, "r", "sft", "r", {})
    run.folder.mkdir(parents=True)
    model, trainer = ModelConfig("x", dtype="bfloat16", shape=SHAPE), TrainerConfig(micro_batch=2)
    rows = [Rendered([1] * length, [-100] * (length // 2) + [1] * (length - length // 2)) for length in (512, 64, 300)]
    shape = longest_pass(model_config(SHAPE, None), model, trainer, rows, "reasoning")
    assert (shape.rows, shape.length, shape.completion) == (2, 512, 256)
    assert settle_here(shape, 80 * GIB, run) is False and "warning" not in capsys.readouterr().out
    assert settle_here(shape, GIB // 10, run) is True
    said = capsys.readouterr().out
    assert "warning: planned memory, recomputing activations" in said and "0.1 GiB per GPU: it may not fit" in said


def test_a_gpu_scores_one_tile_at_a_time() -> None:
    """TRL's fused head holds no logits of all supervised tokens; a classifier holds none at all."""
    wide = {**SHAPE, "vocab_size": 2**17}
    given = (model_config(wide, None), "bfloat16", 2, 512, 500)
    whole, tiles, labels = (activations(*given, head=head) for head in ("whole", "tiles", "labels"))
    assert tiles.logits == 1000 * 2**15 * 2 and labels.logits == 0 and whole.logits > 15 * tiles.logits
    # the head's gradient gathers in float32 beside one tile of logits, and is cast in the end
    weight = 2**17 * SHAPE["hidden_size"]
    assert tiles.peak == pytest.approx(
        tiles.kept + 4 * weight + max(tiles.logits + 2 * 2**15 * 256, 2 * weight), rel=0.1
    )
    assert labels.peak < tiles.peak < whole.peak


def test_fsdp_gathers_layers_and_keeps_no_copy_of_all_weights() -> None:
    deep = model_config({**SHAPE, "num_hidden_layers": 24}, None)
    one = Shape(deep, "float32", 1, 128, 64, False)
    eight, ddp = plan_rank(one, "fsdp2", 8, gpu=True), plan_rank(one, "ddp", 8, gpu=True)
    two, _, _ = sizes(with_layers(deep, 2), 0, "bfloat16")
    assert eight.buffers == pytest.approx(2 * 2 * two, rel=0.01)
    cached = 2 * eight.parameters  # what autocast would keep of float32 weights
    assert ddp.activations.kept - eight.activations.kept > 0.8 * cached


def test_a_classifier_is_planned_with_its_own_head(rbd: Callable[..., Any]) -> None:
    words = ("plan", "++model.shape=" + str(SHAPE).replace("'", "").replace("False", "false"), "gpus=1")
    counted = {}
    for objective in ("reasoning", "label", "classifier"):
        said = rbd(*words, f"name={objective}", f"objective={objective}", "trainer.max_length=256")
        assert said.code == 0, said.err
        facts = json.loads(Path(f"runs/{objective}/plan/manifest.json").read_text())["facts"]
        counted[objective] = facts["bytes"]["parameters"]
    assert counted["reasoning"] - counted["classifier"] == (4096 - 2) * 256 and counted["label"] == counted["reasoning"]
    said = rbd(*words, "objective=verdict")
    assert said.code == 2 and "choose one of reasoning, label, classifier" in said.err


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_of_one_process_are_what_its_optimizer_holds(dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from rbd_train.masters import MasterAdamW

    model: Any = AutoModelForCausalLM.from_config(model_config(SHAPE, None), dtype=getattr(torch, dtype))
    weights = list(model.parameters())
    optimizer: Any = MasterAdamW(weights) if dtype == "bfloat16" else torch.optim.AdamW(weights)
    completion_loss(model, torch.zeros(1, 16, dtype=torch.long), 8, False).backward()

    def size(tensors: Any) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    gradients = size(weight.grad for weight in weights)
    optimizer.step()
    moments = [v for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v) and v.dim()]
    held = size(moments) + (size(optimizer.masters) if dtype == "bfloat16" else 0)
    total, trained, _ = sizes(model_config(SHAPE, None), 0, dtype)
    planned = states(total, trained, dtype, "", 1)
    assert (planned.weights, planned.gradients, planned.optimizer) == (size(weights), gradients, held)


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
import rbd_train.sft as sft, rbd_train.trainer as trainer, rbd_train.training as training
import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
done, load, found = trainer.train, training.load_model, {}
def loaded(*words, **settings):
    module = load(*words, **settings)
    found["partitioned"] = all(hasattr(weight, "ds_tensor") for weight in module.parameters())
    return module
training.load_model = loaded
step, step3 = DeepSpeedZeroOptimizer.step, DeepSpeedZeroOptimizer_Stage3.step
reduced = DeepSpeedZeroOptimizer.independent_gradient_partition_epilogue
def stepped(self, *words, **settings):
    if self.partition_gradients:
        found["gradients"] = size([g for group in self.averaged_gradients.values() for g in group or []])
    return step(self, *words, **settings)
def stepped3(self, *words, **settings):
    found["gradients"] = size([self.grad_partitions_flat_buffer])
    return step3(self, *words, **settings)
def reducing(self, *words, **settings):  # ZeRO-1 holds them whole until here, in a storage that is the bucket's
    if not self.partition_gradients:
        whole = [p.grad for group in self.bit16_groups for p in group if p.grad is not None]
        found["gradients"] = sum(gradient.numel() * gradient.element_size() for gradient in whole)
    return reduced(self, *words, **settings)
DeepSpeedZeroOptimizer.step, DeepSpeedZeroOptimizer_Stage3.step = stepped, stepped3
DeepSpeedZeroOptimizer.independent_gradient_partition_epilogue = reducing
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
    found.update(weights=total(weights), optimizer=total(masters) + total(moments))
    Path(sys.argv[-1]).write_text(json.dumps(found))
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
    assert planned.gradients == pytest.approx(held["gradients"], rel=0.1)
    assert held["partitioned"] == (launch == "zero3"), "A45: no rank has loaded the whole model before it was sharded"


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
    assert gpu_peak("NVIDIA H100 NVL") == gpu_peak("NVIDIA H200 NVL") == 835e12
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


def test_four_bits_are_of_linear_layers_alone() -> None:
    """Bitsandbytes leaves embedding and head as they are: 2.2 GB of the 14B model."""
    from rbd_train.config import compose

    config = model_config(compose("sft", ["model=r1_qwen_14b"])["model"]["shape"], None)
    total, trained, _ = sizes(config, 16, "bfloat16")
    kept = 2 * 152064 * 5120
    weights = states(total, trained, "bfloat16", "", 1, in_four_bits(config, total, trained)).weights
    assert weights == round((total - trained - kept) * 4.5 / 8) + 2 * (trained + kept)


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


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("rows=-5",), "rows is -5"), (("mfu=7",), "mfu is 7"), (("calls=-1",), "calls is -1"),
        (("calls=1", "price_in=1"), "money needs both"), (("completion_tokens=2000",), "is part of its row"),
        (("trainer.max_length=0",), "trainer.max_length is 0"), (("trainer.epochs=-3",), "trainer.epochs is -3"),
        (("trainer.scheduler=nonsense",), "trainer.scheduler is 'nonsense'"),
        (("launch=zero3", "processes=4"), "set gpus=4"), (("gpus=3",), "micro_batch x gpus = 1 x 3"),
        (("model.four_bit=true",), "set model.lora_rank=16"),
        (("model.four_bit=true", "model.lora_rank=8", "launch=zero3"), "4-bit weights aren't sharded"),
        (("launch=fsdp2", "model.dtype=bfloat16"), "FSDP2 keeps no float32 masters"),
        (("objective=classifier", "trainer.padding_free=true"), "trainer.padding_free=true"),
    ],
)  # fmt: skip
def test_what_no_training_takes_is_not_planned(rbd: Callable[..., Any], words: tuple[str, ...], told: str) -> None:
    said = rbd("plan", "model=tiny", *words)
    assert said.code == 2 and told in said.err, said.err


def test_proposals_under_fsdp_are_such_as_it_takes(rbd: Callable[..., Any]) -> None:
    """It keeps no float32 masters, which LoRA in bfloat16 has."""
    said = rbd("plan", "model=tiny", "launch=fsdp2", "gpu_gb=0.0001", "gpus=2")
    assert said.code == 0, said.err
    ways = next(t for t in json.loads(Path("runs/default/plan/tables.json").read_text()) if t["name"] == "plan_ways")
    assert all("launch=" in words for words, *_ in ways["rows"] if "bfloat16" in words), ways["rows"]


def test_a_label_row_holds_no_reasoning(rbd: Callable[..., Any]) -> None:
    tokens = {}
    for objective in ("reasoning", "label", "classifier"):
        assert rbd("plan", "model=tiny", f"name={objective}", f"objective={objective}", "gpus=1").code == 0
        tables = json.loads(Path(f"runs/{objective}/plan/tables.json").read_text())
        tokens[objective] = next(table for table in tables if table["name"] == "plan_cost")["rows"][0][0]
    assert tokens == {"reasoning": 5 * 1670 * 1150, "label": 5 * 1670 * 646, "classifier": 5 * 1670 * 643}
