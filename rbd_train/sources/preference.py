"""Preference sets: a question, two answers, which one is better (JudgeBench, RewardBench, JudgeBench-Pro, one's own).

Where the better answer stands in the file is no information: pairs draw the gold side from the id (A33).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rbd_train.errors import DataError
from rbd_train.prompts.rewrite import cut_ending
from rbd_train.records import Question, group_of
from rbd_train.sources import Loaded
from rbd_train.sources.jsonl import rows_of, text_field
from rbd_train.store import read_text, unique

LABELS = {"1": 0, "2": 1, "A>B": 0, "B>A": 1, "response1": 0, "response2": 1}
IDS = ("pair_id", "id")


@dataclass
class PreferenceSource:
    """Pairs in BiasScope's columns: question, response_A, response_B, label (1 or 2), optionally domain and an id."""

    path: str  # a .parquet, .jsonl or .csv file
    licence: str = "unknown"  # of the data, as its owner states it; never guessed
    encoding: str = "utf-8"  # of a text file

    def load(self, seed: int) -> Loaded:
        """Read the file; identical and blank answers are left out and counted, a repeated id gets its row number."""
        questions, left_out, seen = list[Question](), Counter[str](), Counter[str]()
        for number, (where, row) in enumerate(read_table(Path(self.path), self.encoding)):
            gold = _label(row, where)
            question = text_field(row, "question", where)
            answers = [row.get("response_A"), row.get("response_B")]
            if not all(isinstance(answer, str) and answer.strip() for answer in answers):
                left_out["a blank answer"] += 1
                continue
            right, wrong = str(answers[gold]), str(answers[1 - gold])
            if right.split() == wrong.split():
                left_out["identical answers"] += 1
                continue
            name = next((str(row[key]) for key in IDS if row.get(key) is not None), str(number))
            seen[name] += 1
            questions.append(
                Question(
                    id=f"{Path(self.path).stem}-{name}" + (f"-{number}" if seen[name] > 1 else ""),
                    group=group_of(question), question=question, right=right, final=cut_ending(right).ending.strip(),
                    wrong=wrong, domain=str(row.get("domain") or ""), meta={"label": gold + 1},
                )
            )  # fmt: skip
        if not questions:
            raise DataError(f"{self.path}: no usable pair; left out: {dict(left_out) or 'nothing'}")
        return Loaded(list(unique(questions, "id", self.path)), [], dict(left_out), self.licence, [self.path])


def label_balance(questions: Sequence[Question]) -> str:
    """Say which label the file gives; one label only means that whoever reads it unshuffled can't be wrong (A33)."""
    labels = Counter(question.meta.get("label") for question in questions)
    if set(labels) == {None}:
        return "the source stores no label"
    told = ", ".join(f"{label}: {count}" for label, count in sorted(labels.items(), key=str))
    one = "; one label only, so the file's order gives the answer away" if len(labels) == 1 else ""
    return f"label as stored {told}{one}; the gold side is drawn from the id"


def read_table(path: Path, encoding: str = "utf-8") -> list[tuple[str, Mapping[str, Any]]]:
    """Return (where, row) of a .parquet, .csv or .jsonl file.

    Raises:
        DataError: the file is missing, empty or of another kind.
    """
    if path.suffix == ".parquet":
        return _parquet(path)
    if path.suffix == ".csv":
        import csv
        import io

        csv.field_size_limit(10_000_000)
        reader = csv.DictReader(io.StringIO(read_text(path, encoding), newline=""), strict=True)
        try:
            rows = [(f"{path}, row {n} (line {reader.line_num})", row) for n, row in enumerate(reader, start=1)]
        except csv.Error as error:
            raise DataError(f"{path}, line {reader.line_num}: {error}") from error
    elif path.suffix in (".jsonl", ".json"):
        rows = list(rows_of(path, encoding))  # type: ignore[arg-type]
    else:
        raise DataError(f"{path}: a preference set is a .parquet, .csv or .jsonl file")
    if not rows:
        raise DataError(f"{path}: no rows")
    return rows  # type: ignore[return-value]


def _parquet(path: Path) -> list[tuple[str, Mapping[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    if not path.is_file():
        raise DataError(f"{path}: no such file")
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a parquet file ({str(error).splitlines()[0]})") from error
    if not rows:
        raise DataError(f"{path}: no rows")
    return [(f"{path}, row {number}", row) for number, row in enumerate(rows)]


def _label(row: Mapping[str, Any], where: str) -> int:
    if "label" not in row:
        raise DataError(f"{where}, field label: missing; the row has {', '.join(map(str, row)) or 'no fields'}")
    value = str(row["label"]).strip()
    if isinstance(row["label"], bool) or value not in LABELS:
        raise DataError(f"{where}, field label: must be 1 or 2 (or A>B, B>A), got {row['label']!r}")
    return LABELS[value]
