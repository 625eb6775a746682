"""Start a stage on several processes, here or as one machine of many, and stop them without losing a step.

With several machines, each runs the same command on a shared folder; rank and address come from the environment:
NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT, or what Slurm sets (SLURM_NNODES, SLURM_NODEID).
"""

import contextlib
import ctypes
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from rbd_train.config import data_dir
from rbd_train.embedded import cache_folder
from rbd_train.errors import DataError, IncompleteError, UsageError
from rbd_train.launched import STOP_FILE
from rbd_train.manifest import read_manifest
from rbd_train.run import Run, held
from rbd_train.store import write_whole


class Machines(NamedTuple):
    """The machines of a launch, and this one's place among them."""

    number: int
    rank: int
    address: str
    port: str


def machines(environment: Mapping[str, str]) -> Machines:
    """Read the machines from the environment; one where nothing is said.

    Raises:
        UsageError: no numbers, several machines, but no address of the first, or a rank that isn't among them.
    """
    given = []
    for own, slurm, default in (("NNODES", "SLURM_NNODES", "1"), ("NODE_RANK", "SLURM_NODEID", "0")):
        name, text = next(((name, environment[name]) for name in (own, slurm) if environment.get(name)), (own, default))
        if not text.isdecimal() or (own == "NNODES" and int(text) < 1):
            raise UsageError(f"{name} is {text!r}; it is a number, of machines from 1, of a machine's rank from 0")
        given.append(int(text))
    count, rank = given
    address, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "29500")
    if count > 1 and not address:
        raise UsageError(f"NNODES is {count}, but MASTER_ADDR is not set: export the address of the first machine")
    if not 0 <= rank < count:
        raise UsageError(f"NODE_RANK is {rank}, but there are {count} machines: it counts from 0")
    return Machines(count, rank, address, port)


def launch(run: Run, name: str, values: Mapping[str, Any], resolved: str) -> float | None:
    """Write the resolved config once and start workers on that file.

    Raises:
        UsageError: no such launch file, one that this machine can't run, or a worker found a setting wrong.
        IncompleteError: the workers were told to stop and left a checkpoint.
        KeyboardInterrupt: Ctrl-C told them.
        DataError: a worker failed otherwise.
    """
    known = sorted(path.stem for path in data_dir("launch").glob("*.yaml"))
    if values["launch"] not in known:
        raise UsageError(f"launch has no file {values['launch']!r}; choose one of {', '.join(known)}")
    here = machines(os.environ)
    run.folder.mkdir(parents=True, exist_ok=True)
    with held(run.folder / f".launch-{here.rank}.lock"):  # two launches would write one another's settings
        return _launch(run, name, values, resolved, here)


def _launch(run: Run, name: str, values: Mapping[str, Any], resolved: str, here: Machines) -> float | None:
    file = data_dir("launch") / f"{values['launch']}.yaml"
    path = run.folder / "resolved.yaml"
    write_whole(path, resolved)
    worker = ["-m", "rbd_train.app", name, "--resolved", str(path), f"debug={str(values['debug']).lower()}"]
    words, environment = command(file, values["processes"], here)
    if "DEEPSPEED" in file.read_text(encoding="utf-8") and "TORCH_EXTENSIONS_DIR" not in os.environ:
        builds = build_folder()
        for lock in stale_locks(builds):
            run.say(f"removed {lock}: a killed build left it, and every later one would wait for it")
            lock.unlink(missing_ok=True)
        environment["TORCH_EXTENSIONS_DIR"] = str(builds)
    started = time.time()
    keeps = name in ("sft", "dpo")  # these leave a checkpoint; what others have is in the ledger
    with stopping(run.folder / STOP_FILE, [*words, *worker], environment, keeps) as (process, asked):
        code = process.wait()
    manifest = read_manifest(run.folder)
    now = manifest is not None and manifest["finished"] >= started  # else it is of an earlier try, or another process
    left = code != 0 and now and manifest is not None and manifest["status"] == "incomplete"
    told = f"{run.folder}: {manifest['reason'].partition(': ')[2]}" if left and manifest else ""
    if code and signal.SIGINT in asked:
        raise KeyboardInterrupt(told)
    if left:
        raise IncompleteError(told)
    if code:
        reason = "see above"
        if now and manifest is not None and manifest["status"] == "failed":
            reason = manifest["reason"].partition(": ")[2]
        kind = UsageError if code == 2 else DataError
        raise kind(f"{values['launch']}: a worker of {run.folder} failed with exit code {code}; {reason}")
    return manifest["metric"] if manifest else None


def build_folder() -> Path:
    """Return where DeepSpeed's first use builds its operators: a folder of this machine, Python and torch alone."""
    import torch

    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return cache_folder() / "torch_extensions" / f"{platform.node()}-{python}-torch{torch.__version__}"


