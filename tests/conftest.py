"""Fixtures: a run root of its own, the tiny model, the real command in this process, no sockets but loopback."""

import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rbd_train.app import main

os.environ.setdefault("WANDB_MODE", "offline")
os.environ["HF_HUB_OFFLINE"] = "1"


class Said(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def _loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail any test that reaches beyond this machine."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and str(address[0]) not in ("127.0.0.1", "::1", "localhost"):
            raise AssertionError(f"a test tried to reach {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


@pytest.fixture
def rbd(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Said]:
    """Run `rbd <words>` in this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Said:
        capfd.readouterr()
        code = main(list(words))
        if "wandb" in sys.modules:  # what the end of a process does: its service closes a run's file only then
            sys.modules["wandb"].teardown()
        out, err = capfd.readouterr()
        return Said(code, out, err)

    return run


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
