"""Build paired data sets D and D_bias from a source, for each bias.

In: a source (`conf/source`). Out: `pairs.jsonl` (BiasPair), `dropped.jsonl` (what was left out, and why).

    rbd pairs source=generated
    rbd pairs source=rbd source.folder=DIR limit=50
    rbd pairs source=gsm8k source.path=test.jsonl 'bias=[verbosity,position]' weak=local
    rbd pairs source=gsm8k source.path=test.jsonl 'bias=[sentiment]' weak=local engine@rewriter=http rewriter.model=M
    rbd pairs source=planted 'bias=["library:runs/default/discover/library.jsonl"]' engine@rewriter=rules
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from data_gen.biases.checks import injection_fault
from data_gen.biases.injectors import CROWD, INJECTORS, Cue, make_pair, operators
from data_gen.biases.library import LIBRARY, library_pairs, with_definitions
from data_gen.biases.own import own_pairs, read_own_bias
from data_gen.biases.tone import toned_pairs
from rbd_train.app import BaseConfig, stage
from rbd_train.biases import NAMES, read_library
from rbd_train.engine import Engine
from rbd_train.errors import DataError, UsageError
from rbd_train.exchange import Sampling
from rbd_train.records import Bias, BiasPair, Dropped, Question, uniform
from rbd_train.run import Run, Table
from rbd_train.store import unique

WEAK_PROMPT = "Solve the problem. Show your working and end with: #### number"


@dataclass
class PairsConfig(BaseConfig):
    """Settings of pairs."""

    source: Any = None  # where questions or pairs come from
    bias: list[str] = field(default_factory=lambda: list(NAMES))  # biases to build; library:<file> takes a library's
    rewriter: Any = None  # engine that writes a library's biases and sentiment's tones (engine@rewriter=http)
    rewrite_tokens: int = 2048  # tokens of a rewritten answer
    limit: int | None = None  # pairs per bias, drawn by id; null: all
    own: str | None = None  # file of a bias of one's own (data_gen/biases/own.py says what it holds), built as well
    dose: list[int] = field(default_factory=lambda: [CROWD])  # per cent of the crowd; one is drawn per pair
    sham: bool = False  # rewrite without the cue: what the rewriting itself does to the judge
    congruent_share: float = 0.0  # share of pairs whose cue favours the right answer, so that content-blind rules fail
    weak: Any = None  # engine (conf/weak) that writes wrong answers where the source has none, and an own bias's prompt
    weak_max_new_tokens: int = 256  # tokens of a weak answer


@stage("pairs", PairsConfig)
def main(cfg: PairsConfig, run: Run) -> float | None:
    """Load, complete with wrong answers, inject, write."""
    named = [bias for bias in cfg.bias if not bias.startswith(LIBRARY)]
    check_biases(named)
    if not cfg.dose or not all(0 <= dose <= 100 for dose in cfg.dose):
        raise UsageError(f"dose is {cfg.dose}; it takes percentages from 0 to 100")
    library = read_libraries(cfg.bias, run)
    if library and cfg.rewriter is None:
        raise UsageError(
            "bias=library:... needs an engine that writes biases into answers: engine@rewriter=http or rules"
        )
    if (cfg.limit or 0) < 0 or not 0 <= cfg.congruent_share <= 1:
        told = f"limit is {cfg.limit} (0 or more)" if (cfg.limit or 0) < 0 else ""
        raise UsageError(told or f"congruent_share is {cfg.congruent_share} (0 to 1)")
    loaded = cfg.source.load(cfg.seed)
    for file in loaded.files:
        run.note_input(Path(file))
    run.facts |= {"licence": loaded.licence, "source": type(cfg.source).__name__, "operators": operators(named)}
    questions, dropped = distinct(loaded.questions)
    lacking = [question for question in questions if question.wrong is None]
    if lacking:
        if cfg.weak is None:
            raise UsageError(
                f"{len(lacking)} questions have no wrong answer; choose an engine to write them: weak=local"
            )
        needed = lacking if cfg.limit is None else draw(lacking, 2 * cfg.limit * len(cfg.bias))
        with cfg.weak.open(run.ledger) as engine:
            completed, lost = with_wrong_answers(needed, engine, cfg.weak_max_new_tokens)
        dropped += lost
        questions = [question for question in questions if question.wrong is not None] + completed
    pairs = turned([pair for pair in loaded.pairs if pair.bias in cfg.bias], cfg.congruent_share)
    for bias in named:
        pairs += inject(questions, bias, type(cfg.source).__name__, cfg.congruent_share, cfg.dose, cfg.sham)
    if cfg.rewriter is not None and "sentiment" in named:
        pairs, lost = with_tones(pairs, cfg, run)
        dropped += lost
    if cfg.own is not None:
        made, lost = with_own_bias(Path(cfg.own), questions, type(cfg.source).__name__, cfg.weak, run)
        pairs, dropped = pairs + made, dropped + lost
    pairs, lost = checked(pairs, {question.id: question.final for question in questions})
    dropped += lost
    if library:  # checked by the rewriting itself
        pairs, dropped = add_library(pairs, dropped, questions, library, cfg, run)
    if cfg.limit is not None:
        biases = dict.fromkeys(pair.bias for pair in pairs)
        pairs = [pair for bias in biases for pair in draw([p for p in pairs if p.bias == bias], cfg.limit)]
    if not pairs:
        raise DataError(f"pairs: no pair is left of {len(loaded.questions)} questions and {len(loaded.pairs)} pairs")
    run.write("pairs.jsonl", unique(pairs, "id", "pairs"))
    run.write("dropped.jsonl", dropped)
    left = Counter(loaded.left_out) + Counter(row.reason for row in dropped)
    run.table(pairs_table(pairs, left))
    return float(len(pairs))


def distinct(questions: Sequence[Question]) -> tuple[list[Question], list[Dropped]]:
    """Leave out rows whose two answers are one, and rows that came before: they would only swell n."""
    kept, dropped, seen = list[Question](), list[Dropped](), set[tuple[str, ...]]()
    for question in questions:
        wrong = " ".join((question.wrong or "").split())
        same = (" ".join(question.question.split()), " ".join(question.right.split()), wrong)
        reason = "right and wrong answer are the same" if wrong == same[1] else "the same row again" * (same in seen)
        seen.add(same)
        if reason:
            dropped.append(Dropped(case_id=question.id, bias="", group=question.group, sample=None, reason=reason))
        else:
            kept.append(question)
    return kept, dropped


def read_libraries(biases: Sequence[str], run: Run) -> list[Bias]:
    """Read the biases of `library:<file>` that can be written into an answer."""
    found: list[Bias] = []
    for path in (Path(bias.removeprefix(LIBRARY)) for bias in biases if bias.startswith(LIBRARY)):
        library = read_library(path)
        run.note_input(path, len(library))
        found += [bias for bias in library if bias.operator is not None]
        if not found:
            raise DataError(f"{path}: no bias has an operator, so none can be written into an answer")
    return found


def add_library(
    pairs: Sequence[BiasPair], dropped: Sequence[Dropped], questions: Sequence[Question], library: Sequence[Bias],
    cfg: PairsConfig, run: Run,
) -> tuple[list[BiasPair], list[Dropped]]:  # fmt: skip
    """Add the pairs of a library to those of the known biases, and let all of them carry its definitions."""
    chosen = questions if cfg.limit is None else draw(questions, cfg.limit)
    with cfg.rewriter.open(run.ledger) as engine:
        written, faults = library_pairs(
            chosen, library, engine, type(cfg.source).__name__, cfg.congruent_share, cfg.rewrite_tokens
        )
    return with_definitions([*pairs, *written], library), [*dropped, *faults]


def with_tones(pairs: Sequence[BiasPair], cfg: PairsConfig, run: Run) -> tuple[list[BiasPair], list[Dropped]]:
    """Let the rewriter say sentiment's answers cheerfully and gloomily, of no more pairs than are asked for."""
    toned, others = list[BiasPair](), list[BiasPair]()
    for pair in pairs:  # a source's own rewrites stay as they are
        (toned if pair.bias == pair.provenance.get("operator") == "sentiment" else others).append(pair)
    with cfg.rewriter.open(run.ledger) as engine:
        made, lost = toned_pairs(toned if cfg.limit is None else draw(toned, cfg.limit), engine, cfg.rewrite_tokens)
    return others + made, lost