def stale_locks(builds: Path) -> list[Path]:
    """List the locks under a folder of this machine's builds that no process holds open.

    torch's FileBaton keeps its lock open while it builds; a process killed meanwhile leaves the file, for which the
    next one waits forever.
    """
    found, held = list(builds.glob("**/lock")), set()  # found first: a lock made meanwhile is not looked at
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # of another user, or just gone
            held |= {file.path for file in process.open_files()}
    return [path for path in found if str(path.resolve()) not in held]


def command(file: Path, processes: int | None, here: Machines) -> tuple[list[str], dict[str, str]]:
    """Return the launcher's words and its environment; `processes` counts those of all machines.

    Raises:
        UsageError: FSDP without a GPU, more processes than GPUs, or machines that can't share them equally.
    """
    import torch

    gpus, environment = torch.cuda.device_count(), dict(os.environ)
    if gpus and processes is not None and processes > gpus * here.number:
        raise UsageError(
            f"processes={processes}, but {here.number} machine(s) with {gpus} GPU(s) each hold {gpus * here.number}"
        )
    processes = processes if processes is not None else (gpus or 2) * here.number
    if processes % here.number:
        raise UsageError(f"processes={processes} can't be shared equally by {here.number} machines")
    # seconds that torch's launcher lets workers write a checkpoint after a SIGTERM of its own; its default is 30
    environment.setdefault("PET_SHUTDOWN_TIMEOUT", "3600")
    environment.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")  # torch's own, once per rank and collective
    # torch's launcher would give each worker one thread, whatever the cores; offload's optimizer runs on them
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // (processes // here.number))))
    launcher = [sys.executable, "-m", "rbd_train.launcher"]
    text = file.read_text(encoding="utf-8")
    if not gpus and "FSDP" in text:
        # on a CPU accelerate leaves FSDP out and trains under DDP, with the whole model in every process
        raise UsageError(f"launch={file.stem} needs a GPU, and none is seen here; ddp and zero1 to zero3 run on CPUs")
    if gpus or "DEEPSPEED" in text:
        words = [*launcher, "accelerate.commands.launch", "--config_file", str(file)]
        words += ["--num_processes", str(processes)]
        if here.number == 1:
            # a free port: two launches at once would both find the default one free, and wait in each other's store
            words += ["--main_process_port", "0"]
        else:
            words += ["--num_machines", str(here.number), "--machine_rank", str(here.rank)]
            words += ["--main_process_ip", here.address, "--main_process_port", here.port]
            words += ["--deepspeed_multinode_launcher", "standard"] if "DEEPSPEED" in text else []
        if not gpus:
            # ZeRO runs on gloo ranks with DS_ACCELERATOR; ACCELERATE_USE_CPU breaks it (no attribute 'ds_status')
            words += ["--mixed_precision", "no"]
            environment |= {"DS_ACCELERATOR": "cpu"}
        return words, environment
    # `accelerate launch --cpu --num_processes 2` starts one process without saying so
    words = [*launcher, "torch.distributed.run", f"--nproc_per_node={processes // here.number}"]
    if here.number == 1:
        return [*words, "--standalone"], environment
    words += [f"--nnodes={here.number}", f"--node_rank={here.rank}"]
    return [*words, f"--master_addr={here.address}", f"--master_port={here.port}"], environment


@contextlib.contextmanager
def stopping(
    file: Path, words: list[str], environment: Mapping[str, str], keeps: bool
) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """Run a command, and note the signals that come.

    The first SIGTERM or SIGINT makes a file that its workers watch, the second ends it, the third kills what hangs.
    Where the workers keep no checkpoint, and so watch no file, each does what the next one would.

    The command has a session of its own, so that a Ctrl-C here doesn't end it before its step; where this process dies,
    the kernel tells the launcher, which tells the workers.
    """
    file.unlink(missing_ok=True)
    asked: list[int] = []

    def ask(number: int, frame: Any) -> None:
        asked.append(number)
        if len(asked) == 1 and keeps:
            file.touch()
        elif len(asked) == 1 + keeps:
            process.terminate()
        else:
            _kill_all(process.pid)

    process = subprocess.Popen(words, env=dict(environment), start_new_session=True, preexec_fn=_end_with_parent)
    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield process, asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        file.unlink(missing_ok=True)


def _kill_all(launcher: int) -> None:
    """Kill a launcher with its workers: it would wait an hour for one that hangs, or leave it behind."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(launcher)
        for each in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.Error):
                each.kill()


def _end_with_parent() -> None:
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):  # Linux: PR_SET_PDEATHSIG
        libc.prctl(1, signal.SIGTERM)
