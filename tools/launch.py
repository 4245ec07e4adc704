"""Starts ranks as torchrun does, without its report of failures: a failed run ends in Braid's message, and with its exit code.

    python tools/launch.py --nproc-per-node 3 pretrain_mllm.py --config FILE.yaml [flags]

Takes all that torchrun takes.
"""

import logging
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def main(argv: list[str] | None = None) -> int:
    """Start the ranks and wait for their end; argv: torchrun's arguments. Returns the exit code."""
    logging.disable(logging.ERROR)  # torchrun's, which says what ranks say themselves; they are other processes
    try:
        torchrun(argv)
    except ChildFailedError as failed:
        _, first = failed.get_first_failure()
        return int(first.exitcode) if first.exitcode > 0 else 128 - int(first.exitcode)
    except SignalException as ended:
        return 128 + int(ended.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main())
