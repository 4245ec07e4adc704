"""Long-lived rank processes that all distributed tests share, so that torch is imported once."""

import gc
import multiprocessing
import os
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers import it, which takes a second: once, before ranks are forked
import torch.distributed as dist

from megatron.runtime import platform
from megatron.runtime.communication.create_groups import connect_world

TIMEOUT = timedelta(seconds=120)
"""How long a rank waits for a message; the pool gives a run three times as long."""


class RankError(Exception):
    """A rank raised or died; the message has the traceback of every rank that did."""


class RankPool:
    """Forks `size` processes; `run` executes a function on the first `world_size` of them as one gloo world."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        self._start()

    def run(self, function: Callable[..., Any], *args: Any, world_size: int) -> list[Any]:
        """Call `function(*args)` on every rank; returns their results. Raises RankError when any rank raised, died or hangs."""
        assert world_size <= self._size, f"{world_size} ranks were asked of a pool of {self._size}"
        store = Path(self._folder.name) / uuid.uuid4().hex
        for pipe in self._pipes[:world_size]:
            pipe.send((function, args, world_size, str(store)))
        deadline = time.monotonic() + 3 * TIMEOUT.total_seconds()
        answers = [_receive(pipe, deadline) for pipe in self._pipes[:world_size]]
        if any(kind == "lost" for kind, _ in answers):
            self._stop()
            self._start()
        failures = [f"rank {rank}: {text}" for rank, (kind, text) in enumerate(answers) if kind != "result"]
        if failures:
            raise RankError("\n".join(failures))
        return [result for _, result in answers]

    def close(self) -> None:
        self._stop()
        self._folder.cleanup()

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        for rank in range(self._size):
            parent, child = context.Pipe()
            process = context.Process(target=_serve, args=(child, rank), daemon=True)
            process.start()
            child.close()
            self._pipes.append(parent)
            self._processes.append(process)

    def _stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._pipes.clear()
        self._processes.clear()


def _receive(pipe: Any, deadline: float) -> tuple[str, Any]:
    try:
        if pipe.poll(max(0.0, deadline - time.monotonic())):
            answer: tuple[str, Any] = pipe.recv()
            return answer
    except (EOFError, ConnectionError):
        return "lost", "the process died"
    return "lost", "no answer; the rank hangs"


def _serve(pipe: Any, rank: int) -> None:
    torch.set_num_threads(1)
    platform.install()
    gc.freeze()  # what is there now stays; collecting what a run leaves behind is quick
    while True:
        function, args, world_size, store = pipe.recv()
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
        try:
            connect_world("gloo", store=dist.FileStore(store, world_size), rank=rank, size=world_size, timeout=TIMEOUT)
            try:
                dist.barrier()  # a rank that is done at once must not close connections that others still open
                answer = "result", function(*args)
            finally:
                dist.destroy_process_group()
        except Exception:
            answer = "error", traceback.format_exc()
        gc.collect()  # process groups have threads, and live in cycles
        pipe.send(answer)
