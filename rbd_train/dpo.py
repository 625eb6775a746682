r"""Train a model on preference pairs with TRL's DPOTrainer, and measure its implicit reward on held-out ones.

In: `train.jsonl`, `test.jsonl` (Preference). Out: `model/`, `losses.jsonl`, `rewards.jsonl` (Reward per held-out pair).
Reference log-probabilities are computed once, before training, and kept by data, template, weights and precision.

    rbd dpo model=embedded
    rbd dpo model=r1_qwen_7b launch=zero3 model.lora_rank=16
"""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rbd_train.app import BaseConfig, stage
from rbd_train.engines.local import weights_digest
from rbd_train.errors import DataError, UsageError
from rbd_train.launched import STOP_FILE, check_alike, layout, on_one_gpu, prepare_deepspeed, set_precision, sharded
from rbd_train.metrics import mean_rate
from rbd_train.modelling import (
    TAGS,
    add_lora,
    encode_context,
    load_model,
    load_tokenizer,
    pad_id,
    plain,
    resolve_model,
)
from rbd_train.records import Dropped, Preference, uniform
from rbd_train.rewards import kl, report, rewards_of, rewards_table
from rbd_train.run import Cell, Run, Table, world_size
from rbd_train.settings import INNOCENT, ModelConfig, accumulation, check_model, check_schedule, told_settings
from rbd_train.store import fingerprint
from rbd_train.tables import markdown
from rbd_train.training import EAGER_SCORES, log_to, own_optimizer, report_speed, to_continue, train_to_the_end
from rbd_train.weights import Kind, model_card, save

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rbd_train.preference_trainer import Tokens

KL_PAIRS = 64  # held-out pairs that the KL is estimated on, at most


@dataclass
class DpoTrainerConfig:
    """How to train."""

    beta: float = 0.1  # weight of the distance to the reference
    learning_rate: float = 1e-6  # peak
    epochs: float = 1.0  # passes over the pairs
    max_steps: int = -1  # optimizer steps; -1: what epochs give
    global_batch: int = 8  # pairs per optimizer step, over all processes
    micro_batch: int = 1  # pairs per process and forward pass; accumulation follows
    reference_batch: int = 8  # pairs per pass of the reference and of the measurement
    max_length: int = 2048  # tokens of prompt and longer answer; a longer pair is dropped and counted, never cut
    warmup_share: float = 0.1  # of the optimizer steps
    scheduler: str = "cosine"  # of the learning rate, by its name in transformers (linear, constant, ...)
    weight_decay: float = 0.0  # AdamW's
    bf16: bool | None = None  # compute float32 weights in bfloat16 (autocast); null: where a GPU is at hand
    recompute: bool = False  # recompute activations in the backward pass, to save memory
    save_every: int = 0  # optimizer steps between a killed run's checkpoints; 0: on a signal and at the end


@dataclass
class DpoConfig(BaseConfig):
    """Settings of dpo."""

    model: ModelConfig = field(default_factory=lambda: ModelConfig("embedded"))  # what to train (conf/model)
    trainer: DpoTrainerConfig = field(default_factory=DpoTrainerConfig)  # how to train
    train: str | None = None  # path of the pairs; default: the output of stage preferences
    test: str | None = None  # path of the held-out pairs; default: the output of stage preferences
    plain_only: bool = False  # train on the pairs without a bias written in, as plain DPO does


PREFERRING = Kind(
    "A model trained on preference pairs", ("dpo", "preference-training", "llm-as-a-judge"), "Trained with DPO",
    "It prefers as its pairs do; the table shows, on held-out ones, how far the biases written into them still win.",
)  # fmt: skip


class Pair(NamedTuple):
    """A preference as token ids."""

    id: str
    prompt_ids: list[int]
    chosen_ids: list[int]
    rejected_ids: list[int]


