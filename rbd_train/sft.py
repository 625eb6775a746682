r"""Distil: train a detector on curated traces with TRL's SFTTrainer.

In: `train.jsonl` (Example). Out: `model/` (safetensors, tokenizer with the detector's chat template), `losses.jsonl`.
The context ends with `<think>\n`; loss is taken on `reasoning\n</think>\n\nYes|No` and EOS alone. With objective=label
the context ends with `<think>\n\n</think>\n\n`, and loss is on `Yes|No` and EOS; objective=classifier trains a head.

    rbd sft model=embedded
    rbd sft experiment=r1_qwen_7b launch=zero3
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rbd_train.app import BaseConfig, stage
from rbd_train.errors import DataError, UsageError
from rbd_train.hub import check_name, upload
from rbd_train.modelling import Rendered, encode_context, load_tokenizer, render_example, resolve_model
from rbd_train.prompts.detect import detect_messages
from rbd_train.records import Example, uniform
from rbd_train.run import Cell, Run, Table
from rbd_train.settings import (
    INNOCENT,
    ModelConfig,
    TrainerConfig,
    check_model,
    check_objective,
    check_schedule,
    facts_of,
    told_settings,
)
from rbd_train.store import fingerprint
from rbd_train.training import held_out_loss, make_trainer, report_speed, to_continue, train_to_the_end
from rbd_train.weights import DETECTORS, model_card, save

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class SftConfig(BaseConfig):
    """Settings of sft."""

    model: ModelConfig = field(default_factory=lambda: ModelConfig("embedded"))  # what to train (conf/model)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)  # how to train
    objective: str = "reasoning"  # reasoning, label (the verdict alone) or classifier (a two-label head)
    biases: list[str] = field(default_factory=list)  # train on these alone; default: on all, jointly
    train: list[str] = field(default_factory=list)  # paths of the examples; default: the output of stage curate
    push_to_hub: str | None = None  # model on the hub (owner/name) to upload to; null: nothing leaves this machine


@stage("sft", SftConfig)
def main(cfg: SftConfig, run: Run) -> float | None:
    """Render, show what carries loss, train, save, check."""
    check_name(cfg.push_to_hub)
    check_objective(cfg.objective)
    check_model(cfg.model)
    check_schedule(cfg.trainer)
    paths = [Path(path) for path in cfg.train] or [run.output_of("curate", "train.jsonl")]
    examples = choose([example for path in paths for example in run.read(path, Example)], cfg.biases)
    source = resolve_model(cfg.model.path)
    tokenizer = load_tokenizer(source, reasoning=cfg.objective != "classifier", thinking=cfg.objective == "reasoning")
    training, held_back = split(examples, cfg.trainer.eval_share, cfg.seed)
    rows = keep_trainable(render(tokenizer, training, cfg.objective), cfg.trainer.max_length)
    held = keep_trainable(render(tokenizer, held_back, cfg.objective), cfg.trainer.max_length)
    run.table(rows_table({"train": rows} | ({"held back": held} if cfg.trainer.eval_share else {})))
    check_rows(rows, cfg.trainer.max_length, cfg.trainer.max_drop_share)
    check_held(held, cfg.trainer.eval_share, cfg.trainer.max_length)
    if len({example.label for example in training}) == 1:
        answer = "Yes" if training[0].label else "No"
        run.say(f"warning: all {len(training)} rows are labelled {answer}: a detector can learn nothing but to say so")
    if cfg.objective != "classifier":
        run.say(preview(tokenizer, rows.kept[0]))
    checkpoints = run.folder / f"checkpoints-{key_of(cfg, run)}"
    continued = to_continue(checkpoints, facts_of(cfg.model, cfg.trainer, cfg.objective), run)
    trainer = make_trainer(
        source, cfg.model, tokenizer, rows.kept, held.kept, cfg.trainer, cfg.objective, cfg.seed, checkpoints, run
    )
    train_to_the_end(trainer, continued, run)
    chosen = ", ".join(cfg.biases) or "all"
    settings = told_settings(
        cfg.model, cfg.trainer, cfg.launch, objective=cfg.objective, biases=chosen, seed=cfg.seed
    )  # fmt: skip
    authors = sorted({example.trace.author for example in training if example.trace})
    told = f"{len(rows.kept)} rows; traces by {', '.join(authors) or 'nobody'}."
    card = model_card(DETECTORS[cfg.objective], cfg.model.licence, cfg.model.path, run.inputs, settings, told)
    save(trainer, tokenizer, source, cfg.model.path, cfg.model.dtype, card, run)
    report_speed(trainer, len(rows.kept), sum(len(r.input_ids) for r in rows.kept), run)
    if run.main:
        run.outputs["model"] = {"sha256": None, "rows": None}
        if cfg.push_to_hub is not None:
            upload(cfg.push_to_hub, "model", run.folder / "model")
        run.leftovers.append(checkpoints)
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    measured = held_out_loss(trainer)
    return losses[-1] if measured is None else measured


def choose(examples: Sequence[Example], biases: Sequence[str]) -> list[Example]:
    """Keep the examples of some biases.

    Raises:
        UsageError: no example has one of them.
    """
    known = sorted({example.bias for example in examples})
    absent = sorted(set(biases) - set(known))
    if absent:
        raise UsageError(f"biases names {absent[0]!r}, of which there is no example; there are {', '.join(known)}")
    return [example for example in examples if not biases or example.bias in biases]


def split(examples: Sequence[Example], share: float, seed: int) -> tuple[list[Example], list[Example]]:
    """Hold back a share of the groups (questions) to measure the loss on."""
    held = {example.group for example in examples if uniform("eval", seed, example.group) < share}
    return [e for e in examples if e.group not in held], [e for e in examples if e.group in held]


def key_of(cfg: SftConfig, run: Run) -> str:
    """Return what checkpoints must agree on; micro-batch, recomputation and the like may change."""
    trainer = {key: value for key, value in vars(cfg.trainer).items() if key not in INNOCENT}
    return fingerprint([run.inputs, vars(cfg.model), trainer, cfg.objective, cfg.biases, cfg.seed])


class Rows(NamedTuple):
    """What became of the examples."""

    kept: list[Rendered]
    too_long: int
    untrainable: int


def render(tokenizer: "PreTrainedTokenizerBase", examples: Sequence[Example], objective: str) -> list[Rendered]:
    """Render every example to ids and labels; a classifier has one label per row, No 0 or Yes 1."""
    rendered = []
    for example in examples:
        messages = detect_messages(example.case)
        if objective == "classifier":
            rendered.append(Rendered(encode_context(tokenizer, messages), [int(example.label)]))
        elif objective == "label":
            rendered.append(render_example(tokenizer, messages, None, example.label))
        elif example.trace is None or example.trace.thinking is None or example.trace.verdict is None:
            raise DataError(f"example {example.case.id}: no readable trace; was it written by curate?")
        elif example.trace.verdict != example.label:
            raise DataError(
                f"example {example.case.id}: its label is {example.label}, but its trace's verdict, which would be "
                f"trained on, {example.trace.verdict}; curate drops such traces"
            )
        else:
            rendered.append(render_example(tokenizer, messages, example.trace.thinking, example.trace.verdict))
    return rendered


def keep_trainable(rendered: Sequence[Rendered], max_length: int) -> Rows:
    """Drop rows that are too long (cutting would keep the reasoning and lose label and EOS) or carry no loss."""
    kept = [row for row in rendered if len(row.input_ids) <= max_length]
    trainable = [row for row in kept if any(label != -100 for label in row.labels)]
    return Rows(trainable, len(rendered) - len(kept), len(kept) - len(trainable))


def rows_table(splits: Mapping[str, Rows]) -> Table:
    """Count rows kept, too long, without a trainable token: of those to train on, and of those held back."""
    counts: list[tuple[Cell, ...]] = []
    for name, rows in splits.items():
        lengths = sorted(len(row.input_ids) for row in rows.kept)
        trained = sum(label != -100 for row in rows.kept for label in row.labels)
        middle = lengths[len(lengths) // 2] if lengths else None
        longest = lengths[-1] if lengths else None
        counts.append(
            (name, len(rows.kept), rows.too_long, rows.untrainable, middle, longest, sum(lengths), trained)
        )  # fmt: skip
    return Table(
        name="sft", title="Rows to train on",
        columns=("split", "kept", "too long", "without a trainable token", "median tokens", "longest", "tokens",
                 "with loss"), rows=tuple(counts),
    )  # fmt: skip


def check_rows(rows: Rows, max_length: int, max_drop_share: float) -> None:
    """Stop where nothing, or too little, is left.

    Raises:
        DataError: says how many rows are left, and names trainer.max_length.
    """
    total = len(rows.kept) + rows.too_long + rows.untrainable
    if not rows.kept:
        raise DataError(
            f"sft: 0 of {total} rows are left; {rows.too_long} exceed trainer.max_length={max_length} tokens: raise it"
        )
    if rows.too_long > max_drop_share * total:
        raise DataError(
            f"sft: {rows.too_long} of {total} rows exceed trainer.max_length={max_length} tokens; "
            f"raise it, or trainer.max_drop_share (now {max_drop_share})"
        )


def check_held(held: Rows, share: float, max_length: int) -> None:
    """Stop where a loss is to be measured, but on nothing.

    Raises:
        DataError: names trainer.eval_share and trainer.max_length.
    """
    if share and not held.kept:
        why = f"{held.too_long} held-back rows exceed trainer.max_length={max_length} tokens; raise it, or the share"
        if not held.too_long:
            why = "no question was drawn; raise the share"
        raise DataError(f"sft: trainer.eval_share={share} leaves no row to measure the loss on: {why}")


def preview(tokenizer: "PreTrainedTokenizerBase", row: Rendered) -> str:
    """Show one example with the tokens that carry loss between ⟦ and ⟧."""
    start = next(i for i, label in enumerate(row.labels) if label != -100)
    context, trained = tokenizer.decode(row.input_ids[:start]), tokenizer.decode(row.input_ids[start:])
    return f"The first example; loss is taken between ⟦ and ⟧:\n{context}⟦{trained}⟧"
