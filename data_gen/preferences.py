"""Make preference pairs to train on: plain ones, and ones whose rejected answer has a bias of a library written in.

In: a preference set (conf/source), a bias library. Out: `train.jsonl`, `test.jsonl` (Preference, TRL's conversational
form), `dropped.jsonl` (Dropped). Questions, splits and biases are drawn by the rows' ids: `seed` changes none of them.

    rbd preferences source=preference source.path=pairs.parquet library=runs/default/discover/library.jsonl
    rbd preferences mix=0
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_gen.biases.rewrite import Task, check_amounts, rewrite
from rbd_train.app import BaseConfig, stage
from rbd_train.biases import read_library
from rbd_train.engine import Engine
from rbd_train.errors import DataError, UsageError
from rbd_train.metrics import mean_rate
from rbd_train.records import Bias, Dropped, Preference, Question, Split, Turn, uniform
from rbd_train.run import Cell, Run, Table
from rbd_train.sources import with_two_answers
from rbd_train.store import fingerprint, unique
from rbd_train.tables import counted


@dataclass
class PreferencesConfig(BaseConfig):
    """Settings of preferences."""

    source: Any = None  # preference pairs
    library: str | None = None  # bias library; default: the output of stage discover
    rewriter: Any = None  # engine that writes biases into rejected answers
    held_out_rewriter: Any = None  # engine for the test split; default: the same
    mix: float = 0.5  # share of the training pairs that also come with a bias written in; 0: plain pairs alone
    test_share: float = 0.2  # share of the questions that are held out; each comes plain and with every bias
    limit: int | None = None  # questions, drawn by id; null: all
    growth: float = 2.0  # factor by which a rewritten answer may grow or shrink
    rewrite_tokens: int = 2048  # tokens of a rewritten answer


@stage("preferences", PreferencesConfig)
def main(cfg: PreferencesConfig, run: Run) -> float | None:
    """Load, split by question, write biases in, drop what is double or failed, write."""
    if not 0 <= cfg.mix <= 1 or not 0 <= cfg.test_share < 1:
        raise UsageError(f"mix is {cfg.mix} (0 to 1), test_share is {cfg.test_share} (0 to below 1)")
    check_amounts(cfg.limit, cfg.growth)
    path = Path(cfg.library) if cfg.library else run.output_of("discover", "library.jsonl")
    library = [bias for bias in read_library(path) if bias.operator is not None]
    if not library:
        raise DataError(f"{path}: no bias has an operator, so none can be written into an answer")
    run.note_input(path, len(library))
    loaded = with_two_answers(cfg.source.load(cfg.seed))
    for file in loaded.files:
        run.note_input(Path(file))
    run.facts |= {"licence": loaded.licence}
    chosen = sorted(loaded.questions, key=lambda q: uniform("limit", q.id))[: cfg.limit]
    beyond = {f"beyond limit={cfg.limit}": len(loaded.questions) - len(chosen)}
    source = getattr(cfg.source, "format", None) or Path(loaded.files[0] if loaded.files else "generated").stem
    held = held_out(chosen, cfg.test_share)
    train, dropped = pairs_of([q for q in chosen if q.group not in held], "train", loaded.licence, source)
    test, more = pairs_of([q for q in chosen if q.group in held], "test", loaded.licence, source)
    dropped += more
    mixed = sorted(train, key=lambda p: uniform("mix", p.id))[: round(cfg.mix * len(train))]
    with cfg.rewriter.open(run.ledger) as engine:
        written, faults = augmented(balanced(mixed, library), engine, cfg.rewrite_tokens, cfg.growth)
        train, dropped = train + written, dropped + faults
        run.facts["rewriter_calls"] = engine.calls
    with (cfg.held_out_rewriter or cfg.rewriter).open(run.ledger) as engine:
        written, faults = augmented([(p, b) for b in library for p in test], engine, cfg.rewrite_tokens, cfg.growth)
        test, dropped = test + written, dropped + faults
        run.facts["held_out_rewriter_calls"] = engine.calls
    if not train:
        raise DataError(f"preferences: no training pair is left of {len(chosen)} questions")
    run.write("train.jsonl", unique(train, "id", "preferences"))
    run.write("test.jsonl", unique(test, "id", "preferences"))
    run.write("dropped.jsonl", dropped)
    run.table(pairs_table([*train, *test], dropped, loaded.left_out | beyond))
    return float(len(train))


def held_out(questions: Sequence[Question], share: float) -> set[str]:
    """Return the groups that are held out: those that the source holds out, and a share of those it says nothing of.

    Raises:
        DataError: the source puts one group into both splits.
    """
    said: dict[str, set[str]] = {}
    for question in questions:
        said.setdefault(question.group, set()).update([question.split] if question.split else [])
    both = [group for group, splits in said.items() if len(splits) > 1]
    if both:
        raise DataError(f"preferences: group {both[0]} is in the source's training and in its test split")
    drawn = {group for group, splits in said.items() if not splits and uniform("preference split", group) < share}
    return drawn | {group for group, splits in said.items() if splits == {"test"}}


def pairs_of(
    questions: Sequence[Question], split: Split, licence: str, source: str
) -> tuple[list[Preference], list[Dropped]]:
    """Make plain pairs; one whose question and answers were there before is dropped."""
    seen: set[str] = set()
    pairs, dropped = list[Preference](), list[Dropped]()
    for question in questions:
        key = fingerprint(
            [" ".join(text.split()) for text in (question.question, question.right, question.wrong or "")]
        )
        assert question.wrong is not None
        if key in seen:
            dropped.append(Dropped(case_id=question.id, bias="", group=question.group, sample=None, reason="duplicate"))
            continue
        seen.add(key)
        pairs.append(
            Preference(
                id=question.id, prompt=(Turn(role="user", content=question.question),),
                chosen=(Turn(role="assistant", content=question.right),),
                rejected=(Turn(role="assistant", content=question.wrong),), source=source,
                split=split, group=question.group, domain=question.domain, provenance={"licence": licence},
            )
        )  # fmt: skip
    return pairs, dropped


def balanced(pairs: Sequence[Preference], library: Sequence[Bias]) -> list[tuple[Preference, Bias]]:
    """Give every pair one bias, each equally often."""
    turns = sorted(range(len(pairs)), key=lambda k: uniform("bias of", pairs[k].id))
    return [(pairs[k], library[turn % len(library)]) for turn, k in enumerate(turns)]


def augmented(
    assigned: Sequence[tuple[Preference, Bias]], engine: Engine, tokens: int, growth: float
) -> tuple[list[Preference], list[Dropped]]:
    """Write a bias into each rejected answer; the chosen one stays, and so does the plain pair."""
    tasks = [Task(bias, pair.prompt[-1].content, pair.rejected[-1].content) for pair, bias in assigned]
    made, dropped = list[Preference](), list[Dropped]()
    for (pair, bias), text in zip(assigned, rewrite(engine, tasks, tokens, growth), strict=True):
        pair_id = f"{pair.id}-{bias.id}"
        fault = text.fault or ("identical_pair" if text.text.split() == pair.chosen[-1].content.split() else "")
        if fault:
            dropped.append(Dropped(case_id=pair_id, bias=bias.id, group=pair.group, sample=None, reason=fault))
            continue
        assert bias.operator is not None
        provenance = {
            **pair.provenance, "operator": bias.operator.prompt, "version": bias.operator.version,
            "engine": engine.identity, "plain": pair.id,
        }  # fmt: skip
        update = {
            "id": pair_id, "bias": bias.id, "rejected": (Turn(role="assistant", content=text.text),),
            "provenance": provenance,
        }  # fmt: skip
        made.append(pair.model_copy(update=update))
    return made, dropped


def pairs_table(pairs: Sequence[Preference], dropped: Sequence[Dropped], left_out: dict[str, int]) -> Table:
    """Count pairs per bias, with the length gap: DPO rewards length where the chosen answers are longer (A48)."""
    rows: list[tuple[Cell, ...]] = []
    for bias in sorted({pair.bias or "" for pair in pairs}):
        for split in ("train", "test"):
            own = [pair for pair in pairs if (pair.bias or "") == bias and pair.split == split]
            if own:
                gaps = [float(len(p.chosen[-1].content) - len(p.rejected[-1].content)) for p in own]
                rows.append(
                    (bias or "plain", split, len(own), mean_rate(gaps, [pair.group for pair in own]),
                     sum(gap > 0 for gap in gaps) / len(gaps))
                )  # fmt: skip
    counts = Counter(row.reason for row in dropped) + Counter(left_out)
    note = f"Left out: {counted(counts)}"
    columns = ("bias", "split", "pairs", "chosen minus rejected, characters", "chosen longer")
    return Table(name="preferences", title="Preference pairs", columns=columns, rows=tuple(rows), note=note)
