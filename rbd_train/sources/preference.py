"""Public preference sets, whose right and wrong answers become pairs, or whose published twins are taken as they are.

A licence is what its owner states; where none is known, none is guessed. Faults of the files are mended
and counted; `as_published=true` keeps them.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rbd_train.errors import DataError, UsageError
from rbd_train.prompts.rewrite import cut_ending
from rbd_train.records import BiasPair, Item, Question, group_of, uniform
from rbd_train.sources import Loaded
from rbd_train.sources.jsonl import text_field
from rbd_train.sources.table import table_rows

KEPT = ("original_id", "source", "response_model")  # JudgeBench's columns that a set made from it has too
LABELS = {"1": 0, "2": 1, "A>B": 0, "B>A": 1}


class Choice(NamedTuple):
    """What a row says: the question, the answers, and which is right; None where it names no winner."""

    question: str
    options: tuple[str, ...]
    right: int | None
    domain: str = ""
    twins: tuple[str, ...] = ()  # the answers rewritten with a cue, where the set publishes them
    bias: str = ""
    fault: str = ""  # why the row can't be used


Reader = Callable[[Mapping[str, Any], str], Choice]


def _two(question: str, first: str, second: str, label: str = "label", domain: str = "domain") -> Reader:
    """Read a row of two answers whose label says which is better."""

    def read(row: Mapping[str, Any], where: str) -> Choice:
        if label not in row:
            raise DataError(f"{where}, field {label}: missing; the row has {', '.join(map(str, row)) or 'no fields'}")
        value = str(row[label]).strip()
        if isinstance(row[label], bool) or value not in LABELS:
            raise DataError(f"{where}, field {label}: must be 1 or 2 (or A>B, B>A), got {row[label]!r}")
        answers = (row.get(first), row.get(second))
        options = tuple(answer if isinstance(answer, str) else "" for answer in answers)  # blank ones are counted
        return Choice(text_field(row, question, where), options, LABELS[value], str(row.get(domain) or ""))

    return read


def _chosen(row: Mapping[str, Any], where: str) -> Choice:
    """Read prompt, chosen and rejected, each a text, a list of texts, or a conversation whose last turn counts."""
    prompt, chosen, rejected = (_last_text(row.get(name), where, name) for name in ("prompt", "chosen", "rejected"))
    return Choice(prompt, (chosen, rejected), 0, str(row.get("subset") or ""))


def _last_text(value: Any, where: str, name: str) -> str:
    if isinstance(value, list) and value:
        value = value[-1]["content"] if isinstance(value[-1], dict) and "content" in value[-1] else value[0]
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where}, field {name}: must be text, or a list that holds it, got {value!r:.60}")
    return value


def _judge_bench_llmbar(row: Mapping[str, Any], where: str) -> Choice:
    """Read LLMBar as JUDGE-BENCH wraps it."""
    try:
        texts, label = row["instance"], row["annotations"]["quality_single_turn"]["majority_human"]
    except (KeyError, TypeError) as error:
        raise DataError(f"{where}: no instance with annotations.quality_single_turn.majority_human") from error
    if label not in ("model_a", "model_b"):
        raise DataError(f"{where}, field majority_human: must be model_a or model_b, got {label!r}")
    options = (text_field(texts, "output_a", where), text_field(texts, "output_b", where))
    return Choice(text_field(texts, "input", where), options, int(label == "model_b"))


def _arena(row: Mapping[str, Any], where: str) -> Choice:
    """Read Arena-55k: the first turn alone; ties have no right answer."""
    texts = []
    for name in ("prompt", "response_a", "response_b"):
        value = row.get(name)
        try:
            turns = json.loads(value) if isinstance(value, str) and value.lstrip().startswith("[") else [value]
        except ValueError as error:
            raise DataError(f"{where}, field {name}: not a JSON list ({error})") from error
        texts.append(str(turns[0] or "") if turns else "")
    wins = [str(row.get(f"winner_model_{side}")).strip() in ("1", "1.0", "True") for side in "ab"]
    return Choice(texts[0], (texts[1], texts[2]), wins.index(True) if sum(wins) == 1 else None, "chat")


def _several(question: str, choices: str, answer: str) -> Reader:
    """Read a multiple-choice row: the right choice against one of the wrong ones, drawn by the question."""

    def read(row: Mapping[str, Any], where: str) -> Choice:
        texts, gold = row.get(choices), row.get(answer)
        if not isinstance(texts, list) or type(gold) is not int or not 0 <= gold < len(texts) or len(texts) < 2:
            raise DataError(f"{where}, field {answer}: {gold!r} is no index into the choices {texts!r:.80}")
        asked = text_field(row, question, where)
        wrong = [text for k, text in enumerate(texts) if k != gold]
        fault = "needs a picture" if row.get("image") is not None else ""
        return Choice(asked, (str(texts[gold]), str(wrong[int(uniform("wrong", asked) * len(wrong))])), 0, fault=fault)

    return read


def _truthfulqa(row: Mapping[str, Any], where: str) -> Choice:
    question, best = text_field(row, "Question", where), text_field(row, "Best Answer", where)
    wrong = [part.strip() for part in text_field(row, "Incorrect Answers", where).split(";") if part.strip()]
    return Choice(
        question, (best, wrong[int(uniform("wrong", question) * len(wrong))]), 0, str(row.get("Category", ""))
    )


def _answers(row: Mapping[str, Any], where: str) -> Choice:
    """Read CALM's base sets, whose first answer is the better one."""
    options = (text_field(row, "answer1", where), text_field(row, "answer2", where))
    return Choice(text_field(row, "question", where), options, 0)


