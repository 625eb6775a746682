"""On-policy distillation, the GPU check's rehearsal, and submission without Slurm."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from rbd_train.modelling import resolve_model
from rbd_train.store import write_rows
from tests.examples import example  # type: ignore[import-not-found]

ROOT = Path(__file__).parents[1]


@pytest.fixture
def train_file(tmp_path: Path) -> Path:
    write_rows(tmp_path / "train.jsonl", [example(number, number % 2 == 0) for number in range(1, 9)])
    return tmp_path / "train.jsonl"


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    """The tiny model with other weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path / "teacher"
    shutil.copytree(resolve_model("tiny"), folder)
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("launch", ["", "ddp"])
def test_a_student_comes_nearer_to_its_teacher(
    rbd: Callable[..., Any], train_file: Path, teacher: Path, launch: str
) -> None:
    words = ["distil", f"train={train_file}", "model=tiny", f"teacher_path={teacher}", "trainer.max_steps=20"]
    words += ["trainer.warmup_share=0.0", "trainer.learning_rate=1e-2", "trainer.micro_batch=4", "max_new_tokens=8"]
    said = rbd(*words, *([f"launch={launch}", "processes=2"] if launch else []))
    assert said.code == 0, said.err
    events = [json.loads(line) for line in Path("runs/default/distil/events.jsonl").read_text().splitlines()]
    losses = [event["loss"] for event in events if "loss" in event]
    assert len(losses) == 20 and sum(losses[-3:]) / 3 < 0.8 * losses[0], losses
    manifest = json.loads(Path("runs/default/distil/manifest.json").read_text())
    assert manifest["metric"] == losses[-1] and manifest["world_size"] == (2 if launch else 1)
    assert (Path("runs/default/distil/model") / "model.safetensors").is_file()


