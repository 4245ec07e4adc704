"""Joins this process to the run: rank, device, process group; the same under torchrun and under srun.

From then on a thread learns of failures elsewhere, so that no rank outlives the others, whatever it waits for: collectives end by
themselves after --distributed-timeout-minutes, but waiting for the store, for data or for a file system need not.
"""

import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Event, Thread
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from megatron.runtime.launch.failure import FAULTS, Ending, RanksLostError, end_process, shown_place_of_main_thread, store_keeper
from megatron.runtime.launch.meeting import Meeting, open_meeting
from megatron.runtime.launch.rank_place import find_rank_place
from megatron.runtime.launch.start_agreement import StartValues, agree_on_start
from multimodal.values.errors import ConfigError

_POLL_SECONDS = 0.5
_GRACE_SECONDS = 3.0
"""The main thread mostly notices by itself, and may have files to close."""
_MARGIN_SECONDS = 5.0


class RankWatch:
    """Watches from `start` to `stop`."""

    def __init__(self, meeting: Meeting, *, ending: Ending, timeout_seconds: float) -> None:
        """timeout_seconds: a store that does not answer for so long is taken for gone."""
        self._meeting, self._ending = meeting, ending
        self._patience_seconds = timeout_seconds + _MARGIN_SECONDS
        self._stopped = Event()
        self._num_answers = 0

    def start(self) -> None:
        """Begin; ranks without peers have nothing to watch."""
        if self._meeting.place.size > 1:
            for watch in (self._watch_others, self._watch_store):
                Thread(target=watch, daemon=True).start()

    def stop(self) -> None:
        """The run is over: from now on others may leave."""
        self._stopped.set()

    def _watch_others(self) -> None:
        has_answered = False
        while not self._stopped.wait(_POLL_SECONDS):
            try:
                if (exit_code := self._meeting.failure()) is not None:
                    self._end_after_grace(exit_code)
                if not has_answered and self._meeting.roll_is_called():
                    self._meeting.answer_roll(shown_place_of_main_thread())
                    has_answered = True
            except RuntimeError:
                if not self._stopped.wait(1.0):
                    self._end_without_store("lost its connection to")
                return
            self._num_answers += 1

    def _watch_store(self) -> None:
        """Counts ticks rather than looking at a clock, which runs on while this process itself is frozen."""
        seen, silent_seconds = -1, 0.0
        while not self._stopped.wait(1.0):
            silent_seconds = 0.0 if self._num_answers != seen else silent_seconds + 1.0
            seen = self._num_answers
            if silent_seconds > self._patience_seconds:
                self._end_without_store(f"waited {silent_seconds:.0f} s for")

    def _end_after_grace(self, exit_code: int) -> None:
        time.sleep(_GRACE_SECONDS)
        self._ending.follow(exit_code)

    def _end_without_store(self, happened: str) -> None:
        place = self._meeting.place
        self._ending.fail(RanksLostError(f"rank {place.rank} {happened} {store_keeper(place)} {FAULTS}"))


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
