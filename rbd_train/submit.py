"""Submit a stage to Slurm through submitit; it is requeued and continues when its time is up or its machine goes away.

    python -m rbd_train.submit --nodes=2 --gpus=8 --minutes=480 sft experiment=r1_qwen_14b launch=zero3 processes=16
    python -m rbd_train.submit --here sft model=tiny        (submitit's local executor: no Slurm, to rehearse)

The folder of runs must be shared by the machines. A SIGTERM can't tell a machine that goes away from scancel: to end a
job for good, scancel --signal=KILL. submitit is an extra: pip install 'rbd_train[slurm]'.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any


class Job:
    """A command of rbd that submitit runs, and that knows how to go on."""

    def __init__(self, words: Sequence[str]) -> None:
        """Remember the words behind `rbd`."""
        self.words = list(words)
        self.told = False  # to leave

    def __call__(self) -> int:
        """Run the command; told to leave, it is passed on, and rbd saves after the step in hand."""
        import submitit

        environment = dict(os.environ)
        nodes = environment.get("SLURM_JOB_NODELIST")
        if nodes and "MASTER_ADDR" not in environment:
            shown = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True)
            environment["MASTER_ADDR"] = shown.stdout.split()[0]
        # submitit answers its own signal (time is up) alone; a machine that goes away says SIGTERM
        own = signal.Signals[f"SIG{submitit.JobEnvironment.USR_SIG}"]
        requeue: Any = signal.getsignal(own)

        def leave(number: int, frame: Any) -> None:
            if not self.told:  # said again while the checkpoint is written: a second SIGTERM would end rbd at once
                self.told = True
                requeue(number, frame)  # calls checkpoint below; on other machines than the first it does nothing

        for number in (own, signal.SIGTERM):
            signal.signal(number, leave)
        self.process = subprocess.Popen([sys.executable, "-m", "rbd_train.app", *self.words], env=environment)
        code = self.process.wait()
        if code and not self.told:
            raise RuntimeError(f"rbd {' '.join(self.words)} ended with exit code {code}; see the job's log")
        return code

    def checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Be called by submitit when the job must leave: wait for the checkpoint, then submit the same command.

        It runs in a signal handler above `__call__`, which waits and holds the child's lock: a second `wait` would
        wait for that lock, and so for ever. The system is asked instead, and the child left for the first to reap.
        """
        from submitit.helpers import DelayedSubmission

        process = getattr(self, "process", None)
        if process is not None and process.poll() is None:
            process.terminate()
            with contextlib.suppress(ChildProcessError):  # reaped already
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        return DelayedSubmission(Job(self.words))


def main(words: Sequence[str] | None = None) -> int:
    """Submit, and print the job's number and log; with --here, wait for it."""
    parser = argparse.ArgumentParser(prog="python -m rbd_train.submit", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=8, help="per node")
    parser.add_argument("--minutes", type=int, default=480)
    parser.add_argument("--partition")
    parser.add_argument("--logs", default="runs/submitted")
    parser.add_argument("--here", action="store_true", help="run on this machine, without Slurm")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="a stage and its keys")
    given = parser.parse_args(words)
    if not given.command:
        parser.error("which stage? for example: sft model=tiny")
    import submitit

    executor = submitit.AutoExecutor(
        folder=given.logs, cluster="local" if given.here else "slurm",
        slurm_max_num_timeout=100,  # long runs: its default gives up when the time is up for the fourth time
    )  # fmt: skip
    executor.update_parameters(timeout_min=given.minutes, name=f"rbd-{given.command[0]}")
    if not given.here:
        executor.update_parameters(
            nodes=given.nodes, tasks_per_node=1, gpus_per_node=given.gpus, slurm_partition=given.partition,
            slurm_signal_delay_s=300, slurm_additional_parameters={"requeue": True, "open-mode": "append"},
        )  # fmt: skip
    job = executor.submit(Job(given.command))
    print(f"job {job.job_id}; log: {job.paths.stdout}")
    return int(job.result()) if given.here else 0


if __name__ == "__main__":
    sys.exit(main())
