"""Checkpoints: whole or absent, and only loaded where they fit the run that asks."""

import contextlib
import json
import os
import re
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rbd_train.errors import DataError, UsageError
from rbd_train.store import write_json

SEAL = "whole.json"  # lists every file with its size; the last thing written


def seal(folder: Path, facts: Mapping[str, Any]) -> None:
    """Make a checkpoint's files durable and list them."""
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    for path in files.values():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    write_json(folder / SEAL, {**facts, "files": {name: path.stat().st_size for name, path in files.items()}})


def fault_of(folder: Path) -> str:
    """Say why a checkpoint can't be used; empty where it is whole."""
    try:
        listed = json.loads((folder / SEAL).read_text(encoding="utf-8"))["files"]
    except FileNotFoundError:
        return f"{SEAL} is missing: it was not written to its end"
    except (OSError, ValueError, KeyError):
        return f"{SEAL} can't be read"
    for name, size in listed.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, {size} were written"
        if not opens(path):
            return f"{name} has all its bytes, but can't be read"
    return ""


def opens(path: Path) -> bool:
    """Tell whether a tensor file has a table of contents; nothing is loaded, and nothing unpickled."""
    from safetensors import SafetensorError, safe_open

    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt"):
                pass
        elif path.suffix in (".pt", ".pth"):
            zipfile.ZipFile(path).close()
    except (OSError, SafetensorError, zipfile.BadZipFile):
        return False
    return True


def numbered(folder: Path) -> dict[int, Path]:
    """Return the checkpoints of a folder by their step; other folders there, such as somebody's copy, are none."""
    found = ((re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in folder.glob("checkpoint-*"))
    return {int(match[1]): path for match, path in found if match}


class Newest(NamedTuple):
    """The newest whole checkpoint, and what was passed over for it."""

    folder: Path | None
    passed_over: list[str]


def newest_whole(folder: Path) -> Newest:
    """Find the checkpoint to continue from; damaged ones are named, never used."""
    passed: list[str] = []
    for _, path in sorted(numbered(folder).items(), reverse=True):
        fault = fault_of(path)
        if not fault:
            return Newest(path, passed)
        passed.append(f"{path}: {fault}")
    return Newest(None, passed)


def check_fits(folder: Path, facts: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that this launch can't load (A43).

    Weights and optimizer of one process or of ddp are whole on every rank, so any number of processes may go on;
    shards belong to their number of ranks.

    Raises:
        UsageError: says how it was written and how to go on.
    """
    told = json.loads((folder / SEAL).read_text(encoding="utf-8"))
    was, now = (told["sharding"], told["processes"]), (facts["sharding"], facts["processes"])
    if was == now or (not was[0] and not now[0]):
        return
    names = [f"{sharding or 'one process or ddp'} (processes={processes})" for sharding, processes in (was, now)]
    way = f"launch={was[0]} processes={was[1]}" if was[0] else "launch=ddp, any number of processes, or without launch"
    raise UsageError(
        f"{folder} was written by {names[0]}, this is {names[1]}, which lays states out otherwise; go on with {way}, "
        f"or remove {folder.parent} to start anew"
    )


def discard_older(folder: Path, name: str) -> None:
    """Remove all checkpoints but one, now that it is whole."""
    for path in numbered(folder).values():
        if path.name != name:
            shutil.rmtree(path, ignore_errors=True)
    shutil.rmtree(folder / "part", ignore_errors=True)


def check_loads(folder: Path) -> None:
    """Open every tensor file of a checkpoint once.

    Raises:
        DataError: a file can't be read back.
    """
    import torch
    from safetensors import safe_open

    for path in sorted(folder.rglob("*")):
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, framework="pt") as tensors:
                    for name in tensors.keys():  # noqa: SIM118
                        tensors.get_slice(name).get_shape()
            elif path.suffix in (".pt", ".pth"):
                torch.load(path, map_location="cpu", weights_only=False, mmap=True)  # our own file, of this minute
        except Exception as error:
            raise DataError(f"{path} was written, but can't be read back: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def saving(folder: Path, step: int) -> Iterator[None]:
    """Turn a failed write into an error that says what still stands.

    Raises:
        DataError: the disk is full, a quota is reached, the folder is gone.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        kept = newest_whole(folder).folder
        still = f"{kept} is whole: the same command continues from it" if kept else "no earlier checkpoint exists"
        shutil.rmtree(folder / "part", ignore_errors=True)
        told = str(error).strip().split("\n", 1)[0][:200]
        if not isinstance(error, OSError):  # torch and safetensors don't say what hindered them
            told = f"{told}; most often the disk is full, or a quota is reached"
        raise DataError(f"{folder}: the checkpoint of step {step} can't be written ({told}); {still}") from error
