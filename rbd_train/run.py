"""A run folder: where a stage leaves its files, with a manifest of what went in and what came out."""

import contextlib
import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from pydantic import BaseModel

from rbd_train import previous
from rbd_train.errors import DataError, UsageError, printable
from rbd_train.ledger import Ledger
from rbd_train.manifest import changed_settings, code_version, hashed, machine, read_manifest, versions
from rbd_train.metrics import Rate
from rbd_train.records import Record
from rbd_train.store import Row, digest, fingerprint, read_rows, write_json, write_rows

Cell = Rate | float | int | str | None


class Table(Record):
    """A table that a person reads: in the terminal, in the report, as Markdown and as CSV."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""


def rank() -> int:
    """Return this process's rank; 0 where nothing was launched."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return the number of launched processes."""
    return int(os.environ.get("WORLD_SIZE", "1"))


class Run:
    """One stage of one named run: reads inputs, writes outputs, and says in `manifest.json` what happened."""

    def __init__(self, root: Path, name: str, stage: str, source: str, config: Mapping[str, Any]) -> None:
        """Name the folder `<root>/<name>/<stage>`, a trial's with its suffix; `source` names the run of the inputs."""
        self.root, self.name, self.stage, self.source = root, name, stage, source
        self.folder = root / name / (stage if config.get("trial") is None else f"{stage}-{config['trial']}")
        self.config = config
        self.main = rank() == 0
        self.inputs: dict[str, dict[str, Any]] = {}
        self.outputs: dict[str, dict[str, Any]] = {}
        self.summary: dict[str, Rate] = {}
        self.tables: list[Table] = []
        self.facts: dict[str, Any] = {}
        self.leftovers: list[Path] = []  # folders to remove once the manifest says that nothing needs them
        self._tracker: Any = None
        self._ledger: Ledger | None = None
        self._lock: IO[str] | None = None
        self._started = time.time()

    # what a stage uses -------------------------------------------------------------------------------------------

    @property
    def ledger(self) -> Ledger:
        """The ledger of all runs under the root, opened when first needed."""
        if self._ledger is None:
            self._ledger = Ledger(self.root / "ledger.sqlite", bool(self.config.get("dry_run")))
        return self._ledger

    def output_of(self, stage: str, file: str, run: str | None = None) -> Path:
        """Return the path of another stage's output, by default in the run that inputs come from.

        Raises:
            DataError: that stage has not finished, so its files can't be trusted.
        """
        folder = self.root / (run or self.source) / stage
        manifest = read_manifest(folder)
        trials = sorted(path.name for path in folder.parent.glob(f"{stage}-*") if (path / file).is_file())
        if manifest is None and trials:
            raise DataError(
                f"{folder / file}: stage {stage} was swept in this run ({', '.join(trials[:5])}); run it once with "
                "the settings that you want, or give a trial's file to the key for it: "
                f"{folder.parent / trials[0] / file}"
            )
        if manifest is None:
            raise DataError(
                f"{folder / file}: stage {stage} has not run; run `rbd {stage} name={run or self.source}` first, "
                f"or name the run that holds it with from=<run>"
            )
        if manifest["status"] != "complete":
            raise DataError(f"{folder}: stage {stage} is {manifest['status']}; run it again to finish it first")
        return folder / file

    def check_made_from(self, folder: Path, path: Path) -> None:
        """Make sure that a stage's outputs were made from a file as it is now: ids alone would join old and new.

        Raises:
            DataError: the file was written anew since.
        """
        manifest = read_manifest(folder)
        read = manifest["inputs"] if manifest else {}
        for name, entry in read.items():
            given = self.input_path(name)
            if given.is_file() and given.samefile(path) and digest(path) != entry["sha256"]:
                raise DataError(
                    f"{folder}: made from {path} as it was before that stage ran again; run `rbd {folder.name} "
                    f"name={folder.parent.name} overwrite=true` first"
                )

    def read(self, path: Path, kind: type[Row]) -> list[Row]:
        """Read records and note the file in the manifest."""
        rows = read_rows(path, kind)
        self.note_input(path, len(rows))
        return rows

    def note_input(self, path: Path, rows: int | None = None) -> None:
        """Note an input file, its hash and its count; one of this root by its path there, so that a root may move."""
        self.inputs[self.named(path)] = {"sha256": digest(path), "rows": rows}

    def note_models(self, value: Any) -> None:
        """Note the weights of every model of this root that the settings name: trained anew, they are another input."""
        if isinstance(value, Mapping | list):
            for inner in value.values() if isinstance(value, Mapping) else value:
                self.note_models(inner)
        elif (
            isinstance(value, str)
            and os.path.isdir(value)
            and Path(value).absolute().is_relative_to(self.root.absolute())
        ):  # Path.is_dir raises at a text that is too long for a name
            for path in sorted(Path(value).glob("*.safetensors")):
                self.note_input(path)

    def named(self, path: Path) -> str:
        """Name a path as a manifest does: one of this root by its path there."""
        inside = path.absolute().is_relative_to(self.root.absolute())
        return str(path.absolute().relative_to(self.root.absolute()) if inside else path)

    def input_path(self, name: str) -> Path:
        """Return the path of an input that a manifest names."""
        return self.root / name if (self.root / name).is_file() else Path(name)

    def fact_path(self, manifest: Mapping[str, Any], fact: str) -> Path:
        """Return the path that a stage left as a fact of its manifest, whatever the file is called.

        Raises:
            DataError: an older version ran that stage, and left no such fact.
        """
        if fact not in manifest["facts"]:
            raise DataError(
                f"{self.root / manifest['run'] / manifest['stage']}: its manifest has no fact {fact}, since an older "
                f"version wrote it; run `rbd {manifest['stage']} name={manifest['run']} overwrite=true` with the "
                "settings of config.yaml there (replies come from the ledger)"
            )
        return self.input_path(manifest["facts"][fact])

    def write(self, file: str, rows: Sequence[BaseModel]) -> None:
        """Write records and note the file in the manifest."""
        if self.main:
            previous.note_written(self.folder, file)
            write_rows(self.folder / file, rows)
            self.outputs[file] = {"sha256": digest(self.folder / file), "rows": len(rows)}

    def note_output(self, file: str) -> None:
        """Note an output that was written otherwise."""
        if self.main:
            previous.note_written(self.folder, file)
            self.outputs[file] = {"sha256": digest(self.folder / file), "rows": None}

    def say(self, text: str) -> None:
        """Tell the person at the terminal and the log; only the main process speaks."""
        text = printable(text)
        if self.main:
            try:
                print(text, flush=True)
            except BrokenPipeError:  # `| head` has seen enough: the stage goes on
                sys.stdout = open(os.devnull, "w")  # noqa: SIM115
            with (self.folder / "run.log").open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {text}\n")

    def event(self, kind: str, **values: Any) -> None:
        """Append one JSON line for machines, and send its numbers to the tracker."""
        if not self.main:
            return
        with (self.folder / "events.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": round(time.time(), 3), "event": kind, **values}) + "\n")
        if self._tracker is not None:
            self._tracker.log({f"{self.stage}/{k}": v for k, v in values.items() if isinstance(v, int | float)})

    def table(self, table: Table) -> None:
        """Show a table and keep it for the report."""
        from rbd_train.tables import show

        self.tables.append(table)
        self.say(show(table))
        if self._tracker is not None:
            import wandb

            cells: Any = [[str(cell) if isinstance(cell, Rate) else cell for cell in row] for row in table.rows]
            self._tracker.log({table.name: wandb.Table(columns=list(table.columns), data=cells)})

    def figure(self, name: str, rate: Rate) -> None:
        """Keep a headline figure for `summary.json`."""
        self.summary[name] = rate

    # the frame around a stage ------------------------------------------------------------------------------------

    def finished(self) -> float | None | bool:
        """Return the metric of a complete stage with the same config and inputs; False if it has to run.

        Raises:
            UsageError: it is complete, but with another config or other inputs.
        """
        manifest = read_manifest(self.folder)
        if manifest is None or manifest["status"] != "complete" or self.config.get("overwrite"):
            return False
        changed = changed_settings(manifest["config"], self.config)
        stale = [
            path for path, entry in manifest["inputs"].items()
            if not self.input_path(path).is_file() or digest(self.input_path(path)) != entry["sha256"]
        ]  # fmt: skip
        damaged = [
            file for file, entry in manifest["outputs"].items()
            if not (path := self.folder / file).exists() or (path.is_file() and digest(path) != entry["sha256"])
        ]  # fmt: skip
        if damaged:
            raise UsageError(
                f"{self.folder / damaged[0]} is gone or was changed after stage {self.stage} wrote it; "
                "set overwrite=true to run the stage again"
            )
        if changed or stale:
            what = [f"config key {key}" for key in changed[:5]] + [f"input {path}" for path in stale[:3]]
            raise UsageError(
                f"{self.folder} is complete, but with other settings or inputs ({', '.join(what)}); "
                f"set overwrite=true to run it again, or name=<another run>"
            )
        metric: float | None = manifest["metric"]
        return metric

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Hold the folder while the stage runs, and leave a manifest whatever happens."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.main:
            self._lock = held(self.folder / ".lock")
            old = read_manifest(self.folder)
            previous.finish_moving(self.folder, old)
            if old is not None and old["status"] == "complete":
                previous.set_aside(self.folder, old)
        try:
            yield
        finally:
            if self._ledger is not None:
                self._ledger.close()
            if self._lock is not None:
                self._lock.close()

    def close(self, status: str, metric: float | None, reason: str = "") -> None:
        """Write tables, metrics and manifest; the manifest comes last, so that its presence means the rest is there."""
        if not self.main:
            return
        if status == "complete":
            write_json(self.folder / "metrics.json", {k: v.model_dump() for k, v in self.summary.items()})
            write_json(self.folder / "tables.json", [table.model_dump(mode="json") for table in self.tables])
        if status == "failed" and previous.bring_back(self.folder):
            self.say(f"{self.folder}: what stood there before is back")
        else:
            write_json(self.folder / "manifest.json", self._manifest(status, metric, reason))
        if status == "complete":
            previous.discard(self.folder)
        if self._tracker is not None:
            self._tracker.summary.update({f"{self.stage}/{k}": v.value for k, v in self.summary.items()})
            self._tracker.finish(exit_code=0 if status == "complete" else 1)
        for folder in self.leftovers if status == "complete" else ():
            shutil.rmtree(folder, ignore_errors=True)

    def _manifest(self, status: str, metric: float | None, reason: str) -> dict[str, Any]:
        return {
            "stage": self.stage, "run": self.name, "status": status, "reason": reason, "metric": metric,
            "config": hashed(self.config), "config_hash": fingerprint(hashed(self.config)),
            "inputs": self.inputs, "outputs": self.outputs, "facts": self.facts,
            "seconds": round(time.time() - self._started, 3), "finished": round(time.time(), 3),
            "code": code_version(), "versions": versions(), "machine": machine(), "world_size": world_size(),
            "distributed": os.environ.get("ACCELERATE_DISTRIBUTED_TYPE", self.facts.get("distributed", "no")),
            "tracker_run": getattr(self._tracker, "id", None),
        }  # fmt: skip

    def start_tracker(self, settings: Mapping[str, Any]) -> None:
        """Start W&B on the main process where it was asked for: one run per stage, no key in any file."""
        if settings["mode"] not in ("online", "offline", "disabled"):
            raise UsageError(f"wandb.mode is {settings['mode']!r}; choose online, offline or disabled")
        if settings["mode"] == "disabled" or not self.main:
            return
        import wandb

        self._tracker = wandb.init(
            project=settings["project"], entity=settings["entity"], group=settings["group"] or self.name,
            job_type=self.stage, name=f"{self.name}/{self.folder.name}", mode=settings["mode"],
            dir=str(self.folder.absolute()),  # its service keeps the folder that the process was in when it began
            config=dict(self.config), reinit="finish_previous",
            settings=wandb.Settings(silent=True, save_code=False, disable_git=True),
        )  # fmt: skip


def held(path: Path) -> IO[str]:
    """Hold a folder by a lock in it, until the file is closed or this process ends.

    Raises:
        UsageError: another process holds it.
    """
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise UsageError(f"{path.parent} is in use by another process; wait for it, or use another name") from error
    return file
