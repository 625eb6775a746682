"""Keep a finished stage's files aside while the stage runs again, and bring them back where it fails.

A typing error in a path must not cost a trained model: what stood there goes when the stage is complete again.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rbd_train.store import write_json

FOLDER = ".previous"
MOVING = ".previous.part"  # the same folder before all files are in it
WRITTEN = ".written"  # in it: what was written since, by name, of a killed run too


def set_aside(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Move a complete stage's outputs aside; killed in the middle, `finish_moving` goes on."""
    discard(folder)
    part = folder / MOVING
    part.mkdir()
    for name in ("config.yaml", "tables.json", "metrics.json"):
        if (folder / name).is_file():
            shutil.copyfile(folder / name, part / name)
    write_json(part / "manifest.json", manifest)
    write_json(folder / "manifest.json", {**manifest, "status": "incomplete"})
    _move(folder, manifest["outputs"])


def finish_moving(folder: Path, manifest: Mapping[str, Any] | None) -> None:
    """Move the rest of what a killed `set_aside` began to move: nothing was written since."""
    if not (folder / MOVING).is_dir():
        return
    if manifest is not None and manifest["status"] == "incomplete":
        _move(folder, manifest["outputs"])
    else:  # killed before the first move
        shutil.rmtree(folder / MOVING)


def note_written(folder: Path, name: str) -> None:
    """Remember that something was written since; what stands there then is no old file."""
    if (folder / FOLDER).is_dir():
        with (folder / FOLDER / WRITTEN).open("a", encoding="utf-8") as file:
            file.write(f"{name}\n")


def bring_back(folder: Path) -> bool:
    """Move what was set aside back, the manifest last, in the place of what was written since; False: there is none."""
    aside = folder / FOLDER
    if not (aside / "manifest.json").is_file():
        return False
    written = aside / WRITTEN
    for name in written.read_text(encoding="utf-8").splitlines() if written.is_file() else ():
        _remove(folder / name)
    written.unlink(missing_ok=True)
    for path in sorted(aside.iterdir(), key=lambda path: path.name == "manifest.json"):
        _remove(folder / path.name)
        path.rename(folder / path.name)
    aside.rmdir()
    return True


def discard(folder: Path) -> None:
    """Remove what was set aside."""
    shutil.rmtree(folder / MOVING, ignore_errors=True)
    shutil.rmtree(folder / FOLDER, ignore_errors=True)


def _move(folder: Path, names: Sequence[str] | Mapping[str, Any]) -> None:
    part = folder / MOVING
    for name in names:
        if (folder / name).exists():
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).rename(part / name)
    part.rename(folder / FOLDER)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
