"""What runs are started by, in processes that were forked after everything slow to import was imported.

The supervisor forks its ranks, where one that is started as a program has another process do so, which imports everything first.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping, Sequence

import megatron.runtime.training.elastic  # noqa: F401 - what ranks of elastic runs need beside what those of other runs do
import pretrain_mllm
from megatron.runtime.recovery import supervisor
from tools import launch as launcher

launcher.import_for_ranks()


def supervise(argv: Sequence[str]) -> int:
    """Run a supervisor that does not keep the store."""
    flags, command = supervisor.read_flags(argv)
    return supervisor.Supervisor(flags, command, start_method="fork").run()


PROGRAMS: dict[str, Callable[[list[str]], int | None]] = {
    "pretrain_mllm.py": pretrain_mllm.main,
    "tools/launch.py": launcher.main,
    "supervisor": supervise,
    "keeper of the store": supervisor.main,
}


def run(program: str, argv: Sequence[str], environment: Mapping[str, str], folder: str, output: str) -> None:
    """Run a program in `folder`; output: file that gets what it, and those whom it starts, print."""
    multiprocessing.set_start_method("fork", force=True)  # loader workers start as they do in a program of their own
    os.environ.update(environment)
    os.chdir(folder)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(file, stream.fileno())
    sys.argv = [program, *argv]
    sys.exit(PROGRAMS[program]([*argv]))
