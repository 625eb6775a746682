"""Sweeps: the grid, optuna, seeds, W&B's agents; run again, nothing is repeated, and what failed says why."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rbd_train import sweep
from rbd_train.config import data_dir
from rbd_train.store import write_rows
from rbd_train.sweep import Result
from tests.examples import example  # type: ignore[import-not-found]

SEARCH = ("sft", "-m", "model=tiny", "trainer.learning_rate=tag(log,interval(1e-4,1e-2))", "trainer.micro_batch=1,4")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Stand in for the processes of trials: what optuna is told must depend on its words alone."""
    done: list[tuple[str, ...]] = []

    def point(stage: str, fixed: Any, varied: Any, seeds: int) -> list[Result]:
        done.append(tuple(varied))
        rate = float(next(word.split("=")[1] for word in varied if "rate" in word))
        if rate > 5e-3:
            return [Result(tuple(varied), seed, "-", None, "diverged") for seed in range(seeds)]
        return [Result(tuple(varied), seed, "-", rate + seed, "") for seed in range(seeds)]

    monkeypatch.setattr(sweep, "run_point", point)
    return done


def test_a_search_continues(rbd: Callable[..., Any], ran: list[tuple[str, ...]]) -> None:
    said = rbd(*SEARCH, "sweep.trials=6", "sweep.seeds=2")
    assert len(ran) == 6 and said.code == (1 if "diverged" in said.out else 0)
    assert all(1e-4 <= float(rate.split("=")[1]) <= 1e-2 for rate, _ in ran) and "Settings, best first" in said.out
    rbd(*SEARCH, "sweep.trials=6", "sweep.seeds=2")
    assert len(ran) == 6  # nothing again
    rbd(*SEARCH, "sweep.trials=8", "sweep.seeds=2")
    assert len(ran) == 8 and len(set(ran)) == 8


def test_a_killed_trial_is_tried_first_again(
    rbd: Callable[..., Any], ran: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = sweep.run_point

    def killed(*words: Any) -> list[Result]:
        real(*words)
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "run_point", killed)
    assert rbd(*SEARCH, "sweep.trials=2").code == 130
    monkeypatch.setattr(sweep, "run_point", real)
    rbd(*SEARCH, "sweep.trials=2")
    assert len(ran) == 3 and ran[0] == ran[1]


def test_an_interval_needs_trials(rbd: Callable[..., Any]) -> None:
    said = rbd(*SEARCH)
    assert said.code == 2 and "an interval needs sweep.trials=N" in said.err
    said = rbd(*SEARCH, "sweep.trails=3")
    assert said.code == 2 and "did you mean sweep.trials" in said.err


def test_seeds_give_mean_and_spread(rbd: Callable[..., Any]) -> None:
    said = rbd("pairs", "-m", "source=generated", "source.train=2,3", "source.test=2", "sweep.seeds=2")
    assert said.code == 0, said.err
    folders = list(Path("runs/default").glob("pairs-*"))
    seeds = sorted(json.loads((folder / "manifest.json").read_text())["config"]["seed"] for folder in folders)
    assert seeds == [0, 0, 1, 1] and "standard deviation" in said.out


def test_seeds_begin_with_the_experiments(rbd: Callable[..., Any]) -> None:
    """The trials fail, having no rows; which seeds they were given is written down all the same."""
    said = rbd("sft", "-m", "experiment=r1_qwen_1_5b", "sweep.seeds=2")
    folders = list(Path("runs/default").glob("sft-*"))
    seeds = sorted(json.loads((folder / "manifest.json").read_text())["config"]["seed"] for folder in folders)
    assert said.code == 1 and seeds == [3407, 3408] and " 3407 " in said.out


def test_a_workers_own_reason_is_told() -> None:
    """A launcher's last line is that a worker failed; a manifest of an earlier try tells nothing of this one."""
    said, failed = "error: a worker failed\n", {"status": "failed", "reason": "DataError: no rows"}
    assert sweep.why_failed(said, 1, failed | {"finished": 3.0}, 2.0) == "DataError: no rows"
    assert sweep.why_failed(said, 1, failed | {"finished": 1.0}, 2.0) == "error: a worker failed"
    assert sweep.why_failed("", -9, {}, 2.0) == "exit code -9"
    other_rank = "W1201 a log line\nerror: no rows\nE1201 failed\n" + said  # rank 0 was ended before it wrote
    assert sweep.why_failed(other_rank, 1, {}, 2.0) == "error: no rows"


@pytest.mark.slow
def test_what_failed_under_a_launch_says_why(rbd: Callable[..., Any]) -> None:
    said = rbd("judgements", "-m", "launch=ddp", "processes=2")
    told = " ".join(said.out.split())
    assert said.code == 1 and "a worker of" in said.err
    assert "has not run" in told and "failed with exit code" not in told


def test_agents_of_wandb_give_each_trial_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B's agent fills its macros in before it sets the run's id, and keeps what it has filled in."""
    from wandb.wandb_agent import Agent

    for key in ("WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH", "WANDB_DIR"):  # the agent sets them for good
        monkeypatch.setenv(key, str(tmp_path))
    monkeypatch.delenv("WANDB_RUN_ID")
    (tmp_path / "bin").mkdir()
    shown = f'exec {sys.executable} -m rbd_train.app "$@" --cfg job > "{tmp_path}/$WANDB_RUN_ID"'
    (tmp_path / "bin" / "rbd").write_text(f"#!{shutil.which('sh')}\n{shown}\n")
    (tmp_path / "bin" / "rbd").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    given = yaml.safe_load((data_dir("launch") / "wandb" / "sweep.yaml").read_text())
    agent = Agent(api=None, queue=None)
    agent._sweep_command = given["command"]
    for run_id in ("1e234567", "ab12cd34"):
        words = {"trainer.learning_rate": {"value": 2e-5}, "trainer.eval_share": {"value": 0.1}}
        agent._command_run({"run_id": run_id, "program": given["program"], "args": words})
        assert agent._run_processes[run_id].wait() == 0
        composed = yaml.safe_load((tmp_path / run_id).read_text())
        assert composed["name"] == run_id and float(composed["trainer"]["learning_rate"]) == 2e-5
        assert composed["from"] == "r1" and composed["wandb"]["mode"] == "online"


def test_trials_are_compared_under_one_name(rbd: Callable[..., Any]) -> None:
    """One W&B group, one kind of job and one name per figure, whatever the trial's folder is called."""
    from wandb.proto.wandb_internal_pb2 import RunRecord

    write_rows(Path("train.jsonl"), [example(number, number % 2 == 0) for number in range(1, 9)])
    words = ("model=tiny", "train=[train.jsonl]", "trainer.max_steps=1", "trainer.micro_batch=8", "wandb.mode=offline")
    said = rbd("sft", *words, "trial=abc", "wandb.group=sweep-1")
    assert said.code == 0, said.err
    (file,) = Path("runs/default/sft-abc").glob("wandb/offline-*/*.wandb")
    written = file.read_bytes()
    for field in ({"run_group": "sweep-1"}, {"job_type": "sft"}, {"display_name": "default/sft-abc"}):
        assert RunRecord(**field).SerializeToString() in written, field
    assert b"sft/loss" in written and b"sft-abc/loss" not in written