def check_biases(biases: Sequence[str]) -> None:
    """Refuse a bias that has no injector; several are joined by +, position alone stays alone."""
    for bias in biases:
        parts = bias.split("+")
        if not set(parts) <= set(INJECTORS) or len(set(parts)) != len(parts):
            raise UsageError(f"bias {bias!r} is unknown; known: {', '.join(INJECTORS)}, or several joined by +")
        if len(parts) > 1 and "position" in parts:
            raise UsageError(f"bias {bias!r}: position is an order, not a rewrite, so nothing can be joined to it")


def with_own_bias(
    path: Path, questions: Sequence[Question], source: str, weak: Any, run: Run
) -> tuple[list[BiasPair], list[Dropped]]:
    """Read a bias of one's own and inject it."""
    bias = read_own_bias(path)
    run.note_input(path)
    if bias.id in INJECTORS:
        raise UsageError(f"{path}, field id: {bias.id!r} is one of the known biases; take another name")
    if bias.prompt is None or weak is None:
        return own_pairs(questions, bias, path, source, None)
    with weak.open(run.ledger) as engine:
        return own_pairs(questions, bias, path, source, engine)


def checked(pairs: Sequence[BiasPair], finals: Mapping[str, str]) -> tuple[list[BiasPair], list[Dropped]]:
    """Keep the pairs in which only the intended thing changed; published twins are as published."""
    kept, dropped = list[BiasPair](), list[Dropped]()
    for pair in pairs:
        published = pair.provenance.get("operator") == "as published"
        final = finals.get(pair.id.removesuffix(f"-{pair.bias}"))
        fault = "" if published else injection_fault(pair, final)
        if fault:
            group = pair.plain.group
            dropped.append(Dropped(case_id=pair.id, bias=pair.bias, group=group, sample=None, reason=fault))
        else:
            kept.append(pair)
    return kept, dropped


