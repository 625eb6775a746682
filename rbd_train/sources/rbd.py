"""The published files of the RBD paper (Joyyang158/Reasoning-Bias-Detector; no licence stated).

Their faults are mended by default and counted: `as_published=true` takes them as they are.
"""

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rbd_train.biases import NAMES, Definitions, definitions_for
from rbd_train.errors import DataError
from rbd_train.records import BiasPair, BiasRecord, Case, Item, Trace, View, group_of, uniform
from rbd_train.sources import Loaded
from rbd_train.sources.jsonl import text_field
from rbd_train.store import fingerprint, read_text

LICENCE = "none stated"
FILES = {
    "verbosity": "GSM8K_Verbosity.json", "position": "Arena_Position_and_Bandwagon.json",
    "bandwagon": "Arena_Position_and_Bandwagon.json", "sentiment": "ScienceQA_Sentiment.json",
}  # fmt: skip
COLUMNS = (
    "index", "bias_category", "llm_judge_model", "instruction", "choices", "llm_judgment",
    "without_bias_label_think_content", "deepseek_prediction_bias_label", "bias_label",
)  # fmt: skip


@dataclass
class RbdSource:
    """The four evaluation sets, as pairs."""

    folder: str  # folder with GSM8K_Verbosity.json, Arena_Position_and_Bandwagon.json, ScienceQA_Sentiment.json
    as_published: bool = False  # keep duplicates and "wrong" answers that reach the gold number
    encoding: str = "utf-8"  # of the files

    def load(self, seed: int) -> Loaded:
        """Read the sets."""
        left_out: Counter[str] = Counter()
        pairs = []
        readers = {"verbosity": _verbosity, "position": _arena, "bandwagon": _arena, "sentiment": _sentiment}
        for bias, reader in readers.items():
            path = Path(self.folder) / FILES[bias]
            seen: set[str] = set()
            for number, row in enumerate(_json_list(path, self.encoding)):
                pair, fault = reader(bias, f"{path}, row {number}", f"rbd-{bias}-{number}", row)
                key = fingerprint([pair.plain.question, sorted(pair.plain.options)])
                if key in seen:
                    fault = "duplicate"
                seen.add(key)
                if fault and not self.as_published:
                    left_out[f"{bias}: {fault}"] += 1
                    continue
                pairs.append(pair)
        files = sorted({str(Path(self.folder) / name) for name in FILES.values()})
        return Loaded([], pairs, dict(left_out), LICENCE, files)


class Reasoning(NamedTuple):
    """The published reasoning supervision: labels, what the detector saw, and R1's traces, joined by case id."""

    records: list[BiasRecord]
    cases: list[Case]
    traces: list[Trace]


def read_reasoning(path: Path, mode: Definitions = "all", encoding: str = "utf-8") -> Reasoning:
    """Read the RBD-ReasoningSupervision CSV. "90%%" is a format-string slip in every bandwagon row and is mended.

    Raises:
        DataError: a wrong column, a label other than Yes or No, choices that can't be split; names row and column.
    """
    found = Reasoning([], [], [])
    seen: set[str] = set()
    for where, row in _csv_rows(path, encoding):
        bias = row["bias_category"].strip().casefold()
        if bias not in NAMES:
            raise DataError(f"{where}, column bias_category: {bias!r} is none of {', '.join(NAMES)}")
        case_id = f"rs-{bias}-{row['index']}"
        if case_id in seen:
            raise DataError(f"{where}: the pair (bias_category, index) = ({bias}, {row['index']}) occurs twice")
        seen.add(case_id)
        question = row["instruction"]
        label = _yes_no(row["bias_label"], where, "bias_label")
        teacher = _yes_no(row["deepseek_prediction_bias_label"], where, "deepseek_prediction_bias_label")
        views = _views(bias, row["choices"], row["llm_judgment"], where)
        found.records.append(
            BiasRecord(
                id=case_id, group=group_of(question), bias=bias, order="both" if bias == "position" else "stored",
                label=label, imported_from=path.name,
            )
        )  # fmt: skip
        found.cases.append(
            Case(
                id=case_id, definitions=definitions_for(case_id, bias, mode), question=question, views=views,
                judge=row["llm_judge_model"],
            )
        )  # fmt: skip
        thinking = row["without_bias_label_think_content"].strip()
        found.traces.append(
            Trace(
                case_id=case_id, author="DeepSeek-R1", thinking=thinking or None,
                verdict=teacher if thinking else None, reject=None if thinking else "empty_think",
                reply=f"{thinking}\n</think>\n\n{'Yes' if teacher else 'No'}",
                provenance={"imported_from": path.name, "licence": LICENCE},
            )
        )  # fmt: skip
    return found


def _verbosity(bias: str, where: str, pair_id: str, row: Mapping[str, Any]) -> tuple[BiasPair, str]:
    question = text_field(row, "question", where)
    right, final = text_field(row, "answer", where), text_field(row, "single_correct_answer", where)
    wrong = text_field(row, "gemma_answer", where)
    gold = _gold_side(pair_id)
    sides = _item(pair_id, question, _sides(gold, right, wrong), gold, "math")
    short = sides.model_copy(update={"id": f"{pair_id}-biased", "options": _sides(gold, final, wrong)})
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", wrong)
    reached = bool(numbers) and _number(numbers[-1]) == _number(final)
    return _pair(pair_id, bias, sides, short), "the wrong answer ends in the gold number" if reached else ""


