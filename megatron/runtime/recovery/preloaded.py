"""Imported once before a node's ranks are forked, so that ranks do not wait for imports when a node starts or returns."""

import ctypes
import multiprocessing
import os
import signal
import threading
import warnings
from multiprocessing.connection import wait

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # a process that has initialised CUDA cannot be forked
warnings.filterwarnings("ignore", module=r"megatron\.core.*|torch\..*")

_PR_SET_PDEATHSIG = 1
_REQUESTS_TO_STOP = (signal.SIGTERM, signal.SIGUSR1)
# Slurm signals every process, and the ranks would end with the one that forks them; what comes to a rank waits until it listens.
signal.pthread_sigmask(signal.SIG_BLOCK, _REQUESTS_TO_STOP)


def die_with_supervisor() -> None:
    """End this process when its supervisor ends, or the fork server that forked it, which waits for all ranks."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if (supervisor := multiprocessing.parent_process()) is not None:
        threading.Thread(target=lambda: (wait([supervisor.sentinel]), os._exit(1)), daemon=True).start()
    for number in _REQUESTS_TO_STOP:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _REQUESTS_TO_STOP)