def _judge_bias_bench(row: Mapping[str, Any], where: str) -> Choice:
    """Read a row with published twins: what was judged before, and both answers rewritten."""
    label = row.get("label")
    if label not in ("response1", "response2"):
        raise DataError(f"{where}, field label: must be response1 or response2, got {label!r}")
    options, twins = (
        tuple(text_field(row, f"{kind}_response{k}", where) for k in (1, 2)) for kind in ("original", "rewritten")
    )
    return Choice(text_field(row, "question", where), options, int(label == "response2"), twins=twins)


class Format(NamedTuple):
    """How a set's rows are read, and the licence that its owner states."""

    read: Reader
    licence: str


NONE_STATED = "none stated"
FORMATS: dict[str, Format] = {
    "judgebench": Format(_two("question", "response_A", "response_B"), "MIT (its card; the repository states none)"),
    "judgebench_pro": Format(_two("question", "response_A", "response_B"), "Apache-2.0"),
    "rewardbench": Format(_two("question", "response_A", "response_B"), "ODC-By"),
    "rewardbench2": Format(_chosen, "ODC-By"),
    "llmbar": Format(_two("input", "output_1", "output_2"), "MIT"),
    "llmbar_judge_bench": Format(_judge_bench_llmbar, "MIT"),
    "evalbiasbench": Format(_two("instruction", "response1", "response2", domain="bias"), "BSD-3-Clause"),
    "offsetbias": Format(_two("instruction", "output_1", "output_2"), "BSD-3-Clause"),
    "calm": Format(_answers, NONE_STATED),
    "judgebiasbench": Format(_judge_bias_bench, NONE_STATED),
    "arena": Format(_arena, "Apache-2.0"),
    "scienceqa": Format(_several("question", "choices", "answer"), "CC BY-NC-SA (the original project)"),
    "truthfulqa": Format(_truthfulqa, "unknown"),
    "factqa": Format(_answers, "unknown"),
    "ultrafeedback": Format(_chosen, "unknown"),
    "chosen_rejected": Format(_chosen, "unknown"),
}


