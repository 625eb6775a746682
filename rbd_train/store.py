"""Typed JSON lines in and out: a file appears whole or not at all, and a bad row names file, line and field."""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from rbd_train.errors import DataError, UsageError

R = TypeVar("R")
Row = TypeVar("Row", bound=BaseModel)


def write_whole(path: Path, text: str | bytes | Iterable[str]) -> None:
    """Write a file so that a kill or a full disk leaves the old one or the new one, never a part.

    Args:
        path: the file.
        text: what goes in; parts are written as they come.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = (
        [text.encode() if isinstance(text, str) else text] if isinstance(text, str | bytes) else map(str.encode, text)
    )
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp gives 0600, which a shared run folder can't be read with
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # makes the rename itself durable
    finally:
        os.close(folder)


def write_rows(path: Path, rows: Iterable[BaseModel]) -> None:
    """Write records as JSON lines, whole or not at all."""
    write_whole(path, (row.model_dump_json(exclude_none=False) + "\n" for row in rows))


def write_json(path: Path, value: Any) -> None:
    """Write one JSON document, whole or not at all; NaN is refused."""
    write_whole(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """Read a text file.

    Raises:
        DataError: the file is missing, empty or not in that encoding.
        UsageError: there is no such encoding.
    """
    if not path.is_file():
        told = "a folder; name a file in it" if path.is_dir() else f"no such file{_sibling_hint(path)}"
        raise DataError(f"{path}: {told}")
    try:
        text = path.read_bytes().decode(encoding)
    except LookupError as error:
        raise UsageError(f"source.encoding is {encoding!r}, which Python doesn't know; for example utf-8") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: byte {error.start} ({error.object[error.start]:#04x}) is not {encoding}; "
            f"save the file as UTF-8 (for a source, source.encoding=latin-1 or the like reads it as it is)"
        ) from error
    if not text.strip():
        raise DataError(f"{path}: no rows (the file is empty)")
    return text.removeprefix("\ufeff")


def read_rows(path: Path, kind: type[Row], encoding: str = "utf-8") -> list[Row]:
    """Read JSON lines into records.

    Raises:
        DataError: the file is missing or empty, a row stands twice or is not of that kind; names file, line and field.
    """
    rows, seen = [], dict[str, int]()
    for number, line in numbered_lines(read_text(path, encoding)):
        if seen.setdefault(line, number) != number:
            raise DataError(
                f"{path}: lines {seen[line]} and {number} are the same row, which would count twice; remove one"
            )
        try:
            rows.append(kind.model_validate_json(line, strict=True))
            if "NaN" in line or "Infinity" in line:  # free-form fields would take them as numbers
                _refuse_constants(line, f"{path}, line {number}")
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"]) or "(row)"
            found = "" if first["type"] == "json_invalid" else f", got {_short(first.get('input'))}"
            raise DataError(
                f"{path}, line {number}, field {field}: {first['msg']}{found}; expected: {kind.__name__}"
            ) from error
    return rows


def numbered_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, line) of the non-blank lines; splits on newlines alone, as JSON lines do."""
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line


def digest(path: Path) -> str:
    """Return the sha256 of a file.

    Raises:
        DataError: there is no such file.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file{_sibling_hint(path)}")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def canonical(value: Any) -> str:
    """Return the one JSON text of a value, to hash it."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def fingerprint(value: Any) -> str:
    """Return the first 16 digits of the sha256 of a value's canonical JSON."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:16]


def unique(rows: Sequence[R], key: str, where: str) -> Sequence[R]:
    """Return the rows, or raise where two of them share a key."""
    seen: dict[Any, int] = {}
    for number, row in enumerate(rows, start=1):
        value = getattr(row, key)
        if value in seen:
            raise DataError(f"{where}: rows {seen[value]} and {number} share {key} {value!r}; ids must be unique")
        seen[value] = number
    return rows


def _refuse_constants(line: str, where: str) -> None:
    def refuse(constant: str) -> None:
        raise DataError(f"{where}: {constant} is not JSON")

    json.loads(line, parse_constant=refuse)


def _short(value: Any) -> str:
    text = repr(value)
    return f"{text[:60]}… ({type(value).__name__})" if len(text) > 60 else f"{text} ({type(value).__name__})"


def _sibling_hint(path: Path) -> str:
    if not path.parent.is_dir():
        return f" (there is no folder {path.parent})"
    others = sorted(p.name for p in path.parent.iterdir() if p.is_file() and not p.name.startswith("."))
    more = f" and {len(others) - 6} more" * (len(others) > 6)
    return f"; {path.parent} holds {', '.join(others[:6]) or 'no files'}{more}"
