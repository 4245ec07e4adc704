"""One rank of a launched run, in a process that was forked after everything slow to import was imported."""

import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence

import pretrain_mllm
from tools.launch import import_for_ranks

import_for_ranks()


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
