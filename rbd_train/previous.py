"""Keep a finished stage's files aside while the stage runs again, and bring them back where it fails.

A typing error in a path must not cost a trained model: what stood there goes when the stage is complete again.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rbd_train.store import write_json

FOLDER = ".previous"


def set_aside(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Move a complete stage's outputs aside; killed in the middle, the stage is incomplete and holds no mixture."""
    aside = folder / FOLDER
    discard(folder)
    aside.mkdir()
    for name in ("config.yaml", "tables.json", "metrics.json"):
        if (folder / name).is_file():
            shutil.copyfile(folder / name, aside / name)
    write_json(aside / "manifest.json", manifest)
    write_json(folder / "manifest.json", {**manifest, "status": "incomplete"})
    for name in manifest["outputs"]:
        if (folder / name).exists():
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).rename(aside / name)


def bring_back(folder: Path, written: Sequence[str]) -> bool:
    """Move what was set aside back, the manifest last, in the place of what was written since; False: there is none."""
    aside = folder / FOLDER
    if not (aside / "manifest.json").is_file():
        return False
    for name in written:
        _remove(folder / name)
    for path in sorted(aside.iterdir(), key=lambda path: path.name == "manifest.json"):
        _remove(folder / path.name)
        path.rename(folder / path.name)
    aside.rmdir()
    return True


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def discard(folder: Path) -> None:
    """Remove what was set aside."""
    shutil.rmtree(folder / FOLDER, ignore_errors=True)
