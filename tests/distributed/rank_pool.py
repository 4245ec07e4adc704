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
        self._folder = tempfile.TemporaryDirectory()
        self._ranks = [_start(rank) for rank in range(size)]

    def run(self, function: Callable[..., Any], *args: Any, world_size: int) -> list[Any]:
        """Call `function(*args)` on every rank; returns their results. Raises RankError when any rank raised, died or hangs."""
        assert world_size <= len(self._ranks), f"{world_size} ranks were asked of a pool of {len(self._ranks)}"
        store = Path(self._folder.name) / uuid.uuid4().hex
        for _, pipe in self._ranks[:world_size]:
            pipe.send((function, args, world_size, str(store)))
        deadline = time.monotonic() + 3 * TIMEOUT.total_seconds()
        answers = [_receive(pipe, deadline) for _, pipe in self._ranks[:world_size]]
        for rank, (kind, _) in enumerate(answers):
            if kind == "lost":
                _end(self._ranks[rank][0])
                self._ranks[rank] = _start(rank)
        failures = [f"rank {rank}: {text}" for rank, (kind, text) in enumerate(answers) if kind != "result"]
        if failures:
            raise RankError("\n".join(failures))
        return [result for _, result in answers]

    def close(self) -> None:
        for process, _ in self._ranks:
            _end(process)
        self._folder.cleanup()


def _start(rank: int) -> tuple[Any, Any]:
    """Returns the process and the pipe to it."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, rank), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _end(process: Any) -> None:
    process.kill()
    process.join()


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
