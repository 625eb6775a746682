"""Texts with people's scores: SummEval, Newsroom, BiGGen-Bench, Feedback-Collection, and plain JSON lines.

A file is a JSON list or JSON lines; without one a set is read from the hub by the `datasets` library. A row without a
human score is kept: it is scored, and counted as missing where scores are compared.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rbd_train.errors import DataError, UsageError
from rbd_train.records import Graded, group_of
from rbd_train.sources import Loaded
from rbd_train.sources.jsonl import rows_of, text_field
from rbd_train.store import read_text, unique

Rows = Sequence[tuple[str, Mapping[str, Any]]]
SUMMARY = re.compile(r"^#+ Generated Summary\s*$(.*?)^#+ Source Article\s*$(.*)", re.MULTILINE | re.DOTALL)


@dataclass
class SummEvalSource:
    """SummEval: summaries by 16 systems with expert scores from 1 to 5 (means of three, in thirds)."""

    path: str | None = None  # a list of {doc_id, system_id, source, system_output, scores}; null: from the hub
    hub: str = "mteb/summeval"  # data set on the hub, one row per document
    split: str = "test"  # of the hub's data set
    dimensions: list[str] = field(default_factory=lambda: ["coherence", "consistency", "fluency", "relevance"])
    encoding: str = "utf-8"  # of the file

    def load(self, seed: int) -> Loaded:
        """Read it."""
        rows = _file(self.path, self.encoding) if self.path else _by_summary(_hub(self.hub, self.split))
        found = []
        for where, row in rows:
            document, text = text_field(row, "source", where), text_field(row, "system_output", where)
            name, system = text_field(row, "doc_id", where), text_field(row, "system_id", where)
            scores = row.get("scores")
            if not isinstance(scores, Mapping):
                raise DataError(f"{where}, field scores: must be an object, got {scores!r:.60}")
            found += [
                Graded(
                    id=f"{name}-{system}-{dimension}", group=name, document=document, text=text, dimension=dimension,
                    human=_score(scores, dimension, where, 1, 5), author=system,
                )
                for dimension in self.dimensions
            ]  # fmt: skip
        return _loaded(found, "MIT", self.path or self.hub, self.path)


@dataclass
class NewsroomSource:
    """Newsroom as in JUDGE-BENCH: 7 systems' summaries per article, means of three crowd raters from 1 to 5."""

    path: str  # newsroom.json of dmg-illc/JUDGE-BENCH
    dimensions: list[str] = field(default_factory=lambda: ["informativeness", "relevance", "fluency", "coherence"])
    encoding: str = "utf-8"  # of the file

    def load(self, seed: int) -> Loaded:
        """Read it; the system isn't stored, so that the order within an article names it."""
        try:
            rows = json.loads(read_text(Path(self.path), self.encoding))["instances"]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{self.path}: no JUDGE-BENCH file, which is an object with instances ({error})") from error
        found, seen = list[Graded](), Counter[str]()
        for number, row in enumerate(rows):
            where = f"{self.path}, instance {number}"
            parts = SUMMARY.search(text_field(row, "instance", where))
            if parts is None:
                raise DataError(f"{where}, field instance: no headings 'Generated Summary' and 'Source Article' in it")
            text, document = parts[1].strip(), parts[2].strip()
            group = group_of(document)
            given = {str(key).casefold(): value for key, value in dict(row.get("annotations", {})).items()}
            for dimension in self.dimensions:
                rating = given.get(dimension.casefold())
                human = _score(rating, "mean_human", f"{where}, {dimension}", 1, 5) if rating is not None else None
                found.append(
                    Graded(
                        id=f"newsroom-{row.get('id', number)}-{dimension}", group=group, document=document, text=text,
                        dimension=dimension, human=human, author=f"system {seen[group]}",
                    )
                )  # fmt: skip
            seen[group] += 1
        return _loaded(found, "Apache-2.0", self.path, self.path)


@dataclass
class BiggenSource:
    """BiGGen-Bench: replies with a five-level rubric, a reference answer and human scores from 1 to 5."""

    path: str | None = None  # JSON list or lines in the hub's columns; null: from the hub
    hub: str = "prometheus-eval/BiGGen-Bench-Results"  # data set on the hub
    split: str = "human_eval"  # of the hub's data set
    encoding: str = "utf-8"  # of the file

    def load(self, seed: int) -> Loaded:
        """Read it."""
        found = []
        for number, (where, row) in enumerate(
            _file(self.path, self.encoding) if self.path else _hub(self.hub, self.split)
        ):
            rubric = row.get("score_rubric")
            if not isinstance(rubric, Mapping):
                raise DataError(f"{where}, field score_rubric: must be an object, got {rubric!r:.60}")
            name = f"{row.get('id', number)}-{row.get('model_name', number)}"
            found.append(_rubric_item(row, rubric, name, where, "", "input", "response", "human_score"))
        return _loaded(found, "as its card states", self.path or self.hub, self.path)