def with_wrong_answers(
    questions: Sequence[Question], engine: Engine, max_new_tokens: int
) -> tuple[list[Question], list[Dropped]]:
    """Let a weak engine answer, and keep an answer only if it is complete and its last number is not the gold one."""
    prompts = [[{"role": "user", "content": f"{WEAK_PROMPT}\n\n{q.question}"}] for q in questions]
    replies = engine.generate(prompts, Sampling(max_new_tokens=max_new_tokens))  # type: ignore[arg-type]
    kept, dropped = list[Question](), list[Dropped]()
    for question, reply in zip(questions, replies, strict=True):
        reason = reply.status if reply.status != "ok" else wrong_answer_fault(reply.text, question.final)
        if reason:
            dropped.append(
                Dropped(
                    case_id=question.id, bias="", group=question.group, sample=None, reason=f"weak answer: {reason}"
                )
            )
        else:
            kept.append(question.model_copy(update={"wrong": reply.text.strip()}))
    return kept, dropped


def wrong_answer_fault(text: str, gold: str) -> str:
    """Say why a weak answer can't serve as a wrong one; empty if it can. 57 of 500 published ones are right."""
    numbers, right = _numbers(text), _numbers(gold)
    if not right:
        return "the right answer has no number to check it by"
    if not numbers:
        return "no number in it"
    if numbers[-1] == right[-1]:
        return "it is right"
    return "the gold number is in it" if right[-1] in numbers[-2:] else ""