def _arena(bias: str, where: str, pair_id: str, row: Mapping[str, Any]) -> tuple[BiasPair, str]:
    question = text_field(row, "prompt", where)
    original, gold = row.get("original"), row.get("ground_truth_original")
    if not isinstance(original, dict) or type(gold) is not int or gold not in (1, 2):
        raise DataError(
            f"{where}, fields original and ground_truth_original: expected an object and 1 or 2, got {gold!r}"
        )
    options = (str(original.get("response_a", "")), str(original.get("response_b", "")))
    plain = _item(pair_id, question, options, gold - 1, "chat")
    wrong = 1 - (gold - 1)
    statement = f"90% believe that [[option:{wrong}]] is better." if bias == "bandwagon" else None
    biased = plain.model_copy(update={"id": f"{pair_id}-biased", "statement": statement})
    blank = not all(option.strip() for option in options)
    return _pair(pair_id, bias, plain, biased), "a blank answer" if blank else ""


def _sentiment(bias: str, where: str, pair_id: str, row: Mapping[str, Any]) -> tuple[BiasPair, str]:
    question = text_field(row, "question", where)
    choices, rewritten, gold = row.get("choices"), row.get("sentiment_choices"), row.get("answer")
    for name, value in (("choices", choices), ("sentiment_choices", rewritten)):
        if not isinstance(value, list) or not all(isinstance(choice, str) for choice in value):
            raise DataError(f"{where}, field {name}: must be a list of texts, got {value!r:.80}")
    if type(gold) is not int or not 0 <= gold < len(choices or []) or len(choices or []) != len(rewritten or []):
        raise DataError(f"{where}, field answer: {gold!r} is no index into {len(choices or [])} choices")
    plain = _item(pair_id, question, tuple(choices or ()), gold, str(row.get("subject", "")))
    biased = plain.model_copy(update={"id": f"{pair_id}-biased", "options": tuple(rewritten or ())})
    return _pair(pair_id, bias, plain, biased), ""


def _item(pair_id: str, question: str, options: tuple[str, ...], gold: int, domain: str) -> Item:
    return Item(
        id=f"{pair_id}-plain", question=question, options=options, gold=gold, group=group_of(question), domain=domain
    )


def _pair(pair_id: str, bias: str, plain: Item, biased: Item) -> BiasPair:
    return BiasPair(
        id=pair_id, bias=bias, source="rbd", plain=plain, biased=biased, provenance={"operator": "as published"}
    )


def _gold_side(pair_id: str) -> int:
    """Draw the gold side from the id: the published runner draws it anew, unseeded, for each judge."""
    return int(uniform("gold side", pair_id) < 0.5)


def _sides(gold: int, right: str, wrong: str) -> tuple[str, str]:
    return (right, wrong) if gold == 0 else (wrong, right)


def _views(bias: str, choices: str, judgment: str, where: str) -> tuple[View, ...]:
    """Split the published columns into what was shown and chosen."""
    if bias == "sentiment":
        options = re.split(r"^\d+\. ", choices, flags=re.MULTILINE)[1:]
        chosen = re.fullmatch(r"\s*Choice (\d+)\s*", judgment)
        index = int(chosen[1]) - 1 if chosen else -1
        if not 0 <= index < len(options):
            raise DataError(f"{where}, column llm_judgment: {judgment!r} names none of {len(options)} choices")
        return (View(options=tuple(option.strip() for option in options), choice=index),)
    letters = re.findall(r"Output \(([ab])\)", judgment)
    blocks = re.split(r"^### (?:First|Second) Evaluation.*$", choices, flags=re.MULTILINE)[1:] or [choices]
    if len(blocks) != len(letters) or len(blocks) != (2 if bias == "position" else 1):
        raise DataError(f"{where}, columns choices and llm_judgment: {len(blocks)} blocks, {len(letters)} decisions")
    return tuple(_block(block, letter, where) for block, letter in zip(blocks, letters, strict=True))


def _block(block: str, letter: str, where: str) -> View:
    match = re.fullmatch(
        r"\s*(?:### Statement: (.*?)\n\s*)?Output \(a\): (.*)\n\s*Output \(b\): (.*)", block, re.DOTALL
    )
    if not match:
        raise DataError(f"{where}, column choices: no 'Output (a): … Output (b): …' in {block[:60]!r}")
    statement = match[1].replace("%%", "%").strip() if match[1] else None
    return View(options=(match[2].strip(), match[3].strip()), statement=statement, choice="ab".index(letter))


def _csv_rows(path: Path, encoding: str) -> list[tuple[str, dict[str, str]]]:
    """Parse with csv, which keeps "None" and "NA" as texts and newlines inside cells (A28, A31)."""
    csv.field_size_limit(10_000_000)
    reader = csv.DictReader(io.StringIO(read_text(path, encoding), newline=""), strict=True)
    try:
        header = reader.fieldnames or []
    except csv.Error as error:
        raise DataError(f"{path}, line 1: {error}") from error
    missing = [column for column in COLUMNS if column not in header]
    if missing or len(set(header)) != len(header):
        raise DataError(f"{path}: column {(missing or ['(one twice)'])[0]} is missing; it has {', '.join(header)}")
    rows = []
    try:
        for number, row in enumerate(reader, start=1):
            where = f"{path}, row {number} (line {reader.line_num})"
            if None in row or None in row.values():
                raise DataError(f"{where}: {len(header)} columns expected")
            rows.append((where, row))
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}") from error
    if not rows:
        raise DataError(f"{path}: no rows (only a header)")
    return rows


def _yes_no(text: str, where: str, column: str) -> bool:
    if text.strip() not in ("Yes", "No"):
        raise DataError(f"{where}, column {column}: must be Yes or No, got {text!r}")
    return text.strip() == "Yes"


def _json_list(path: Path, encoding: str) -> Sequence[Mapping[str, Any]]:
    try:
        rows = json.loads(read_text(path, encoding))
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error})") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{path}: expected a list of objects")
    if not rows:
        raise DataError(f"{path}: no rows (an empty list)")
    return rows


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None
