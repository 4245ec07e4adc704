"""Writes a checkpoint while training continues: a thread writes it from a copy in host memory, one checkpoint at a time.

The thread of every rank does the same as a save in the foreground, in the same order, but over a process group of its own: so it
is equally atomic, a failure on one rank fails on all, and training stops only for the copy.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.runtime.checkpoint.all_ranks import on_this_rank
from megatron.runtime.communication.create_groups import create_groups
from megatron.runtime.state.held_tensors import HeldTensor

_ALIGNMENT = 16
"""Alignment in bytes of every piece of the copy, so that it can be read as numbers of any type."""

Write = Callable[[Sequence[HeldTensor], ProcessGroup | None], None]


class BackgroundSave:
    """This rank's part of the current save, if any; all ranks call its methods alike."""

    def __init__(self, timeout: timedelta) -> None:
        """timeout: time that ranks wait for each other, including the slowest one's writing; collective."""
        self._group = create_groups([range(dist.get_world_size())], backend="gloo", timeout=timeout)[0]
        self._room = torch.empty(0, dtype=torch.uint8)
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None

    def start(self, write: Write, tensors: Sequence[HeldTensor], *, what: str) -> None:
        """Copy the tensors' values, and let a thread write the copies; there must be no current save.

        what: names the save in the CheckpointError that all ranks raise if one has no memory for the copy.
        """
        assert self._thread is None, "a save is under way; finish it first"
        copies = on_this_rank(lambda: self._copy(tensors), what=what)
        self._thread = threading.Thread(target=self._run, args=(write, copies), name="save", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the error of the current save, if it has failed by now; returns at once."""
        if self._problem is not None:
            self.finish()

    def finish(self) -> None:
        """Wait until the current save is complete; raises its error, CheckpointError on every rank."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem

    def _run(self, write: Write, copies: Sequence[HeldTensor]) -> None:
        try:
            write(copies, self._group)
        except BaseException as problem:
            self._problem = problem

    def _copy(self, tensors: Sequence[HeldTensor]) -> list[HeldTensor]:
        """Copy everything that this rank may have to write into one buffer, pinned for GPUs and kept for the next save."""
        held = [tensor for tensor in tensors if not tensor.is_copy]
        num_bytes = sum(_room_for(piece.values) for tensor in held for piece in tensor.pieces)
        if len(self._room) < num_bytes:
            self._room = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        copies, start = [], 0
        for tensor in held:
            pieces = []
            for piece in tensor.pieces:
                values = self._room[start : start + piece.values.nbytes].view(piece.values.dtype).view(piece.values.shape)
                pieces.append(piece._replace(values=values.copy_(piece.values.detach(), non_blocking=True)))
                start += _room_for(piece.values)
            copies.append(replace(tensor, pieces=tuple(pieces)))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return copies


def _room_for(values: Tensor) -> int:
    return -(-values.nbytes // _ALIGNMENT) * _ALIGNMENT
