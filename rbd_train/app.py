"""The `rbd` command: `rbd <stage> key=value ...`, the frame around every stage, sweeps and launches."""

import contextlib
import dataclasses
import difflib
import errno
import importlib
import io
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rbd_train.config import build, compose, data_dir
from rbd_train.errors import DataError, DryRun, IncompleteError, UsageError, printable
from rbd_train.run import Run, rank, world_size
from rbd_train.store import write_whole

STAGES = {
    "pairs": "data_gen.pairs", "judgements": "data_gen.judgements", "traces": "data_gen.traces",
    "curate": "data_gen.curate", "plan": "rbd_train.plan", "sft": "rbd_train.sft", "distil": "rbd_train.distil",
    "detection": "eval.detection", "debias": "eval.debias", "judging": "eval.judging",
    "discover": "data_gen.discover", "benchmark": "data_gen.benchmark", "preferences": "data_gen.preferences",
    "dpo": "rbd_train.dpo", "before_after": "eval.before_after", "relative": "rbd_train.relative",
    "contrast": "eval.contrast", "report": "eval.report",
}  # fmt: skip
ENGINE_SLOTS = ("judge", "detector", "teacher")
CALLLESS = ("curate", "plan", "sft", "distil", "dpo", "relative", "report")


@dataclasses.dataclass
class BaseConfig:
    """What every stage has."""

    name: str = "default"  # name of the run; its stages leave their files in <root>/<name>/<stage>
    from_: str = "default"  # run whose outputs are this stage's inputs (key: from); default: this run
    root: str = "runs"  # folder of all runs, with the ledger
    seed: int = 0  # seed of every draw
    launch: str | None = None  # a file of launch/ (ddp, zero2, zero3, ...): start workers with accelerate
    processes: int | None = None  # workers to start; default: what the launch file says
    trial: str | None = None  # set by a sweep: suffix of the stage's folder
    overwrite: bool = False  # run a complete stage again; where that fails, what stood there is back
    dry_run: bool = False  # tell calls, tokens and money of the next calls, make none and write nothing
    debug: bool = False  # show tracebacks
    wandb: dict[str, Any] = dataclasses.field(default_factory=dict)  # mode (online, offline, disabled), project, ...


_ROOM = "make room; whole files or none were written, so the same command continues"
_RIGHTS = "give this user the right to it, or choose another root=FOLDER"
UNWRITABLE = {
    errno.ENOSPC: _ROOM, errno.EDQUOT: _ROOM, errno.EFBIG: _ROOM, errno.EACCES: _RIGHTS, errno.EPERM: _RIGHTS,
    errno.EROFS: _RIGHTS, errno.ENOTDIR: "a file stands where a folder is needed; choose another root=FOLDER",
    errno.EEXIST: "a file stands where a folder is needed; choose another root=FOLDER",
}  # fmt: skip


class Stage(NamedTuple):
    """A stage: its name, its config dataclass and its function."""

    name: str
    config: type
    function: Callable[[Any, Run], float | None]
    launches: bool = True  # whether `launch` starts workers; a plan only speaks of them


def stage(name: str, config: type, launches: bool = True) -> Callable[[Callable[[Any, Run], float | None]], Stage]:
    """Make a function `main(cfg, run)` a stage; its return value is the number that a sweep optimises."""
    return lambda function: Stage(name, config, function, launches)


