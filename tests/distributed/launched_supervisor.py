"""The keeper and the supervisor of an elastic run, in processes that were forked after everything slow to import was imported.

The supervisor forks its ranks, where one that is started as a program has another process do so, which imports everything first.
"""

import os
import sys
from collections.abc import Mapping, Sequence

import megatron.runtime.training.elastic  # noqa: F401 - what ranks need beside what those of other runs do
from megatron.runtime.recovery import supervisor


def keep_store(argv: Sequence[str]) -> None:
    """Keep the store until the run is over."""
    supervisor.main(argv)


def supervise(argv: Sequence[str], environment: Mapping[str, str], output: str) -> None:
    """Run a supervisor; `output`: file that gets what it and its ranks print."""
    os.environ.update(environment)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(file, stream.fileno())
    flags, command = supervisor.read_flags(argv)
    sys.exit(supervisor.Supervisor(flags, command, start_method="fork").run())
