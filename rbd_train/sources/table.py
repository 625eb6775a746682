"""Rows from JSON, JSON lines, CSV, Parquet or a hub data set, as plain objects that know where they stand."""

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rbd_train.errors import DataError
from rbd_train.sources.jsonl import rows_of
from rbd_train.store import read_text

Rows = list[tuple[str, Mapping[str, Any]]]


def table_rows(path: str, split: str = "test", encoding: str = "utf-8") -> Rows:
    """Read `.json` (a list, or an object of lists), `.jsonl`, `.csv`, `.parquet`, or `hub:<owner>/<name>`.

    Words such as None and NA stay text, and newlines inside CSV cells stay (A28, A31).

    Raises:
        DataError: the file is missing, empty, or not what its ending says; names file and row.
    """
    if path.startswith("hub:"):
        return _hub(path.removeprefix("hub:"), split)
    file = Path(path)
    readers: dict[str, Callable[[Path, str], Rows]] = {
        ".json": _json,
        ".jsonl": rows_of,
        ".csv": _csv,
        ".parquet": _parquet,
    }
    if file.suffix.lower() not in readers:
        raise DataError(f"{path}: can't tell what this is; known endings are {', '.join(readers)}, and hub:owner/name")
    rows = readers[file.suffix.lower()](file, encoding)
    if not rows:
        raise DataError(f"{path}: no rows")
    return rows


def _json(file: Path, encoding: str) -> Rows:
    try:
        value = json.loads(read_text(file, encoding))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: not JSON ({error})") from error
    rows = list(_listed(value))
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"{file}, row {number}: expected an object, got {type(row).__name__}")
    return [(f"{file}, row {number}", row) for number, row in enumerate(rows)]


def _listed(value: Any) -> Iterator[Any]:
    """Yield the rows of a list, of JUDGE-BENCH's `instances`, or of an object of lists (EvalBiasBench)."""
    if isinstance(value, dict) and isinstance(value.get("instances"), list):
        yield from value["instances"]
    elif isinstance(value, dict):
        for name, part in value.items():
            for row in part if isinstance(part, list) else ():
                yield {"bias": name, **row} if isinstance(row, dict) else row
    elif isinstance(value, list):
        yield from value


def _csv(file: Path, encoding: str) -> Rows:
    csv.field_size_limit(10_000_000)
    reader = csv.DictReader(io.StringIO(read_text(file, encoding), newline=""), strict=True)
    try:
        header = reader.fieldnames or []
        if len(set(header)) != len(header):
            raise DataError(f"{file}: a column occurs twice in {', '.join(header)}")
        rows: Rows = [(f"{file}, row {number} (line {reader.line_num})", row) for number, row in enumerate(reader)]
    except csv.Error as error:
        raise DataError(f"{file}, line {reader.line_num}: {error}") from error
    for where, row in rows:
        if None in row or None in row.values():
            raise DataError(f"{where}: {len(header)} columns expected")
    return rows


def _parquet(file: Path, encoding: str) -> Rows:
    import pyarrow
    import pyarrow.parquet

    if not file.is_file():
        raise DataError(f"{file}: {'a folder; name a file in it' if file.is_dir() else 'no such file'}")
    try:
        rows = pyarrow.parquet.read_table(file).to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(f"{file}: not Parquet ({error})") from error
    return [(f"{file}, row {number}", row) for number, row in enumerate(rows)]


def _hub(name: str, split: str) -> Rows:
    import datasets

    try:
        rows = datasets.load_dataset(name, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"hub:{name}, split {split}: {str(error).splitlines()[0]}") from error
    return [(f"hub:{name}, row {number}", dict(row)) for number, row in enumerate(rows)]