def load_stage(name: str) -> Stage:
    """Import a stage.

    Raises:
        UsageError: there is no such stage.
    """
    if name not in STAGES:
        close = difflib.get_close_matches(name, STAGES, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise UsageError(f"there is no stage {name!r}; {hint}stages: {', '.join(STAGES)}")
    found = importlib.import_module(STAGES[name]).main
    assert isinstance(found, Stage)
    return found


def run_stage(chosen: Stage, values: dict[str, Any], worker: bool = False) -> float | None:
    """Run a stage in this process, or start workers where `launch` says so; a finished one is skipped."""
    config = build(chosen.config, {("from_" if k == "from" else k): v for k, v in values.items()})
    for key in ("name", "from", "trial"):
        word = values[key]
        if word is not None and (
            word in ("", ".", "..") or "/" in word or not word.isprintable() or word.startswith("ledger.sqlite")
        ):
            raise UsageError(
                f"{key} is {word!r}: it names a folder in {values['root']}, so it has a letter at least and no slash, "
                "and is not the ledger's name"
            )
    if not values["root"].strip():
        raise UsageError("root is empty; it names the folder of all runs, for example root=runs")
    if values["processes"] is not None and values["processes"] < 1:
        raise UsageError(f"processes is {values['processes']}; it must be at least 1")
    if values["processes"] and not values["launch"] and "LOCAL_RANK" not in os.environ:
        raise UsageError(
            f"processes={values['processes']} without launch starts none; add launch=ddp (or zero2, zero3, ...)"
        )
    if not 0 <= values["seed"] < 2**32:
        raise UsageError(f"seed is {values['seed']}; it must be at least 0 and below 2**32")
    run = Run(Path(values["root"]), values["name"], chosen.name, values["from"], values)
    # a page shows the stages that stand there now; one that came since is no input of the old page, so none is skipped
    known = False if values["dry_run"] or chosen.name == "report" else run.finished()
    if known is not False:
        if run.main:
            print(f"{run.folder}: complete already, with the same settings and inputs")
        return None if known is None else float(known)
    if values["dry_run"]:
        _rehearse(chosen, config, run)
        return None
    if values["launch"] and chosen.launches and not worker and "LOCAL_RANK" not in os.environ:
        from rbd_train.workers import launch

        return launch(run, chosen.name, values, _yaml(values))
    if values["processes"] and "LOCAL_RANK" in os.environ and world_size() != values["processes"]:
        raise UsageError(f"processes={values['processes']}, but {world_size()} were started; make them agree")
    with run.opened():
        if run.main:
            write_whole(run.folder / "config.yaml", _yaml(values))
        try:
            run.note_models(values)  # on every rank: checkpoints are named by the inputs
            run.start_tracker(values["wandb"])
            metric = chosen.function(config, run)
        except BaseException as error:
            status = "incomplete" if isinstance(error, IncompleteError | KeyboardInterrupt) else "failed"
            run.close(status, None, f"{type(error).__name__}: {error}"[:500])
            raise
        run.close("complete", metric)
    return metric


def _rehearse(chosen: Stage, config: Any, run: Run) -> None:
    """Go as far as the first calls that the ledger can't answer, in a folder of no consequence, and tell them."""
    if chosen.name in CALLLESS:
        raise UsageError(f"stage {chosen.name} makes no calls, so that dry_run=true has nothing to tell")
    with tempfile.TemporaryDirectory() as nowhere:
        run.folder = Path(nowhere)
        try:
            with run.opened(), contextlib.redirect_stdout(io.StringIO()):
                chosen.function(config, run)
            told = "no call: every reply is in the ledger, or none is needed"
        except DryRun as plan:
            told = f"{plan}; calls that depend on these replies come on top"
    print(f"dry run of {chosen.name}: {told}")


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0 ok, 1 failed, 2 usage."""
    words = list(sys.argv[1:] if words is None else words)
    debug = "debug=true" in [word.casefold() for word in words]
    warnings.filterwarnings("ignore", category=FutureWarning)  # of one library to another
    try:
        return _dispatch(words)
    except BrokenPipeError:  # `| head` has seen enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return 141
    except KeyboardInterrupt as error:
        print(str(error) or "interrupted; the same command continues", file=sys.stderr)
        return 130
    except (UsageError, DataError, IncompleteError) as error:
        if debug:
            traceback.print_exc()
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except Exception as error:
        if debug:
            traceback.print_exc()
        told = f"{type(error).__name__}: {error} (debug=true shows where)"
        if isinstance(error, OSError) and error.errno in UNWRITABLE:
            told = f"{error.filename or 'the disk'}: {error.strerror}; {UNWRITABLE[error.errno]}"
        print(printable(f"error: {told}"), file=sys.stderr)
        return 1


def entry() -> None:
    """Be the console script `rbd`."""
    sys.exit(main())


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        from rbd_train.stage_help import overview

        print(overview())
        return 0
    if words[0] == "--version":
        from rbd_train import __version__

        print(__version__)
        return 0
    if words[0].startswith("-"):
        raise UsageError(f"{words[0]} stands before the stage; write rbd <stage> {words[0]} ...")
    chosen = load_stage(words[0])
    rest = words[1:]
    if "--resolved" in rest:  # a worker: the launching process has composed the config already
        values = _read_yaml(Path(rest[rest.index("--resolved") + 1]))
        run_stage(chosen, values, worker=True)
        return 0
    if {"-h", "--help"} & set(rest):
        from rbd_train.stage_help import stage_help

        slots = [_name_engine_slot(chosen, word) for word in rest if _chooses(word)]
        print(stage_help(chosen, slots))
        return 0
    sweep = bool({"-m", "--multirun"} & set(rest))
    show = "--cfg" in rest
    overrides = [word for word in rest if word not in ("-m", "--multirun", "--cfg", "job")]
    flags = [word for word in overrides if word.startswith("-")]
    if flags:
        raise UsageError(f"there is no option {flags[0]}; options: -m (sweep), --cfg job (show the config), --help")
    overrides = [_name_engine_slot(chosen, word) for word in overrides]
    if sweep:
        from rbd_train.sweep import sweep as run_sweep

        return run_sweep(chosen.name, overrides)
    values = compose(chosen.name, overrides)
    if show:
        print(_yaml(values), end="")
        return 0
    run_stage(chosen, values)
    return 0


def _name_engine_slot(chosen: Stage, word: str) -> str:
    """Let `engine=http` and `engine.model=x` mean the stage's only engine."""
    key = word.split("=", 1)[0]
    if key != "engine" and not key.startswith("engine."):
        return word
    slots = [f.name for f in dataclasses.fields(chosen.config) if f.name in ENGINE_SLOTS]
    if len(slots) != 1:
        ways = " or ".join(f"engine@{slot}.engine={word.split('=', 1)[-1]}" for slot in slots)
        raise UsageError(f"stage {chosen.name} has {len(slots)} engines; say which: {ways or 'none is configurable'}")
    return f"engine@{slots[0]}.{word}" if key == "engine" else f"{slots[0]}.{word}"


def _chooses(word: str) -> bool:
    """Tell whether a word chooses what stands in a slot, such as judge=planted: then the help lists its keys."""
    return "=" in word and (data_dir("conf") / word.split("=", 1)[0].split("@", 1)[0]).is_dir()


def _yaml(values: Mapping[str, Any]) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(dict(values)))


def _read_yaml(path: Path) -> dict[str, Any]:
    from omegaconf import OmegaConf

    container = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


if __name__ == "__main__":
    if rank() > 0:  # one voice: the other ranks speak only when they fail
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # run the importable module, not this copy named __main__, so that stages and app share their classes
    sys.exit(importlib.import_module("rbd_train.app").main())