@dataclass
class PreferenceSource:
    """A preference set, by file or by hub name."""

    path: str  # .json, .jsonl, .csv or .parquet, or hub:<owner>/<name>
    format: str = "judgebench"  # which set's columns it has: question, response_A, response_B, label by default
    hub_split: str = "test"  # split of a hub data set
    split: str | None = None  # train or test for every row; null: drawn by question in curate
    licence: str | None = None  # as its owner states it; null: what is known of the format, never guessed
    bias: str = "rewritten"  # name of the cue in sets that publish rewritten twins
    as_published: bool = False  # keep copies, and rows whose answers are the same
    encoding: str = "utf-8"  # of the file

    def load(self, seed: int) -> Loaded:
        """Read the set."""
        if self.format not in FORMATS:
            raise UsageError(f"source.format is {self.format!r}; choose one of {', '.join(FORMATS)}")
        if self.split not in (None, "train", "test"):
            raise UsageError(f"source.split is {self.split!r}; choose train, test or null")
        left_out: Counter[str] = Counter()
        questions, pairs, seen = list[Question](), list[BiasPair](), set[tuple[str, ...]]()
        for number, (where, row) in enumerate(table_rows(self.path, self.hub_split, self.encoding)):
            choice = FORMATS[self.format].read(row, where)
            key = (choice.question, *sorted(choice.options))
            fault = choice.fault or ("no winner" if choice.right is None else "")
            if any(re.search("[\ud800-\udfff]", text) for text in (choice.question, *choice.options, *choice.twins)):
                fault = "half a surrogate pair, which is no text"
            if not all(option.strip() for option in choice.options):
                fault = "a blank answer"  # nothing to judge, however it was published
            if not self.as_published and not fault:
                same = len({" ".join(option.split()) for option in choice.options}) == 1
                fault = "a copy" if key in seen else "answers are the same" if same else ""
            seen.add(key)
            if fault or choice.right is None:
                left_out[f"{self.format}: {fault}"] += 1
            elif choice.twins:
                pairs.append(self._pair(f"{self.format}-{number}", choice, choice.right))
            else:
                meta = {name: str(row[name]) for name in KEPT if row.get(name) is not None}
                questions.append(self._question(f"{self.format}-{number}", choice, choice.right, meta))
        if not questions and not pairs:
            raise DataError(f"{self.path}: no usable pair; left out: {dict(left_out) or 'nothing'}")
        files = [] if self.path.startswith("hub:") else [self.path]
        return Loaded(questions, pairs, dict(left_out), self.licence or FORMATS[self.format].licence, files)

    def _question(self, name: str, choice: Choice, right: int, meta: Mapping[str, str]) -> Question:
        text = choice.options[right]
        return Question(
            id=name, group=group_of(choice.question), question=choice.question, right=text,
            final=cut_ending(text).ending.strip(), wrong=choice.options[1 - right], split=self.split,  # type: ignore[arg-type]
            domain=choice.domain, meta={"label": right + 1, **meta},
        )  # fmt: skip

    def _pair(self, name: str, choice: Choice, right: int) -> BiasPair:
        plain = Item(
            id=f"{name}-plain", question=choice.question, options=choice.options, gold=right,
            group=group_of(choice.question), domain=choice.domain,
        )  # fmt: skip
        biased = plain.model_copy(update={"id": f"{name}-biased", "options": choice.twins})
        return BiasPair(
            id=name, bias=self.bias, source=self.format, split=self.split, plain=plain, biased=biased,  # type: ignore[arg-type]
            provenance={"operator": "as published"},
        )  # fmt: skip


def label_balance(questions: Sequence[Question]) -> str:
    """Say which label the file gives; one label only means that whoever reads it unshuffled can't be wrong (A33)."""
    labels = Counter(question.meta.get("label") for question in questions)
    if set(labels) == {None}:
        return "the source stores no label"
    told = ", ".join(f"{label}: {count}" for label, count in sorted(labels.items(), key=str))
    one = "; one label only, so the file's order gives the answer away" if len(labels) == 1 else ""
    return f"label as stored {told}{one}; the gold side is drawn from the id"
