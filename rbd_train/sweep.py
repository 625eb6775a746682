"""Sweeps: every trial is a process and a folder of its own; run again, a sweep goes on where it was.

rbd sft -m model=tiny,embedded trainer.learning_rate=1e-5,2e-5                       the grid
rbd sft -m sweep.trials=20 'trainer.learning_rate=tag(log,interval(1e-6,1e-4))'      optuna (TPE)
rbd sft -m sweep.seeds=3 trainer.learning_rate=1e-5,2e-5                             mean and spread over seeds
"""

import contextlib
import itertools
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rbd_train.config import build, compose
from rbd_train.errors import UsageError
from rbd_train.manifest import read_manifest
from rbd_train.run import Cell, Table
from rbd_train.store import fingerprint


@dataclass
class SweepConfig:
    """Settings of a sweep; its words begin with `sweep.`."""

    trials: int = 0  # settings that optuna tries in all, earlier starts included; 0: the grid
    maximize: bool = False  # whether the stage's metric is to be large
    seeds: int = 1  # runs per setting, with seed, seed + 1, ...


class Result(NamedTuple):
    """What one process left; `metric` is None where it failed."""

    words: tuple[str, ...]
    seed: int
    folder: str
    metric: float | None
    reason: str


def sweep(stage: str, words: Sequence[str]) -> int:
    """Run a sweep and list its trials; returns the exit code, 1 where a trial failed."""
    own = {word[6:].split("=", 1)[0]: word.split("=", 1)[1] for word in words if word.startswith("sweep.")}
    config: SweepConfig = build(SweepConfig, own, "sweep.")
    if config.trials < 0 or config.seeds < 1:
        raise UsageError(f"sweep.trials={config.trials} sweep.seeds={config.seeds}: trials is 0 or more, seeds 1")
    rest = [word for word in words if not word.startswith("sweep.")]
    parsed = parse(rest)
    group = f"sweep-{fingerprint([stage, sorted(rest)])[:8]}"
    fixed = [str(override.input_line) for override in parsed if not override.is_sweep_override()]
    axes = [override for override in parsed if override.is_sweep_override()]
    if not any(word.startswith("wandb.group=") for word in fixed):
        fixed.append(f"wandb.group={group}")  # one group per sweep
    if config.trials:
        results = search(stage, fixed, axes, config, group)
    else:
        results = []
        for point in itertools.product(*[grid_words(axis) for axis in axes]):
            results += run_point(stage, fixed, point, config.seeds)
    show_results(stage, results, config)
    return 1 if any(result.metric is None for result in results) else 0


