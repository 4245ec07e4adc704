"""Joins this process to the run: rank, device, process group; the same under torchrun and under srun."""

import os
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from megatron.runtime.launch.failure import Ending, end_process
from megatron.runtime.launch.meeting import Meeting, open_meeting
from megatron.runtime.launch.rank_place import find_rank_place
from megatron.runtime.launch.rank_watch import RankWatch
from megatron.runtime.launch.start_agreement import StartValues, agree_on_start
from multimodal.values.errors import ConfigError

_LEAVE_SECONDS = 10.0


@dataclass(frozen=True)
class World:
    """This process among all others."""

    rank: int
    size: int
    local_rank: int
    meeting: Meeting
    """Where the ranks tell each other what no process group is needed for."""
    timeout: timedelta
    """How long a rank waits for its peers."""
    watch: RankWatch = field(repr=False)

    def agree(self, values: StartValues) -> None:
        """Compare what this rank was told with all others; raises ConfigError for a rank that differs."""
        agree_on_start(self.meeting, values, timeout_seconds=self.timeout.total_seconds())

    def connect(self, *, backend: str | None) -> None:
        """Initialise torch.distributed; collective, so every rank must have agreed."""
        chosen = backend or ("nccl" if torch.cuda.is_available() else "gloo")
        store = PrefixStore("groups", self.meeting.store)
        dist.init_process_group(chosen, store=store, rank=self.rank, world_size=self.size, timeout=self.timeout)


def join_world(*, backend: str | None, timeout: timedelta, ending: Ending) -> World:
    """Meet the other ranks; alone when no launcher set RANK. Raises ConfigError for a backend that cannot work.

    ending: learns of the meeting, so that from now on a failure of any rank ends all.
    """
    if backend == "nccl" and not torch.cuda.is_available():
        raise ConfigError("--distributed-backend nccl needs CUDA, which this machine lacks; use gloo or leave the flag out")
    place = find_rank_place(os.environ)
    for name, value in (("RANK", place.rank), ("WORLD_SIZE", place.size), ("LOCAL_RANK", place.local_rank)):
        os.environ.setdefault(name, str(value))
    if torch.cuda.is_available():
        torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
    meeting = open_meeting(place, seconds=timeout.total_seconds())
    ending.meeting = meeting
    watch = RankWatch(meeting, ending=ending, timeout_seconds=timeout.total_seconds())
    watch.start()
    if place.rank == 0:
        meeting.say_first_is_here()
    return World(place.rank, place.size, place.local_rank, meeting, timeout, watch)


def leave_world(world: World) -> NoReturn:
    """End this process, successfully, when all ranks have come here.

    Nothing is taken down first: destroying a group, or the interpreter, waits for threads, which may wait for peers.
    """
    dist.barrier()
    world.watch.stop()
    with suppress(RuntimeError):  # all have done their work
        world.meeting.wait_for_all(seconds=_LEAVE_SECONDS)
    end_process(0)