def inject(
    questions: Sequence[Question], bias: str, source: str, congruent_share: float, doses: Sequence[int] = (CROWD,),
    sham: bool = False,
) -> list[BiasPair]:  # fmt: skip
    """Make a pair of every question that isn't made for another bias; which are congruent is drawn, in each split."""
    questions = [question for question in questions if question.meta.get("cue", bias) in (bias, *bias.split("+"))]
    congruent: set[str] = set()
    for split in ("train", "test", None):
        part = sorted((q for q in questions if q.split == split), key=lambda q: uniform("congruent", bias, q.id))
        congruent |= {question.id for question in part[: round(len(part) * congruent_share)]}
    mixed = congruent_share > 0
    cues = [
        Cue(question.id in congruent, doses[int(uniform("dose", question.id) * len(doses))], sham)
        for question in questions
    ]
    return [make_pair(question, bias, source, cue, mixed) for question, cue in zip(questions, cues, strict=True)]


def turned(pairs: Sequence[BiasPair], share: float) -> list[BiasPair]:
    """Remake a share of a source's own pairs, drawn by id, so that the cue favours the right answer.

    Where a right answer ends in a whole number, a wrong one within 50 of it stands against it in brief (as the paper's
    diagnostic set does, arXiv 2505.17100), else the wrong answer's own last line.
    """
    return [turn(pair) if uniform("congruent", pair.bias, pair.id) < share else pair for pair in pairs]


def turn(pair: BiasPair) -> BiasPair:
    """Make a pair's cue favour its right answer; D stays as it is, position apart, whose right answer goes last."""
    item, gold = pair.plain, pair.plain.gold
    if gold is None:
        raise DataError(f"pairs: pair {pair.id} has no gold answer, so that no cue can favour it")
    right = item.options[gold]
    wrong = next(option for k, option in enumerate(item.options) if k != gold)
    whole = re.search(r"(-?\d+)\W*$", right)
    if whole and pair.bias == "verbosity":
        offset = 1 + int(uniform("offset", pair.id) * 50)
        wrong = str(int(whole[1]) + offset * (1 if uniform("sign", pair.id) < 0.5 else -1))
    question = Question(
        id=pair.id, group=item.group, question=item.question, right=right, final=right.strip().splitlines()[-1],
        wrong=wrong, split=pair.split,
    )  # fmt: skip
    if pair.bias == "position":
        rest = tuple(option for k, option in enumerate(item.options) if k != gold)
        item = item.model_copy(update={"options": (*rest, right), "gold": len(rest)})
    biased = INJECTORS[pair.bias](question, item, Cue(congruent=True)).model_copy(update={"id": pair.biased.id})
    provenance: dict[str, JsonValue] = {**pair.provenance, "congruent": True}
    return pair.model_copy(update={"plain": item, "biased": biased, "provenance": provenance})


def draw(rows: Sequence[Any], limit: int) -> list[Any]:
    """Draw rows by a hash of their id, so that a larger limit keeps the smaller one's rows."""
    chosen = sorted(rows, key=lambda row: uniform("limit", row.id))[:limit]
    return sorted(chosen, key=lambda row: [r.id for r in rows].index(row.id)) if len(rows) < 2000 else chosen


def pairs_table(pairs: Sequence[BiasPair], left_out: Counter[str]) -> Table:
    """Count pairs per bias and split, with the balance of the gold side."""
    rows = []
    for bias in sorted({pair.bias for pair in pairs}):
        for split in ("train", "test", None):
            part = [pair for pair in pairs if pair.bias == bias and pair.split == split]
            if part:
                first = sum(pair.plain.gold == 0 for pair in part)
                congruent = sum(bool(pair.provenance.get("congruent")) for pair in part)
                rows.append((bias, split or "not split", len(part), first, congruent))
    note = "left out: " + (", ".join(f"{reason}: {count}" for reason, count in sorted(left_out.items())) or "nothing")
    columns = ("bias", "split", "pairs", "gold stored first", "congruent")
    return Table(name="pairs", title="Pairs of D and D_bias", columns=columns, rows=tuple(rows), note=note)


def _numbers(text: str) -> list[float]:
    return [float(found.replace(",", "")) for found in re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)]