@dataclass
class FeedbackSource:
    """Feedback-Collection: replies with a rubric; its scores are GPT-4's, not people's."""

    path: str | None = None  # JSON list or lines in the hub's columns; null: from the hub
    hub: str = "prometheus-eval/Feedback-Collection"  # data set on the hub
    split: str = "train"  # of the hub's data set
    encoding: str = "utf-8"  # of the file

    def load(self, seed: int) -> Loaded:
        """Read it."""
        rows = _file(self.path, self.encoding) if self.path else _hub(self.hub, self.split)
        found = [
            _rubric_item(row, row, str(number), where, "orig_", "instruction", "response", "score")
            for number, (where, row) in enumerate(rows)
        ]
        return _loaded(found, "as its card states", self.path or self.hub, self.path)


@dataclass
class GradedSource:
    """Plain JSON lines: document, text; optionally human, dimension, criteria, reference, id, group, author."""

    path: str  # the file
    low: int = 1  # lowest score that people could give
    high: int = 5  # highest score that people could give
    licence: str = "unknown"  # of the data, as its owner states it; never guessed
    encoding: str = "utf-8"  # of the file

    def load(self, seed: int) -> Loaded:
        """Read the file."""
        if self.low >= self.high:
            raise UsageError(
                f"source.low={self.low} and source.high={self.high}: the scale holds fewer than two scores"
            )
        known = {"document", "text", "human", "dimension", "criteria", "reference", "id", "group", "author"}
        found = []
        for number, (where, row) in enumerate(rows_of(Path(self.path), self.encoding)):
            extra = sorted(set(row) - known)
            if extra:
                raise DataError(f"{where}, field {extra[0]}: unknown; a row holds {', '.join(sorted(known))}")
            texts = {name: text_field(row, name, where) for name in known & set(row) - {"human"}}
            document = text_field(row, "document", where)
            human = _score(row, "human", where, self.low, self.high)
            given = {"id": f"{Path(self.path).stem}-{number}", "group": group_of(document), "dimension": "quality"}
            text_field(row, "text", where)
            found.append(Graded.model_validate({**given, **texts, "human": human, "low": self.low, "high": self.high}))
        return _loaded(found, self.licence, self.path, self.path)


def _rubric_item(
    row: Mapping[str, Any], rubric: Mapping[str, Any], name: str, where: str, prefix: str, asked: str, reply: str,
    score: str,
) -> Graded:  # fmt: skip
    document = text_field(row, f"{prefix}{asked}", where)
    reference = row.get(f"{prefix}reference_answer")
    return Graded(
        id=f"rubric-{name}", group=group_of(document), document=document,
        text=text_field(row, f"{prefix}{reply}", where), dimension="quality",
        criteria=text_field(rubric, f"{prefix}criteria", where),
        levels=tuple(text_field(rubric, f"{prefix}score{k}_description", where) for k in range(1, 6)),
        reference=reference if isinstance(reference, str) and reference.strip() else None,
        human=_score(row, f"{prefix}{score}", where, 1, 5), author=str(row.get("model_name", "")),
    )  # fmt: skip


def _score(row: Any, name: str, where: str, low: int, high: int) -> float | None:
    """Read a human score; None where it is missing or null.

    Raises:
        DataError: it is no number, or outside the range that people used.
    """
    value = row.get(name) if isinstance(row, Mapping) else row
    if value is None:
        return None
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if not low <= number <= high:
        raise DataError(f"{where}, field {name}: {value!r:.40} is no score from {low} to {high}")
    return number


def _file(path: str, encoding: str) -> Rows:
    text = read_text(Path(path), encoding)
    if not text.lstrip().startswith("["):
        return rows_of(Path(path), encoding)
    try:
        rows = json.loads(text)
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error})") from error
    wrong = next((k for k, row in enumerate(rows) if not isinstance(row, dict)), None)
    if wrong is not None or not rows:
        raise DataError(f"{path}: {'no rows' if wrong is None else f'row {wrong} is no object'}")
    return [(f"{path}, row {k}", row) for k, row in enumerate(rows)]


def _hub(name: str, split: str) -> Rows:
    from datasets import load_dataset

    try:
        rows = load_dataset(name, split=split)
    except (OSError, ValueError) as error:
        text = str(error).strip().split("\n", 1)[0]
        raise DataError(
            f"data set {name} can't be read from the hub ({text:.200}); name a file with source.path"
        ) from error
    return [(f"{name} ({split}), row {k}", row) for k, row in enumerate(rows)]


def _by_summary(rows: Rows) -> Rows:
    """Turn the hub's SummEval, a document per row, into one row per summary."""
    names = ("coherence", "consistency", "fluency", "relevance")
    return [
        (
            f"{where}, summary {k}",
            {"doc_id": row["id"], "system_id": f"M{k}", "source": row["text"], "system_output": text,
             "scores": {name: row[name][k] for name in names}},
        )
        for where, row in rows for k, text in enumerate(row["machine_summaries"])
    ]  # fmt: skip


def _loaded(found: list[Graded], licence: str, where: str, path: str | None) -> Loaded:
    return Loaded([], [], {}, licence, [path] if path else [], list(unique(found, "id", where)))
