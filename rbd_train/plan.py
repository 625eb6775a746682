"""Say before a run what each rank's memory holds, whether it fits, what would make it fit, and what it costs.

Nothing is loaded: states are counted, activations tracked by torch on fake tensors. `rbd sft` counts the same states
before it loads weights, and on a GPU plans the pass of its longest rows too.

    rbd plan model=r1_qwen_14b launch=zero3 gpus=8 gpu_gb=80
    rbd plan experiment=r1_qwen_7b gpus=1 gpu_gb=80 gpu=H100
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from tqdm import tqdm

from rbd_train.app import BaseConfig, stage
from rbd_train.errors import UsageError
from rbd_train.memory import Plan, Shape, fitting, model_config, plan_rank, settle
from rbd_train.modelling import resolve_model
from rbd_train.run import Cell, Run, Table
from rbd_train.settings import (
    ModelConfig,
    TrainerConfig,
    accumulation,
    check_model,
    check_objective,
    check_schedule,
    check_together,
)
from rbd_train.throughput import PEAK
from rbd_train.tracked_pass import sizes

GIB = 2**30
LAUNCHES = ("ddp", "zero1", "zero2", "zero3", "zero3_offload", "fsdp2")


@dataclass
class PlanConfig(BaseConfig):
    """Settings of plan."""

    model: ModelConfig = field(default_factory=lambda: ModelConfig("embedded"))  # what to train (conf/model)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)  # how to train
    objective: str = "reasoning"  # reasoning, label (the verdict alone) or classifier (a two-label head)
    gpus: int = 8  # over all machines; with more than one and no launch, ddp is meant
    gpu_gb: float = 80.0  # memory of one, in GiB
    host_gb: float = 1024.0  # memory of one machine, in GiB, for CPU offload
    gpus_per_machine: int = 8  # they share its memory under CPU offload
    gpu: str = "H100"  # name of the GPU, for the time
    mfu: float = 0.35  # assumed share of its peak that training reaches
    rows: int = 1670  # training examples; the paper's number
    row_tokens: int = 1150  # mean tokens of a row that reasons; measured on the paper's data
    completion_tokens: int = 507  # mean supervised tokens of a row
    calls: int = 0  # calls of an API stage, for the money
    call_input_tokens: int = 650  # per call
    call_output_tokens: int = 510  # per call
    price_in: float | None = None  # dollars per million input tokens
    price_out: float | None = None  # dollars per million output tokens


@stage("plan", PlanConfig, launches=False)
def main(cfg: PlanConfig, run: Run) -> float | None:
    """Count, track, compare, and propose."""
    sharding = cfg.launch or ("ddp" if cfg.gpus > 1 else "")
    check(cfg, sharding)
    shape = shape_of(cfg.model, cfg.trainer, cfg.objective, cfg.completion_tokens)
    shape, plan = settle(shape, sharding, cfg.gpus, cfg.gpu_gb * GIB)
    here = Setting(sharding, cfg.gpus, shape)
    run.table(memory_table(here, plan, cfg.gpu_gb))
    fits = fitting(plan, cfg.gpu_gb * GIB, cfg.host_gb * GIB, min(cfg.gpus, cfg.gpus_per_machine))
    run.say(f"{'It fits' if fits else 'It does not fit'} in {cfg.gpu_gb:g} GiB per GPU.")
    if not fits:
        run.table(ways_table(here, cfg))
    run.table(cost_table(shape, cfg))
    run.facts |= {"fits": fits, "recompute": shape.recompute, "bytes": plan._asdict()}
    return plan.total / GIB


def check(cfg: PlanConfig, sharding: str) -> None:
    """Refuse what can't be meant, and what no training would take.

    Raises:
        UsageError: names the key, its value and what it may be.
    """
    if cfg.processes is not None:
        raise UsageError(f"plan starts no processes; it counts GPUs: set gpus={cfg.processes}, and leave out processes")
    for name in ("gpus", "gpus_per_machine", "gpu_gb", "host_gb", "mfu", "rows", "row_tokens", "completion_tokens"):
        if getattr(cfg, name) <= 0:
            raise UsageError(f"{name} is {getattr(cfg, name)}; it must be more than 0")
    for name in ("calls", "call_input_tokens", "call_output_tokens", "price_in", "price_out"):
        if (getattr(cfg, name) or 0) < 0:
            raise UsageError(f"{name} is {getattr(cfg, name)}; it must be at least 0")
    if cfg.mfu > 1:
        raise UsageError(f"mfu is {cfg.mfu}; it is a share of the GPU's peak, at most 1")
    if (cfg.price_in is None) != (cfg.price_out is None):
        raise UsageError(f"price_in is {cfg.price_in}, price_out is {cfg.price_out}; money needs both")
    if cfg.completion_tokens >= cfg.row_tokens:
        raise UsageError(
            f"completion_tokens={cfg.completion_tokens} row_tokens={cfg.row_tokens}: a completion is part of its row"
        )
    if cfg.gpu not in PEAK:
        raise UsageError(f"gpu is {cfg.gpu!r}, whose speed isn't known; choose one of {', '.join(PEAK)}")
    if sharding and sharding not in LAUNCHES:
        raise UsageError(f"launch is {sharding!r}; plan knows {', '.join(LAUNCHES)}, or none for one GPU")
    check_objective(cfg.objective)
    check_model(cfg.model)
    check_schedule(cfg.trainer)
    check_together(cfg.model, cfg.trainer, cfg.objective, "" if sharding == "ddp" else sharding)
    accumulation(cfg.trainer.global_batch, cfg.trainer.micro_batch, cfg.gpus, "gpus")


class Setting(NamedTuple):
    """What decides the memory: how states are sharded, over how many ranks, and the shape of a pass."""

    sharding: str
    gpus: int
    shape: Shape


VERDICT = 3  # tokens of Yes or No, and EOS, at most


def shape_of(model: ModelConfig, trainer: TrainerConfig, objective: str, completion: int) -> Shape:
    """Take the longest row there may be: memory must do for it."""
    share = min(1.0, completion / 1150)  # of a row that carries loss; the longest row's completion is as much of it
    supervised = VERDICT if objective == "label" else max(1, round(share * trainer.max_length))
    return Shape(
        config=model_config(model.shape, None if model.shape else resolve_model(model.path)),
        dtype=model.dtype, rows=trainer.micro_batch,
        length=trainer.max_length, completion=supervised, recompute=trainer.recompute, lora_rank=model.lora_rank,
        four_bit=model.four_bit, bf16=trainer.bf16 is not False, classifies=objective == "classifier",
    )  # fmt: skip


def memory_table(setting: Setting, plan: Plan, gpu_gb: float) -> Table:
    """Show what one rank holds."""
    held = (
        ("weights", plan.states.weights), ("gradients", plan.states.gradients), ("optimizer", plan.states.optimizer),
        ("activations kept for the backward pass", plan.activations.kept), ("logits", plan.activations.logits),
        ("the pass's worst moment beyond these", plan.moment), ("communication buffers", plan.buffers),
        ("total", plan.total), ("host memory per rank (offload)", plan.host),
    )  # fmt: skip
    rows: tuple[tuple[Cell, ...], ...] = tuple((name, value, value / GIB) for name, value in held)
    shape = setting.shape
    return Table(
        name="plan", title="Memory of one rank", columns=("what", "bytes", "GiB"), rows=rows,
        note=f"{plan.parameters} parameters, {plan.trained} trained; {setting.sharding or 'one process'} on "
        f"{setting.gpus} GPU(s) of {gpu_gb:g} GiB; {shape.rows} row(s) x {shape.length} tokens, "
        f"{'a label each' if shape.classifies else f'{shape.completion} of them supervised'}; activations "
        f"{'recomputed' if shape.recompute else 'kept'}: torch's memory tracker on fake tensors, attention as "
        f"FlashAttention keeps it.{' What FSDP gathers is counted, not yet measured.' * (setting.sharding == 'fsdp2')}",
    )  # fmt: skip


def ways_table(setting: Setting, cfg: PlanConfig) -> Table:
    """Try other settings, the least intrusive first, and say which would fit."""
    shape = setting.shape
    tried: list[tuple[str, Setting]] = [
        ("trainer.recompute=true", setting._replace(shape=shape._replace(recompute=True)))
    ]
    for name in LAUNCHES[1:5] if setting.gpus > 1 else ("zero3_offload",):
        tried.append(
            (f"launch={name} trainer.recompute=true", Setting(name, setting.gpus, shape._replace(recompute=True)))
        )
    adapters = shape._replace(recompute=True, lora_rank=16, dtype="bfloat16")
    if setting.sharding != "fsdp2":  # which keeps no float32 masters of bfloat16 weights
        words = "model.lora_rank=16 model.dtype=bfloat16 trainer.recompute=true"
        tried.append((words, setting._replace(shape=adapters)))
    alone = "" if setting.gpus == 1 else "ddp"  # 4-bit weights aren't sharded
    tried.append(
        ("model.four_bit=true model.lora_rank=16 model.dtype=bfloat16 trainer.recompute=true"
         f"{' launch=ddp' * bool(alone)}", Setting(alone, setting.gpus, adapters._replace(four_bit=True)))
    )  # fmt: skip
    more = setting.gpus * 2
    least = more * cfg.trainer.micro_batch
    batch = "" if cfg.trainer.global_batch % least == 0 else f" trainer.global_batch={least}"
    tried.append(
        (f"launch=zero3 gpus={more} trainer.recompute=true{batch}",
         Setting("zero3", more, shape._replace(recompute=True)))
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    for words, other in tqdm(tried, desc="what would fit", leave=False, disable=None):  # a pass of each is tracked
        if other == setting:  # it is so already
            continue
        plan = plan_rank(other.shape, other.sharding, other.gpus, gpu=True)
        fits = fitting(plan, cfg.gpu_gb * GIB, cfg.host_gb * GIB, min(other.gpus, cfg.gpus_per_machine))
        rows.append((words, plan.total / GIB, plan.host / GIB, "yes" if fits else "no"))
    columns = ("with", "GiB per GPU", "GiB of the host per rank", "fits")
    return Table(
        name="plan_ways",
        title="What would make it fit",
        columns=columns,
        rows=tuple(rows),
        note="What `rbd sft` calls processes, plan calls gpus.",
    )


def cost_table(shape: Shape, cfg: PlanConfig) -> Table:
    """Show tokens, time and money; what isn't known is a dash."""
    total, trained, _ = sizes(shape.config, shape.lora_rank, "bfloat16", shape.classifies)
    # a verdict stands alone where it is all that is learnt, and a classifier's is no token
    verdict = {"label": VERDICT, "classifier": 0}.get(cfg.objective, cfg.completion_tokens)
    row = min(cfg.row_tokens - cfg.completion_tokens + verdict, cfg.trainer.max_length)
    tokens = cfg.rows * row * cfg.trainer.epochs
    if cfg.trainer.max_steps > 0:
        tokens = cfg.trainer.max_steps * cfg.trainer.global_batch * row
    pairs = 6 * shape.config.num_hidden_layers * shape.config.hidden_size * tokens * row
    flops = ((4 + 2 * trained / total) * total * tokens + pairs) * (4 / 3 if shape.recompute else 1)
    peak = PEAK.get(cfg.gpu)
    hours = flops / (cfg.gpus * peak * cfg.mfu) / 3600 if peak else None
    money = None
    if cfg.price_in is not None and cfg.price_out is not None:
        per_call = cfg.call_input_tokens * cfg.price_in + cfg.call_output_tokens * cfg.price_out
        money = cfg.calls * per_call / 1e6
    return Table(
        name="plan_cost", title="Tokens, time and money",
        columns=("training tokens", "hours", "GPU hours", "API calls", "API tokens", "dollars"),
        rows=((round(tokens), hours, None if hours is None else hours * cfg.gpus, cfg.calls,
               cfg.calls * (cfg.call_input_tokens + cfg.call_output_tokens), money),),
        note=f"Time: at an assumed {cfg.mfu:.0%} of the {cfg.gpu}'s dense bfloat16 peak, loading and saving apart; "
        "money: from price_in and price_out.",
    )  # fmt: skip
