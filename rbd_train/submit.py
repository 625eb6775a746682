"""Submit a stage to Slurm through submitit; it is requeued and continues when its time is up or its machine goes away.

    python -m rbd_train.submit --nodes=2 --gpus=8 --minutes=480 sft experiment=r1_qwen_14b launch=zero3 processes=16
    python -m rbd_train.submit --here sft model=tiny        (submitit's local executor: no Slurm, to rehearse)

The folder of runs must be shared by the machines. submitit is an extra: pip install 'rbd_train[slurm]'.
"""

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

NOT_DONE = 1  # exit code of a stage that was stopped, and of one that failed; its manifest tells them apart


class Job:
    """A command of rbd that submitit runs, and that knows how to go on."""

    def __init__(self, words: Sequence[str]) -> None:
        """Remember the words behind `rbd`."""
        self.words = list(words)

    def __call__(self) -> int:
        """Run the command; SIGTERM is passed on, and rbd saves after the step in hand."""
        environment = dict(os.environ)
        nodes = environment.get("SLURM_JOB_NODELIST")
        if nodes and "MASTER_ADDR" not in environment:
            shown = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True)
            environment["MASTER_ADDR"] = shown.stdout.split()[0]
        self.process = subprocess.Popen([sys.executable, "-m", "rbd_train.app", *self.words], env=environment)
        signal.signal(signal.SIGTERM, lambda *_: self.process.terminate())
        code = self.process.wait()
        if code:
            raise RuntimeError(f"rbd {' '.join(self.words)} ended with exit code {code}; see the job's log")
        return code

    def checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Be called by submitit when the job's time is up: wait for the checkpoint, then submit the same command."""
        from submitit.helpers import DelayedSubmission

        process = getattr(self, "process", None)
        if process is not None and process.poll() is None:
            process.terminate()
            process.wait()
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

    executor = submitit.AutoExecutor(folder=given.logs, cluster="local" if given.here else "slurm")
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