@stage("dpo", DpoConfig)
def main(cfg: DpoConfig, run: Run) -> float | None:
    """Render, drop what can't teach, train from ln 2 on, save, measure."""
    check_model(cfg.model)
    check_schedule(cfg.trainer)
    train = run.read(Path(cfg.train) if cfg.train else run.output_of("preferences", "train.jsonl"), Preference)
    test = held_out(cfg.test, run)
    train = [pair for pair in train if not (cfg.plain_only and pair.bias)]
    source = resolve_model(cfg.model.path)
    tokenizer = load_tokenizer(source, reasoning=False)
    pairs, dropped = render(tokenizer, train, cfg.trainer.max_length)
    held, more = render(tokenizer, test, cfg.trainer.max_length)
    run.write("dropped.jsonl", [*dropped, *more])
    groups = {pair.id: pair.group for pair in [*train, *test]}
    run.table(rows_table(pairs, held, [*dropped, *more], groups))
    check_pairs(pairs, len(train), cfg.trainer.max_length)
    key = reference_key(pairs, tokenizer, source, cfg.model.dtype, cfg.trainer.bf16)
    reference = run.root / "reference" / f"{key}.json"
    settings = {name: value for name, value in vars(cfg.trainer).items() if name not in INNOCENT}
    checkpoints = run.folder / f"checkpoints-{fingerprint([key, vars(cfg.model), settings, cfg.seed])}"
    continued = to_continue(checkpoints, facts_of(cfg.model, cfg.trainer), run)
    trainer = make_trainer(source, cfg.model, cfg.trainer, tokenizer, pairs, cfg.seed, checkpoints, reference, run)
    before = measured(trainer, held, cfg.trainer.reference_batch, None)
    train_to_the_end(trainer, continued, run)
    after = measured(trainer, held, cfg.trainer.reference_batch, before.tokens)
    by_id = {pair.id: pair for pair in test}
    rewards = rewards_of(by_id, held, before.sums, after.sums, cfg.trainer.beta)
    divergence = kl(before.tokens, after.tokens, [by_id[pair.id].group for pair in some(held)])
    table = rewards_table(rewards, cfg.model.path, divergence)
    told = told_settings(cfg.model, cfg.trainer, cfg.launch, objective="dpo", plain_only=cfg.plain_only, seed=cfg.seed)
    rows = f"{len(pairs)} pairs, {len(held)} held-out ones."
    card = model_card(PREFERRING, cfg.model.licence, cfg.model.path, run.inputs, told, rows, markdown(table))
    save(trainer, tokenizer, source, cfg.model.path, cfg.model.dtype, card, run)
    report_speed(trainer, len(pairs), sum(sum(map(len, pair[1:])) + len(pair.prompt_ids) for pair in pairs), run)
    run.write("rewards.jsonl", rewards)
    run.table(table)
    report(trainer, rewards, divergence, run)
    run.leftovers.append(checkpoints)
    return sum(reward.margin <= 0 for reward in rewards) / len(rewards) if rewards else None


def render(
    tokenizer: "PreTrainedTokenizerBase", preferences: Sequence[Preference], max_length: int
) -> tuple[list[Pair], list[Dropped]]:
    """Render pairs to ids; what is empty, too long or the same on both sides as rendered is dropped (A48).

    Thinking in an answer is kept on both sides: stock R1 templates cut it off, which makes some pairs equal.
    """
    pairs, dropped = list[Pair](), list[Dropped]()
    for preference in preferences:
        prompt = encode_context(tokenizer, [{"role": t.role, "content": t.content} for t in preference.prompt])
        sides = [
            tokenizer.encode(plain(tokenizer, turns[-1].content.strip(), TAGS), add_special_tokens=False)
            for turns in (preference.chosen, preference.rejected)
        ]
        reason = ""
        if not all(sides):
            reason = "an empty answer"
        elif sides[0] == sides[1]:
            reason = "identical_pair"
        elif len(prompt) + max(map(len, sides)) + 1 > max_length:
            reason = f"longer than trainer.max_length={max_length} tokens"
        if reason:
            dropped.append(
                Dropped(
                    case_id=preference.id,
                    bias=preference.bias or "",
                    group=preference.group,
                    sample=None,
                    reason=reason,
                )
            )
            continue
        end = [tokenizer.eos_token_id]
        pairs.append(Pair(preference.id, prompt, sides[0] + end, sides[1] + end))
    return pairs, dropped


