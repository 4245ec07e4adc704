"""Starts ranks as torchrun does, without its report of failures: a failed run ends in Braid's message, and with its exit code.

    python tools/launch.py --nproc-per-node 3 pretrain_mllm.py --config FILE.yaml [flags]

Takes all that torchrun takes. Where there is no GPU, and only a number of processes and a port are asked for, ranks are forked
from one process that has imported what they need: on a laptop, importing takes longer than all else that precedes the first step.
"""

import gc
import logging
import multiprocessing
import os
import random
import signal
import socket
import sys
from argparse import REMAINDER, Namespace
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from multimodal.values.errors import ConfigError
from tools.command_line import Parser

_ROOT = Path(__file__).resolve().parents[1]
_GRACE_SECONDS = 30.0
"""Seconds that ranks have to end by themselves once one has failed, as under torchrun."""


def main(argv: Sequence[str] | None = None) -> int:
    """Start the ranks and wait for their end; argv: torchrun's arguments. Returns the exit code."""
    arguments = sys.argv[1:] if argv is None else [*argv]
    asked = _read(arguments)
    if asked is None or asked.script.resolve() != _ROOT / "pretrain_mllm.py":
        return _torchrun(arguments)
    import pretrain_mllm  # noqa: F401 - first, as it says how much torch is to log, and which warnings are to be shown

    _check_flags(asked)
    num_threads = os.environ.get("OMP_NUM_THREADS", "1")
    os.environ["OMP_NUM_THREADS"] = "1"  # OpenMP's threads do not survive a fork, so none may be there
    import torch

    if torch.cuda.is_available():
        os.environ["OMP_NUM_THREADS"] = num_threads
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # or microbatches of all sizes leave holes
        return _torchrun(arguments)
    from megatron.runtime import platform

    platform.install()  # before megatron-core is imported elsewhere, with a compiler that no rank calls
    import_for_ranks()
    return _fork(asked, num_threads)


def _read(arguments: Sequence[str]) -> Namespace | None:
    """Return what is asked for; None where torchrun is needed, or to say what is wrong."""
    parser = Parser(prog="launch.py", description=__doc__, epilog="All other flags are torchrun's; torchrun --help lists them.")
    parser.add_argument("--nproc-per-node", "--nproc_per_node", type=int, required=True, metavar="N", help="Ranks to start.")
    parser.add_argument("--master-port", "--master_port", type=int, metavar="PORT", help="Where they meet (any that is free).")
    parser.add_argument("--standalone", action="store_true", help="Taken, as it changes nothing for the ranks of one node.")
    parser.add_argument("script", type=Path, help="pretrain_mllm.py, or another program, which torchrun starts.")
    parser.add_argument("flags", nargs=REMAINDER, help="The program's own.")
    try:
        asked = parser.parse_args(arguments)
    except ConfigError:
        return None
    return asked if asked.nproc_per_node > 0 else None


def _check_flags(asked: Namespace) -> None:
    """Read the flags before imports that take long; what is wrong with them ends this process as it would end rank 0."""
    from megatron.runtime.flags.arguments import parse_arguments
    from megatron.runtime.launch.failure import Ending

    size = str(asked.nproc_per_node)
    try:
        parse_arguments(asked.flags, environ={**os.environ, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size})
    except Exception as problem:
        Ending().fail(problem)


def import_for_ranks() -> None:
    """Import what a rank needs before its first step, so that ranks forked from this process have it."""
    import megatron.runtime.flags.cross_checks
    import megatron.runtime.training.loop  # noqa: F401
    from megatron.runtime.flags.field_flags import all_flags
    from multimodal.values.deferred import import_deferred

    import_deferred()
    list(all_flags())  # the flags' descriptions, which are read from the source code and kept


def _fork(asked: Namespace, num_threads: str) -> int:
    context = multiprocessing.get_context("fork")
    port = asked.master_port or free_port()
    ranks = [context.Process(target=_run_rank, args=(rank, asked, port, num_threads)) for rank in range(asked.nproc_per_node)]
    gc.freeze()  # a rank's collections would touch, and so copy, the memory that all share
    for rank in ranks:
        rank.start()
    gc.unfreeze()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: _signal_all(ranks, number))
    exit_code = 0
    running: dict[Any, ForkProcess] = {rank.sentinel: rank for rank in ranks}
    while running and (ended := wait(running, timeout=_GRACE_SECONDS if exit_code else None)):
        for rank in map(running.pop, ended):
            rank.join()
            code = rank.exitcode or 0
            exit_code = exit_code or (code if code >= 0 else 128 - code)
    _signal_all(ranks, signal.SIGKILL)
    return exit_code


def _run_rank(rank: int, asked: Namespace, port: int, num_threads: str) -> None:
    import torch

    import pretrain_mllm

    if num_threads.isdecimal() and int(num_threads):
        torch.set_num_threads(int(num_threads))
    size = str(asked.nproc_per_node)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS=num_threads)
    sys.argv = [str(asked.script), *asked.flags]
    pretrain_mllm.main(asked.flags)


def _signal_all(ranks: Sequence[ForkProcess], number: int) -> None:
    for rank in ranks:
        if rank.is_alive() and rank.pid is not None:
            os.kill(rank.pid, number)


def free_port() -> int:
    """Return a port below those that the system gives to whoever asks for any, and may give away before rank 0 listens."""
    while True:
        port = random.randrange(15000, 32000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _torchrun(arguments: Sequence[str]) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    logging.disable(logging.ERROR)  # torchrun's, which says what ranks say themselves; they are other processes
    try:
        torchrun(arguments)
    except ChildFailedError as failed:
        _, first = failed.get_first_failure()
        return int(first.exitcode) if first.exitcode > 0 else 128 - int(first.exitcode)
    except SignalException as ended:
        return 128 + int(ended.sigval)
    except Exception as problem:
        print(f"launch.py: error: torchrun starts no ranks ({problem!r}); correct its flags, or the port", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
