"""Questions from GSM8K's own files, and from plain rows of one's own."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from rbd_train.errors import DataError, UsageError
from rbd_train.records import Question, group_of
from rbd_train.sources import Loaded
from rbd_train.store import numbered_lines, read_text, unique


@dataclass
class Gsm8kSource:
    """GSM8K (question, answer ending in "#### number"); wrong answers come from a weak engine."""

    path: str  # test.jsonl or train.jsonl of GSM8K
    split: str | None = None  # train or test for every row; null: drawn by question in curate
    encoding: str = "utf-8"  # of the file

    def load(self, seed: int) -> Loaded:
        """Read the file."""
        questions: list[Question] = []
        for where, row in rows_of(Path(self.path), self.encoding):
            question, answer = text_field(row, "question", where), text_field(row, "answer", where)
            if "####" not in answer:
                raise DataError(f"{where}, field answer: no '#### number' at its end; is this a GSM8K file?")
            working, _, final = answer.rpartition("####")
            if not final.strip():
                raise DataError(f"{where}, field answer: nothing after '####'")
            questions.append(
                Question(
                    id=f"gsm8k-{len(questions)}", group=group_of(question), question=question,
                    right=f"{working.strip()}\n#### {final.strip()}", final=final.strip(), split=_split(self.split),
                    domain="math",
                )
            )  # fmt: skip
        return Loaded(questions, [], {}, "MIT", [self.path])


@dataclass
class JsonlSource:
    """Plain rows: question, right, and optionally final (default: right's last line), wrong, id, domain, split."""

    path: str  # .jsonl, .json, .csv or .parquet, or hub:<owner>/<name>
    licence: str = "unknown"  # of the data, as its owner states it; never guessed
    split: str | None = None  # train or test for every row; null: drawn by question in curate
    columns: dict[str, str | None] = field(default_factory=dict)  # what a field is called here, as columns.right=answer
    hub_split: str = "train"  # split of a hub data set
    encoding: str = "utf-8"  # of the file

    def load(self, seed: int) -> Loaded:
        """Read the rows; with `columns` named, others may stand beside them."""
        from rbd_train.sources.table import table_rows

        known = ("question", "right", "final", "wrong", "id", "domain", "split")
        columns = {name: column for name, column in self.columns.items() if column is not None}
        table = self.path.startswith("hub:") or Path(self.path).suffix.lower() in (".json", ".csv", ".parquet")
        rows = (
            table_rows(self.path, self.hub_split, self.encoding) if table else rows_of(Path(self.path), self.encoding)
        )
        for name, column in columns.items():
            if rows and not any(column in row for _, row in rows):
                had = ", ".join(map(str, rows[0][1]))
                raise DataError(f"{self.path}: source.columns.{name} is {column!r}, which no row has; it has {had}")
        questions = []
        path = Path(self.path)
        for number, (where, whole) in enumerate(rows):
            extra = sorted(set(whole) - set(known)) if not columns else []
            if extra:
                raise DataError(
                    f"{where}, field {extra[0]}: unknown; a row holds {', '.join(known)}, or source.columns says how "
                    "they are called"
                )
            names = {name: columns.get(name, name) for name in known}
            empty = (None, "") if table else ()  # a cell of a table is always there
            given = {n: column for n, column in names.items() if column in whole and whole[column] not in empty}
            question, right = (text_field(whole, names[name], where) for name in ("question", "right"))
            texts = {
                name: text_field(whole, given[name], where)
                for name in ("final", "wrong", "id", "domain")
                if name in given
            }
            split = _row_split(whole[given["split"]], where) if "split" in given else _split(self.split)
            questions.append(
                Question(
                    id=texts.get("id", f"{path.stem}-{number}"), group=group_of(question),
                    question=question, right=right, final=texts.get("final", right.strip().splitlines()[-1]),
                    wrong=texts.get("wrong"), split=split, domain=texts.get("domain", ""),
                )
            )  # fmt: skip
        files = [] if self.path.startswith("hub:") else [self.path]
        return Loaded(list(unique(questions, "id", self.path)), [], {}, self.licence, files)


def rows_of(path: Path, encoding: str = "utf-8") -> list[tuple[str, Mapping[str, Any]]]:
    """Return (where, object) per line.

    Raises:
        DataError: a line that is no JSON object; names file and line.
    """
    rows: list[tuple[str, Mapping[str, Any]]] = []
    for number, line in numbered_lines(read_text(path, encoding)):
        where = f"{path}, line {number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not JSON ({error})") from error
        if not isinstance(value, dict):
            raise DataError(f"{where}: expected an object, got {type(value).__name__}")
        rows.append((where, value))
    return rows


def text_field(row: Mapping[str, Any], name: str, where: str) -> str:
    """Return a field that must be text.

    Raises:
        DataError: it is missing, of another type, or blank.
    """
    if name not in row:
        raise DataError(f"{where}, field {name}: missing; the row has {', '.join(map(str, row)) or 'no fields'}")
    value = row[name]
    if not isinstance(value, str):
        _wrong_type(where, name, value)
    if not value.strip():
        raise DataError(f"{where}, field {name}: blank")
    if re.search("[\ud800-\udfff]", value):
        raise DataError(f"{where}, field {name}: half a surrogate pair, which is no text: {value!r:.60}")
    return value


def _wrong_type(where: str, name: str, value: Any) -> NoReturn:
    raise DataError(f"{where}, field {name}: must be text, got {value!r} ({type(value).__name__})")


def _row_split(value: Any, where: str) -> Any:
    if value not in (None, "train", "test"):
        raise DataError(f"{where}, field split: must be train, test or null, got {value!r}")
    return value


def _split(value: Any) -> Any:
    if value not in (None, "train", "test"):
        raise UsageError(f"split is {value!r}; choose train, test or null")
    return value