def check_pairs(pairs: Sequence[Pair], total: int, max_length: int) -> None:
    """Stop where nothing is left.

    Raises:
        DataError: names the count and trainer.max_length.
    """
    if not pairs:
        raise DataError(
            f"dpo: 0 of {total} pairs are left; those longer than trainer.max_length={max_length} tokens, empty or "
            "identical are dropped (dropped.jsonl names each)"
        )


def held_out(path: str | None, run: Run) -> list[Preference]:
    """Read the held-out pairs; none where preferences was told to hold none out."""
    file = Path(path) if path else run.output_of("preferences", "test.jsonl")
    if not path and not file.read_text(encoding="utf-8"):
        run.note_input(file, 0)
        return []
    return run.read(file, Preference)


def rows_table(
    pairs: Sequence[Pair], held: Sequence[Pair], dropped: Sequence[Dropped], groups: Mapping[str, str]
) -> Table:
    """Count pairs and tokens, and show the length gap: DPO rewards length where chosen answers are longer (A48)."""
    rows: list[tuple[Cell, ...]] = []
    for name, part in (("train", pairs), ("test", held)):
        gaps = [float(len(pair.chosen_ids) - len(pair.rejected_ids)) for pair in part]
        tokens = sum(len(p.prompt_ids) + len(p.chosen_ids) + len(p.prompt_ids) + len(p.rejected_ids) for p in part)
        rows.append((name, len(part), tokens, mean_rate(gaps, [groups[pair.id] for pair in part])))
    counts = Counter(row.reason for row in dropped)
    note = "Dropped: " + (", ".join(f"{reason}: {count}" for reason, count in sorted(counts.items())) or "nothing")
    columns = ("split", "pairs", "tokens", "chosen minus rejected, tokens")
    return Table(name="dpo_rows", title="Pairs to train on", columns=columns, rows=tuple(rows), note=note)


def reference_key(
    pairs: Sequence[Pair], tokenizer: "PreTrainedTokenizerBase", source: str, dtype: str, bf16: bool | None
) -> str:
    """Name what reference log-probabilities depend on: the rows, the weights, and the precision of the pass."""
    import torch

    precision = [dtype, torch.cuda.is_available() if bf16 is None else bf16]
    rows = [list(pair) for pair in pairs]
    return fingerprint([rows, tokenizer.chat_template, weights_digest(source), precision])