def parse(words: Sequence[str]) -> list[Any]:
    """Parse overrides with Hydra's own grammar.

    Raises:
        UsageError: a word that it can't read.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return list(OverridesParser.create().parse_overrides(list(words)))
    except HydraException as error:
        raise UsageError(f"can't parse the sweep: {str(error).splitlines()[0]}") from error


def grid_words(axis: Any) -> list[str]:
    """List the values of one axis.

    Raises:
        UsageError: an interval has no list of values.
    """
    from hydra.errors import HydraException

    try:
        return [f"{axis.get_key_element()}={value}" for value in axis.sweep_string_iterator()]
    except HydraException as error:
        raise UsageError(
            f"can't parse the sweep: {axis.input_line}: {error}; an interval needs sweep.trials=N"
        ) from error


def run_point(stage: str, fixed: Sequence[str], varied: Sequence[str], seeds: int) -> list[Result]:
    """Run one setting, once per seed, from the seed that it composes to; a run that is complete is not repeated."""
    first, results = 0, []
    with contextlib.suppress(UsageError):  # the trial says so itself; the others still run
        first = int(compose(stage, [*fixed, *varied])["seed"])
    for seed in range(first, first + seeds):
        given = [*varied, f"seed={seed}"] if seeds > 1 else list(varied)
        suffix = fingerprint(sorted(given))[:8]
        words = [*fixed, *given, f"trial='{suffix}'"]  # quoted: a hash of digits alone would be read as a number
        command = [sys.executable, "-m", "rbd_train.app", stage, *words]
        started = time.time()
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        sys.stderr.write(done.stderr)
        folder, manifest = Path("-"), dict[str, Any]()
        with contextlib.suppress(UsageError):
            values = compose(stage, words)
            folder = Path(values["root"]) / values["name"] / f"{stage}-{suffix}"
            manifest = read_manifest(folder) or {}
        metric = manifest.get("metric") if done.returncode == 0 else None
        reason = "" if done.returncode == 0 else why_failed(done.stderr, done.returncode, manifest, started)
        results.append(Result(tuple(varied), seed, str(folder), metric, reason[:160]))
    return results


def why_failed(said: str, code: int, manifest: Mapping[str, Any], started: float) -> str:
    """Return why a trial failed: what its main worker wrote down, else its first error or last line.

    Under a launch the last line tells only that some worker failed, and where another rank failed first, the main one
    was ended before it could write. A manifest of an earlier try tells nothing.
    """
    if manifest.get("status") == "failed" and manifest["finished"] >= started:
        return str(manifest["reason"])
    lines = said.strip().splitlines() or [f"exit code {code}"]
    return next((line for line in lines if line.startswith("error: ")), lines[-1])


def search(stage: str, fixed: Sequence[str], axes: Sequence[Any], config: SweepConfig, group: str) -> list[Result]:
    """Let optuna choose settings; its journal lies in the run's folder, so that a rerun continues.

    Hydra's own sweeper pins an older optuna and repeats every trial at each start.
    """
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend
    from optuna.trial import TrialState

    values = compose(stage, [*fixed, *(f"{axis.get_key_element()}={first_value(axis)}" for axis in axes)])
    folder = Path(values["root"]) / values["name"]
    folder.mkdir(parents=True, exist_ok=True)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        storage=JournalStorage(JournalFileBackend(str(folder / f"{stage}-{group}.journal"))), study_name=group,
        direction="maximize" if config.maximize else "minimize", load_if_exists=True,
    )  # fmt: skip
    # a sampler begins its draws anew at each start: continued with the same seed, it would try the same settings again
    study.sampler = optuna.samplers.TPESampler(seed=values["seed"] + len(study.get_trials(deepcopy=False)))
    results: list[Result] = []
    for trial in study.get_trials(deepcopy=False):  # killed in the middle: the same setting is tried first again
        if trial.state == TrialState.RUNNING:
            study.tell(trial.number, state=TrialState.FAIL)
            study.enqueue_trial(trial.params)
        elif trial.state.is_finished() and "results" in trial.user_attrs:
            results += [Result(tuple(r[0]), *r[1:]) for r in trial.user_attrs["results"]]
    while sum("results" in trial.user_attrs for trial in study.get_trials(deepcopy=False)) < config.trials:
        asked = study.ask()
        varied = [f"{axis.get_key_element()}={suggest(asked, axis)}" for axis in axes]
        made = run_point(stage, fixed, varied, config.seeds)
        results += made
        asked.set_user_attr("results", made)
        found = [result.metric for result in made]
        if any(metric is None or not math.isfinite(metric) for metric in found):
            study.tell(asked, state=TrialState.FAIL)
        else:
            study.tell(asked, statistics.fmean(metric for metric in found if metric is not None))
    return results


def suggest(trial: Any, axis: Any) -> Any:
    """Let a trial choose a value of an axis: interval, range or choices."""
    from hydra.core.override_parser.types import IntervalSweep, RangeSweep

    key, value = axis.get_key_element(), axis.value()
    if isinstance(value, IntervalSweep):
        log = "log" in value.tags
        if isinstance(value.start, int) and isinstance(value.end, int):
            return trial.suggest_int(key, value.start, value.end, log=log)
        return trial.suggest_float(key, float(value.start), float(value.end), log=log)  # type: ignore[arg-type]
    if isinstance(value, RangeSweep) and isinstance(value.start, int):
        stop, step = int(value.stop or 0), int(value.step)
        return trial.suggest_int(key, value.start, stop - step, step=step)
    return trial.suggest_categorical(key, list(axis.sweep_string_iterator()))


def first_value(axis: Any) -> Any:
    """Return one value of an axis, to compose the configuration with."""
    value = axis.value()
    return value.start if hasattr(value, "start") else next(iter(axis.sweep_string_iterator()))


def show_results(stage: str, results: Sequence[Result], config: SweepConfig) -> None:
    """List every trial, the failed ones with their reason, and the settings with mean and spread over seeds."""
    from rbd_train.tables import show

    rows: list[tuple[Cell, ...]] = [
        (number, " ".join(r.words), r.seed, r.folder, "ok" if r.metric is not None else "failed", r.metric, r.reason)
        for number, r in enumerate(results)
    ]
    columns: tuple[str, ...] = ("trial", "overrides", "seed", "folder", "status", "metric", "reason")
    print(show(Table(name="sweep", title=f"Sweep of {stage}", columns=columns, rows=tuple(rows))))
    points: dict[tuple[str, ...], list[float]] = {}
    for result in results:
        points.setdefault(result.words, []).extend([] if result.metric is None else [result.metric])
    order = sorted(points.items(), key=lambda p: statistics.fmean(p[1]) if p[1] else math.inf, reverse=config.maximize)
    summary: list[tuple[Cell, ...]] = [
        (" ".join(words), len(found), statistics.fmean(found) if found else None,
         statistics.stdev(found) if len(found) > 1 else None)
        for words, found in order
    ]  # fmt: skip
    if config.seeds > 1 or config.trials:
        columns = ("overrides", "n", "mean", "standard deviation")
        print(show(Table(name="points", title="Settings, best first", columns=columns, rows=tuple(summary))))
