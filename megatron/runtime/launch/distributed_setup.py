"""Joins this process to the run: rank, device, process group; the same under torchrun and under srun.

Ranks start only if all of them have the same start values: this is checked before any process group exists, or a difference would
be a hang. From then on a thread learns of failures elsewhere, so that no rank outlives the others, whatever it waits for:
collectives end by themselves after --distributed-timeout-minutes, but waits for the store, for data or for a file system may not.
"""

import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Event, Thread
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from megatron.runtime.communication.create_groups import connect_world
from megatron.runtime.launch import failure
from megatron.runtime.launch.failure import Ending, RanksLostError
from megatron.runtime.launch.meeting import POLL_SECONDS, Meeting, StoreWatch, open_meeting
from megatron.runtime.launch.rank_place import find_rank_place
from multimodal.values.errors import ConfigError

StartValues = Mapping[str, Mapping[str, str]]
"""Section -> name -> value, in the order in which they are compared."""

_ADVICE: Mapping[str, str] = {
    "program": "rank {rank} runs with {name} {there}, rank 0 with {here}; install the same on every node",
    "flags": "rank {rank} was started {there}, rank 0 {here}; start every rank with the same flags",
    "environment": "rank {rank} has {name} {there} in its environment, rank 0 {here}; start every rank by the same launcher",
    "model": "rank {rank} has another model, whose {name} is {there}, rank 0's {here}; give every rank the same --model",
    "plan": "rank {rank} has another plan, whose {name} is {there}, rank 0's {here}; give every rank the same --plan",
    "tokenizer": "rank {rank} has another tokenizer: {name} is {there}, rank 0's {here}; give all the same --tokenizer-model",
    "data": "rank {rank} sees other data: {name} is {there}, on rank 0 {here}; give --data-path the same content on every node",
    "costs": "rank {rank} has other costs: {name} is {there}, on rank 0 {here}; give every rank the same --emulate and --cluster",
}
"""Section -> message about a difference in it."""
_ABSENT, _AGREED = "missing", "agreed"


def digest_of(values: StartValues) -> str:
    """Return a text that is the same on two ranks if and, with near certainty, only if all their values are."""
    digest = hashlib.blake2b(digest_size=16)
    for section, entries in values.items():
        for name, value in entries.items():
            digest.update(f"{section}\0{name}\0{value}\0".encode(errors="surrogatepass"))
    return digest.hexdigest()


def describe_difference(here: StartValues, *, there: StartValues, rank: int) -> str:
    """Return the first difference and its remedy; here: of rank 0, there: of `rank`. Empty if there is none."""
    for section, advice in _ADVICE.items():
        first, other = here.get(section, {}), there.get(section, {})
        for name in dict.fromkeys((*first, *other)):
            if first.get(name, _ABSENT) != other.get(name, _ABSENT):
                shown = [entries.get(name, _ABSENT) for entries in (other, first)]
                return advice.format(rank=rank, name=name, there=shown[0], here=shown[1])
    return ""


def agree_on_start(meeting: Meeting, values: StartValues, *, timeout_seconds: float, again: str = "") -> None:
    """Wait until all ranks have compared their values with those of rank 0, by a digest: O(ranks) small messages.

    again: distinguishes later agreements from the first. Raises ConfigError on rank 0 about the first rank that differs,
    RanksLostError on the others or if ranks do not come.
    """
    deadline = time.monotonic() + timeout_seconds
    place, store, key, digest = meeting.place, meeting.store, f"start{again}", digest_of(values)
    if place.rank == 0:
        store.set(f"{key}/values", json.dumps(values))
        store.set(f"{key}/digest", digest)
        waiting = list(range(1, place.size))
        while waiting:
            missing = f"rank 0 waited in vain for {failure.shown_ranks(waiting)} to start"
            rank = waiting.pop(0)
            _wait(meeting, f"{key}/{rank}", deadline, missing=missing)
            if (difference := store.get(f"{key}/{rank}").decode()) != _AGREED:
                raise ConfigError(difference)
        store.set(key, _AGREED)
        return
    missing = f"rank {place.rank} waited in vain for others to start"
    _wait(meeting, f"{key}/digest", deadline, missing=missing)
    difference = _AGREED
    if store.get(f"{key}/digest").decode() != digest:
        difference = describe_difference(json.loads(store.get(f"{key}/values")), there=values, rank=place.rank)
    store.set(f"{key}/{place.rank}", difference)
    _wait(meeting, key, deadline, missing=missing)


def _wait(meeting: Meeting, key: str, deadline: float, *, missing: str = "") -> None:
    """Poll until the key is there, or another rank has failed."""
    pause_seconds = 0.01
    while not meeting.store.check([key]):
        if meeting.failure(meeting.store) is not None:
            raise RanksLostError("another rank failed while the ranks met")
        if time.monotonic() > deadline:
            raise RanksLostError(
                f"{missing} (--distributed-timeout-minutes); see whether all were started, and how the log of each ends"
            )
        time.sleep(pause_seconds)
        pause_seconds = min(POLL_SECONDS, 2 * pause_seconds)


