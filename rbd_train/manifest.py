"""What a stage's `manifest.json` says: its settings as they are compared, and the code and machine that it ran on."""

import contextlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from rbd_train.errors import DataError

PACKAGES = ("torch", "transformers", "trl", "accelerate", "deepspeed", "datasets", "pydantic", "hydra-core")


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Read a stage's manifest; None where there is none."""
    path = folder / "manifest.json"
    if not path.is_file():
        return None
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: not a manifest ({error}); remove the folder to start that stage anew") from error
    if not isinstance(manifest, dict) or "status" not in manifest:
        raise DataError(f"{path}: not a manifest (no status in it); remove the folder to start that stage anew")
    return manifest


# of an engine: how fast and for how much it is asked, which changes no reply
_PACE = ("concurrency", "timeout_s", "deadline_s", "backoff_s", "requests_per_minute", "tokens_per_minute", "price_in",
         "price_out", "budget_usd")  # fmt: skip
_NO_RESULT = ("overwrite", "debug", "wandb", "root", "launch", "processes", "dry_run")


def hashed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what doesn't change results."""
    return {k: v for k, v in config.items() if k not in _NO_RESULT}


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the dotted keys whose change makes other results: a manifest's config against a config."""
    old, new = flat(before), flat(hashed(now))
    changed = [key for key, value in new.items() if old.get(key) != value] + [key for key in old if key not in new]
    return [key for key in changed if key.rpartition(".")[2] not in _PACE]


def flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested keys to dotted ones."""
    rows: dict[str, Any] = {}
    for key, entry in value.items():
        if isinstance(entry, Mapping) and entry:
            rows |= flat(entry, f"{prefix}{key}.")
        else:
            rows[f"{prefix}{key}"] = entry
    return rows


def code_version() -> dict[str, Any]:
    """Return version, git commit and dirtiness of the code; the commit is None outside a checkout."""

    def git(*words: str) -> str | None:
        here = Path(__file__).parent
        done = subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    # a wheel inside some other checkout isn't ours
    tracked = git("ls-files", "--error-unmatch", "manifest.py") is not None
    from rbd_train import __version__

    dirty = git("status", "--porcelain", "--untracked-files=no") if tracked else None
    return {
        "version": __version__, "commit": git("rev-parse", "HEAD") if tracked else None,
        "dirty": bool(dirty) if tracked else None,
    }  # fmt: skip


def versions() -> dict[str, str]:
    """Return the versions that a result may depend on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def machine() -> dict[str, Any]:
    """Return what a result's seconds depend on, and no name of a host or a person."""
    torch = sys.modules.get("torch")  # a stage that has not loaded it computes nothing on a GPU
    cuda = torch is not None and torch.cuda.is_available()
    return {
        "platform": f"{platform.system()} {platform.machine()}", "cores": os.cpu_count(),
        "device": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if torch and cuda else "CPU",
    }  # fmt: skip