def rows_of(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """Return pairs as the collator reads them."""
    return [{k: v for k, v in pair._asdict().items() if k != "id"} for pair in pairs]


def make_trainer(
    source: str, model: ModelConfig, settings: DpoTrainerConfig, tokenizer: "PreTrainedTokenizerBase",
    pairs: Sequence[Pair], seed: int, checkpoints: Path, reference: Path, run: Run,
) -> Any:  # fmt: skip
    """Set up TRL's trainer; the reference pass happens here, before anything is trained."""
    import torch
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    from rbd_train.preference_trainer import CheckStart, CpuPairTrainer, PairTrainer
    from rbd_train.trainer import Stopping

    if model.four_bit:
        raise UsageError("model.four_bit=true is for sft; dpo trains adapters on a whole base: set it to false")
    cuda, sharding = torch.cuda.is_available(), sharded()
    if sharding == "fsdp2":
        raise UsageError(
            "launch=fsdp2: FSDP shards the model when training begins, after the reference pass; use launch=zero3"
        )
    prepare_deepspeed(cuda)
    args = arguments(settings, seed, checkpoints, cuda, run.main)
    check_alike(checkpoints.name)
    longest = max(len(pair.prompt_ids) + max(len(pair.chosen_ids), len(pair.rejected_ids)) for pair in pairs)
    eager = not cuda and 2 * max(settings.micro_batch, settings.reference_batch) * longest**2 <= EAGER_SCORES
    module: Any = load_model(source, model.dtype, "eager" if eager else None)
    if model.lora_rank:
        module = add_lora(module, model.lora_rank, model.lora_alpha, seed)
    optimizer = own_optimizer(module, model, settings, args.device)
    kind = PairTrainer
    if not cuda and world_size() == 1 and not sharding:
        from rbd_train.cpu import keep_freed_memory

        keep_freed_memory()
        kind = CpuPairTrainer
    trainer = kind(
        reference, model=module, args=args, train_dataset=Dataset.from_list(rows_of(pairs)),
        processing_class=tokenizer, data_collator=DataCollatorForPreference(pad_token_id=pad_id(tokenizer)),
        optimizers=(optimizer, None),
    )  # fmt: skip
    trainer.prepare_run(settings.global_batch, True, facts_of(model, settings))
    trainer.stopping = Stopping(run.folder / STOP_FILE)
    exact = model.dtype == "float32" and not args.bf16
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(log_to(run))
    trainer.add_callback(trainer.stopping)
    trainer.add_callback(CheckStart(1e-3 if exact else 0.02))
    run.facts |= {
        "distributed": str(trainer.accelerator.distributed_type).removeprefix("DistributedType."),
        "global_batch": settings.global_batch, "accumulation": args.gradient_accumulation_steps,
        "reference": reference.name, "lora_rank": model.lora_rank,
    }  # fmt: skip
    return trainer


def facts_of(model: ModelConfig, settings: DpoTrainerConfig) -> dict[str, Any]:
    """Return what a checkpoint says of itself."""
    return {
        "processes": world_size(), "sharding": layout(), "objective": "dpo", "lora_rank": model.lora_rank,
        "global_batch": settings.global_batch,
    }  # fmt: skip


def arguments(settings: DpoTrainerConfig, seed: int, checkpoints: Path, cuda: bool, main: bool) -> Any:
    """Return TRL's arguments."""
    from trl.trainer.dpo_config import DPOConfig as TrlConfig

    args = TrlConfig(
        output_dir=str(checkpoints), beta=settings.beta, learning_rate=settings.learning_rate,
        num_train_epochs=settings.epochs, max_steps=settings.max_steps,
        per_device_train_batch_size=settings.micro_batch, precompute_ref_log_probs=True,
        precompute_ref_batch_size=settings.reference_batch, max_length=None, disable_dropout=True,
        gradient_accumulation_steps=accumulation(settings.global_batch, settings.micro_batch, world_size()),
        warmup_steps=settings.warmup_share, lr_scheduler_type=settings.scheduler, weight_decay=settings.weight_decay,
        bf16=set_precision(settings.bf16, cuda), activation_checkpointing=settings.recompute,
        use_cpu=not cuda, seed=seed, data_seed=seed, logging_steps=1,
        report_to="none", save_strategy="steps" if settings.save_every else "no", save_steps=settings.save_every or 1,
        save_total_limit=1, disable_tqdm=not (main and sys.stderr.isatty()), dataloader_pin_memory=cuda,
        remove_unused_columns=True, ddp_find_unused_parameters=False,
    )  # fmt: skip
    return on_one_gpu(args)


class Measured(NamedTuple):
    """What a model says of the held-out pairs: log-probabilities of chosen and rejected, and tokens for the KL."""

    sums: list[tuple[float, float]]
    tokens: "Sequence[Tokens]"


def measured(trainer: Any, held: Sequence[Pair], batch: int, drawn: "Sequence[Tokens] | None") -> Measured:
    """Measure the model as it is; the first time, before training, tokens are drawn from it: it is the reference."""
    if not held:
        return Measured([], [])
    return Measured(trainer.log_probs(rows_of(held), batch), trainer.next_tokens(rows_of(some(held)), drawn))


def some(held: Sequence[Pair]) -> list[Pair]:
    """Draw the pairs that the KL is estimated on, by their ids."""
    return sorted(held, key=lambda pair: uniform("kl", pair.id))[:KL_PAIRS]
