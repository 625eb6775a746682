"""Run torch's launcher, or accelerate's around it, and end as the first worker that failed did, without a traceback.

Workers say themselves what went wrong; one that was killed can't, so this says it.

    python -m rbd_train.launcher torch.distributed.run --standalone --nproc_per_node=2 -m rbd_train.app ...
"""

import importlib
import logging
import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main() -> int:
    """Run the launcher that the first word names, with the others; returns the exit code."""
    launcher = importlib.import_module(sys.argv.pop(1))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # it repeats what a failed worker said
    try:
        launcher.main()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            print(f"worker {rank} was ended by {signal.Signals(-failure.exitcode).name}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        return 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main())