_WATCH_SECONDS = 0.5
_GRACE_SECONDS = 3.0
"""Seconds for the main thread to notice a failure by itself and close files."""
_MARGIN_SECONDS = 5.0


class RankWatch:
    """Watches the other ranks from `start` to `stop`."""

    def __init__(self, meeting: Meeting, *, ending: Ending, timeout_seconds: float) -> None:
        """timeout_seconds: time without an answer after which the store is considered gone."""
        self._meeting, self._ending = meeting, ending
        self._stopped = Event()
        self._store = StoreWatch(
            timeout_seconds + _MARGIN_SECONDS,
            stopped=self._stopped,
            end=lambda seconds: self._end_without_store(f"waited {seconds:.0f} s for"),
        )

    def start(self) -> None:
        """Begin to watch; ranks without peers have nothing to watch."""
        if self._meeting.place.size > 1:
            for watch in (self._watch_others, self._store.watch):
                Thread(target=watch, daemon=True).start()

    def stop(self) -> None:
        """End the watch at the end of the run: from now on others may leave."""
        self._stopped.set()

    def _watch_others(self) -> None:
        has_answered = False
        while not self._stopped.wait(_WATCH_SECONDS):
            try:
                if (exit_code := self._meeting.failure()) is not None:
                    time.sleep(_GRACE_SECONDS)
                    self._ending.follow(exit_code)
                if not has_answered and self._meeting.roll_is_called():
                    self._meeting.answer_roll(failure.shown_place_of_main_thread())
                    has_answered = True
            except RuntimeError:
                if not self._stopped.wait(1.0):
                    self._end_without_store("lost its connection to")
                return
            self._store.note_answer()

    def _end_without_store(self, happened: str) -> None:
        place = self._meeting.place
        store = failure.store_keeper(place)
        self._ending.fail(RanksLostError(f"rank {place.rank} {happened} {store} {failure.FAULTS}"))


_LEAVE_SECONDS = 10.0


@dataclass(frozen=True)
class World:
    """This process among all others."""

    rank: int
    size: int
    meeting: Meeting
    """The store for messages between ranks that need no process group."""
    timeout: timedelta
    """Time that a rank waits for its peers."""
    watch: RankWatch = field(repr=False)

    def from_first(self, name: str, build: Callable[[], Any]) -> Any:
        """Return the plain form of what rank 0 builds, maybe for long; each name once. Raises RanksLostError if that fails."""
        key = f"told/{name}"
        if self.rank == 0:
            self.meeting.store.set(key, json.dumps(build(), default=lambda value: value.to_dict()))
        else:
            _wait(self.meeting, key, math.inf)
        return json.loads(self.meeting.store.get(key))

    @contextmanager
    def in_turn(self, name: str) -> Iterator[None]:
        """Let rank 0 run the body first, then each other node's first rank, then all others; raises RanksLostError."""
        node = f"{name}/{platform.node()}"
        is_first_of_node = self.rank == 0 or self.meeting.store.add(f"{node}/claimed", 1) == 1
        if self.rank != 0:
            _wait(self.meeting, f"{name}/0" if is_first_of_node else node, math.inf)
        yield
        if is_first_of_node:
            self.meeting.store.set(node, "done")
        if self.rank == 0:
            self.meeting.store.set(f"{name}/0", "done")

    def connect(self, *, backend: str | None, store: Store | None = None) -> None:
        """Initialise torch.distributed if necessary; collective, so every rank must have agreed. store: else the meeting's."""
        if dist.is_initialized():
            return
        chosen = backend or ("nccl" if torch.cuda.is_available() else "gloo")
        store = store or PrefixStore("groups", self.meeting.store)
        connect_world(chosen, store=store, rank=self.rank, size=self.size, timeout=self.timeout)


def join_world(*, backend: str | None, timeout: timedelta, ending: Ending) -> World:
    """Meet the other ranks, alone without RANK; `ending` gets the meeting. Raises ConfigError for a backend that cannot work."""
    if backend == "nccl" and not torch.cuda.is_available():
        raise ConfigError("--distributed-backend nccl needs CUDA, which this machine lacks; use gloo or leave the flag out")
    place = find_rank_place(os.environ)
    for name, value in (("RANK", place.rank), ("WORLD_SIZE", place.size), ("LOCAL_RANK", place.local_rank)):
        os.environ.setdefault(name, str(value))
    choose_device(place.local_rank)
    meeting = open_meeting(place, seconds=timeout.total_seconds())
    ending.meeting = meeting
    watch = RankWatch(meeting, ending=ending, timeout_seconds=timeout.total_seconds())
    watch.start()
    if place.rank == 0:
        meeting.say_first_is_here()
    return World(place.rank, place.size, meeting, timeout, watch)


def choose_device(local_rank: int) -> None:
    """Select this rank's device."""
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())


def leave_world(world: World) -> NoReturn:
    """End this process, successfully, when all ranks have called this; nothing is destroyed, as that may wait for peers."""
    dist.barrier()
    world.watch.stop()
    with suppress(RuntimeError):  # all ranks have finished their work
        world.meeting.wait_for_all(seconds=_LEAVE_SECONDS)
    failure.end_process(0)