def test_another_vocabulary_is_refused(rbd: Callable[..., Any], train_file: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    shutil.copytree(resolve_model("tiny"), tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "other")
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(tmp_path / "other")
    said = rbd("distil", f"train={train_file}", "model=tiny", f"teacher_path={tmp_path / 'other'}")
    assert said.code == 2 and "differ in 1 tokens" in said.err and "<new>" in said.err


@pytest.mark.slow
def test_the_gpu_check_rehearsed(tmp_path: Path) -> None:
    out = tmp_path / "check.json"
    given = os.environ | {"DRY": "1", "STEPS": "3"}
    path = os.pathsep.join([str(Path(sys.executable).parent), given["PATH"]])
    done = subprocess.run(
        ["bash", str(ROOT / "launch/gpu_check.sh"), "check.json"], cwd=tmp_path, env=given | {"PATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == json.loads(out.read_text()) and found["dry"] and found["mfu"] is None
    assert found["tokens_per_second"] > 0 and found["planned_bytes"] > 0 and found["steps"] == 3


@pytest.mark.slow
def test_a_submitted_stage_runs(train_file: Path, tmp_path: Path) -> None:
    words = ["sft", f"root={tmp_path / 'runs'}", f"train=[{train_file}]", "model=tiny", "trainer.max_steps=2"]
    command = [sys.executable, "-m", "rbd_train.submit", "--here", "--logs", str(tmp_path / "logs"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads((tmp_path / "runs/default/sft/manifest.json").read_text())["status"] == "complete"


@pytest.mark.slow
@pytest.mark.parametrize("told", [signal.SIGUSR2, signal.SIGTERM], ids=["time is up", "machine goes away"])
def test_a_job_that_must_leave_is_queued_again_and_goes_on(
    train_file: Path, tmp_path: Path, told: signal.Signals
) -> None:
    """Submitit calls the job's checkpoint in a signal handler, above the job's own wait for the child."""
    words = ["sft", f"root={tmp_path / 'runs'}", f"train=[{train_file}]", "model=tiny", "trainer.max_steps=40"]
    words += ["trainer.save_every=5"]
    command = [sys.executable, "-m", "rbd_train.submit", "--here", "--logs", str(tmp_path / "logs"), *words]
    with (tmp_path / "err").open("w") as err:
        process = subprocess.Popen(command, stderr=err)
    deadline = time.monotonic() + 240
    while not any((tmp_path / "runs").glob("default/sft/checkpoints-*/checkpoint-*")):
        assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "err").read_text()[-2000:]
        os.sched_yield()
    (job,) = (
        child for child in psutil.Process(process.pid).children(recursive=True)
        if "submitit.core._submit" in child.cmdline()
    )  # fmt: skip
    job.send_signal(told)
    assert process.wait() == 0, (tmp_path / "err").read_text()[-2000:]
    (log,) = (tmp_path / "logs").glob("*_log.out")
    assert "continuing from" in log.read_text()
    assert json.loads((tmp_path / "runs/default/sft/manifest.json").read_text())["facts"]["steps"] == 40


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "launch").glob("*.sh")))
def test_scripts_parse(script: str) -> None:
    subprocess.run(["bash", "-n", str(ROOT / "launch" / script)], check=True)


def papers_run() -> list[list[str]]:
    """The words of every command of the paper's run, by its dry run."""
    given = os.environ | {"DRY": "1", "GSM8K": "x", "RBD_DATA": "y"}
    done = subprocess.run(
        ["bash", "launch/rbd_paper.sh"], cwd=ROOT, env=given, capture_output=True, text=True, check=True
    )
    return [shlex.split(line)[1:] for line in done.stdout.splitlines()]


def test_the_papers_run_names_commands_that_compose() -> None:
    """Each line of the dry run is a command whose keys exist."""
    from rbd_train.app import _name_engine_slot, load_stage
    from rbd_train.config import compose

    lines = papers_run()
    assert len(lines) == 5 + 4 * 3 + 8 + 4 * (2 + 8 + 1) + 2 * 2 + 2
    for stage, *words in (*lines[:9], *lines[25:32], *lines[-12:]):
        compose(stage, [_name_engine_slot(load_stage(stage), word) for word in words])


PIECES: dict[str, tuple[str, ...]] = {  # what a tiny rehearsal takes instead of what costs money or hours
    "pairs": ("source=generated", "source.train=2", "source.test=2"), "traces": ("teacher=template",),
    "judge": ("judge=planted", "judge.right=1", "judge.biased.verbosity=0.5"),
    "sft": ("model=tiny", "trainer.max_steps=1"),
    "detection": ("detector.max_new_tokens=4",), "debias": ("detector.max_new_tokens=4",),
}  # fmt: skip
COSTLY = ("source", "weak", "limit", "teacher", "engine@", "judge", "experiment", "launch", "processes", "trainer")


def test_the_papers_run_rehearsed(rbd: Callable[..., Any]) -> None:
    """The script's own wiring, for two of its judges and one detector: each stage finds what an earlier one left."""
    done: list[str] = []
    for number, (stage, *words) in enumerate(papers_run()):
        name = next(word for word in words if word.startswith("name="))
        if re.search("llama|v3|haiku|sonnet|7b|14b|label|classifier|sizes|ablation", name):
            continue
        pieces = [*PIECES.get(stage, ()), *(PIECES["judge"] if "judge=generative" in words else ()), f"seed={number}"]
        pieces += [word for word in words if word.startswith("judge.name=")]
        for word in (word for word in words if not word.startswith(COSTLY)):
            key, _, value = word.partition("=")
            listed = [part for part in value.strip("[]").split(",") if re.search("gpt-4o|paper-test/", part)]
            pieces.append(f"{key}=[{','.join(listed)}]" if value.startswith("[") and "paper-" in value else word)
        said = rbd(stage, *pieces)
        assert said.code == 0, f"{stage} {pieces}: {said.err}"
        done.append(stage)
    assert done.count("debias") == 2 and done[-1] == "report"
    debias = json.loads(Path("runs/paper-r1_qwen_1_5b-gpt-4o/debias/manifest.json").read_text())
    trained = {f"paper-{name}/curate/train.jsonl" for name in ("gpt-4o", "gpt-4o-mini")}
    assert trained < set(debias["inputs"]) and all(debias["inputs"][path]["rows"] for path in trained)


@pytest.mark.parametrize("path", sorted((ROOT / "conf" / "experiment").glob("*.yaml")), ids=lambda path: path.stem)
def test_an_experiment_begins_with_its_command(path: Path) -> None:
    from rbd_train.app import load_stage
    from rbd_train.config import build, compose

    first = path.read_text().splitlines()[0].removeprefix("# ")
    if not first.startswith("rbd "):
        assert (ROOT / first.removeprefix("bash ")).is_file()
        first = f"rbd sft experiment={path.stem}"
    _, stage, *words = first.split()
    values = compose(stage, words)
    build(load_stage(stage).config, {("from_" if key == "from" else key): value for key, value in values.items()})
    assert values["launch"] is None or (ROOT / "launch" / f"{values['launch']}.yaml").is_file()
    if stage == "sft":
        assert values["model"]["path"].startswith("deepseek-ai/") and values["seed"] == 3407
        assert 0 < values["trainer"]["save_every"] <= 50, "a machine that goes away would cost the whole run"


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("model.lora_rank=8", "model.lora_rank=0"),  # it would be ignored
        ("trainer.save_every=20", "does nothing with trainer.save_every=20"),
        ("trainer.learning_rate=0.0", "trainer.learning_rate is 0.0"),
        ("model.dtype=float16", "choose float32 or bfloat16"),
        ("temperature=0.0", "both must be more than 0"),
        ("beta=2.0", "beta is 2.0"),
    ],
)
def test_what_distil_cant_do_is_refused(rbd: Callable[..., Any], train_file: Path, word: str, told: str) -> None:
    said = rbd("distil", f"train={train_file}", "model=tiny", "teacher_path=tiny", word)
    assert said.code == 2 and told in said.err
