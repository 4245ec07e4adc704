"""Long-lived rank processes that all distributed tests share, so that torch is imported once."""

import multiprocessing
import os
import tempfile
import traceback
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.runtime import platform

TIMEOUT = timedelta(seconds=30)


class RankError(AssertionError):
    """A rank raised; the message is its traceback."""


class RankPool:
    """Forks `size` processes; `run` executes a function on the first `world_size` of them as one gloo world."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("fork")
        self._folder = tempfile.TemporaryDirectory()
        self._pipes, self._processes = [], []
        for rank in range(size):
            parent, child = context.Pipe()
            process = context.Process(target=_serve, args=(child, rank), daemon=True)
            process.start()
            child.close()
            self._pipes.append(parent)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, world_size: int) -> list[Any]:
        """Call `function(*args)` on every rank; returns their results. Raises RankError when any rank raised."""
        store = Path(self._folder.name) / uuid.uuid4().hex
        for pipe in self._pipes[:world_size]:
            pipe.send((function, args, world_size, str(store)))
        answers = [pipe.recv() for pipe in self._pipes[:world_size]]
        failures = [f"rank {rank}: {answer[1]}" for rank, answer in enumerate(answers) if answer[0] == "error"]
        if failures:
            raise RankError("\n".join(failures))
        return [answer[1] for answer in answers]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.terminate()
        self._folder.cleanup()


def _serve(pipe: Any, rank: int) -> None:
    torch.set_num_threads(1)
    platform.install()
    while True:
        function, args, world_size, store = pipe.recv()
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
        try:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=TIMEOUT)
            try:
                pipe.send(("result", function(*args)))
            finally:
                dist.destroy_process_group()
        except Exception:
            pipe.send(("error", traceback.format_exc()))
