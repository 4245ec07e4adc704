"""One rank of a launched run, in a process that was forked after everything slow to import was imported."""

import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

import pretrain_mllm  # first, as it says how much torch is to log

# isort: split
# What pretrain_mllm.py imports when it runs; a rank that is forked from here need not wait for it.
import megatron.runtime.launch.distributed_setup
import megatron.runtime.training.loop
import megatron.runtime.training.resumption
import megatron.runtime.training.run  # noqa: F401
from megatron.runtime.flags.field_flags import all_flags

list(all_flags())  # the flags' descriptions, which are read from the source code and kept

with suppress(ImportError):  # the digits' source, if it is installed
    import sklearn.datasets  # noqa: F401


def run_rank(flags: Sequence[str], environment: Mapping[str, str], folder: str, output: str) -> None:
    """Run pretrain_mllm.py in `folder` with these flags; `output`: file that gets what it prints."""
    multiprocessing.set_start_method("fork", force=True)  # loader workers start as they do in a program of their own
    os.environ.update(environment)
    os.chdir(folder)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(file, stream.fileno())
    sys.argv = ["pretrain_mllm.py", *flags]
    pretrain_mllm.main(list(flags))
