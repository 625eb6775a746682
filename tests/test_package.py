"""The package: imports run one way, and the wheel carries conf and launch and works outside the checkout."""

import ast
import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FORBIDDEN = {"rbd_train": {"data_gen", "eval"}, "data_gen": {"eval"}, "eval": {"data_gen"}}


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_run_one_way(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        wrong = {name for name in imported(path) if name.split(".")[0] in FORBIDDEN[package]}
        assert not wrong, f"{path} imports {wrong}"


def test_a_light_command_loads_no_torch() -> None:
    code = "import sys; from rbd_train.app import main; main(['--help']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip().endswith("False")


def test_the_wheel_works_outside_the_checkout(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "rbd_train/conf/base.yaml" in names and "rbd_train/launch/zero3.yaml" in names
    assert "eval/report.html.jinja" in names and not any(name.startswith("tests/") for name in names)
    home = tmp_path / "env"
    venv.create(home, with_pip=False, system_site_packages=False)
    unpacked = tmp_path / "unpacked"
    zipfile.ZipFile(wheel).extractall(unpacked)
    # the wheel's own files first, the libraries of this environment behind them
    libraries = [path for path in sys.path if path.endswith("site-packages")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(unpacked), *libraries])}
    run = [str(home / "bin" / "python"), "-m", "rbd_train.app", "pairs", "source.train=2", "source.test=2"]
    subprocess.run(run, check=True, capture_output=True, cwd=tmp_path, env=environment)
    manifest = json.loads((tmp_path / "runs" / "default" / "pairs" / "manifest.json").read_text())
    assert manifest["status"] == "complete" and manifest["code"]["commit"] is None


def test_nothing_is_told_to_anybody() -> None:
    """TRL's trainers tell the hub what is trained, unless this is set when huggingface_hub is imported."""
    code = "import rbd_train, huggingface_hub.constants as c; print(c.HF_HUB_DISABLE_TELEMETRY)"
    bare = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "CI", "DISABLE_TELEMETRY"))}
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=bare, check=True)
    assert said.stdout.strip() == "True"
