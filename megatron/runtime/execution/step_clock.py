"""Measures the times of each action in this rank's lane, by host time on CPU and by events on the stream on CUDA."""

import math
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import torch
import torch.distributed as dist

from multimodal.values.action import Action, Resource, action_to_text
from multimodal.values.plan import Plan
from multimodal.values.timeline import Timeline, TimelineEvent

Mark = float | torch.cuda.Event


class StepClock:
    """Records (action, start, end) of one rank; times count from `start_step`."""

    def __init__(self, *, lane: int) -> None:
        self._lane = lane
        self._is_cuda = torch.cuda.is_available()
        self._origin: Mark = 0.0
        self.origin_seconds = 0.0
        """Host time of the step's start."""
        self.spans: list[tuple[Action, Mark, Mark]] = []
        self.names_ranges = False
        """True if profilers are given a range with the action's text for every span."""

    def start_step(self) -> None:
        """Forget the last step and count from now."""
        self.spans.clear()
        self._origin = self._mark()
        self.origin_seconds = time.perf_counter()

    @contextmanager
    def span(self, action: Action) -> Iterator[None]:
        """Record the code inside as `action`."""
        start = self._mark()
        with ExitStack() as ranges:
            if self.names_ranges:
                ranges.enter_context(torch.profiler.record_function(action_to_text(action)))
                ranges.enter_context(torch.cuda.nvtx.range(action_to_text(action)) if self._is_cuda else nullcontext())
            yield
        self.spans.append((action, start, self._mark()))

    def events(self) -> tuple[TimelineEvent, ...]:
        """Return the events since `start_step`, in seconds."""
        if self._is_cuda:
            torch.cuda.synchronize()
        return tuple(
            TimelineEvent(action, self._lane, self._seconds(self._origin, start), self._seconds(self._origin, end))
            for action, start, end in self.spans
        )

    def _mark(self) -> Mark:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, start: Mark, end: Mark) -> float:
        if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
            return start.elapsed_time(end) / 1000.0
        assert isinstance(start, float) and isinstance(end, float)
        return end - start


def seconds_by_resource(events: tuple[TimelineEvent, ...]) -> dict[str, float]:
    """Split a lane's events into compute (with work and waits inside it), communication (sending, collectives) and receiving."""
    split = {"compute": 0.0, "communication": 0.0, "waiting": 0.0}
    sending = dict.fromkeys((Resource.SEND, Resource.COLLECTIVE), "communication")
    kinds = {Resource.COMPUTE: "compute", Resource.RECEIVE: "waiting", **sending}
    end_seconds = -math.inf
    for event in sorted(events, key=lambda each: (each.start_seconds, -each.end_seconds)):
        if event.end_seconds > end_seconds:  # else it lies inside another one
            end_seconds = event.end_seconds
            split[kinds[event.action.kind.resource]] += event.end_seconds - event.start_seconds
    return split


def gather_timeline(events: tuple[TimelineEvent, ...], *, origin_seconds: float, plan: Plan, rank: int) -> Timeline | None:
    """Return the timeline on rank 0, None elsewhere; collective.

    events: this rank's, in seconds from `origin_seconds` on its host clock. Ranks of one host share that clock; the clocks of
    other hosts are aligned to rank 0's at a barrier, to about a network round trip. The first rank to start is at 0 seconds.
    """
    dist.barrier()
    own = events if plan.lanes[plan.lane_of_rank[rank]][0] == rank else ()
    mine = own, socket.gethostname(), origin_seconds, time.perf_counter()
    gathered = [mine] * dist.get_world_size() if rank == 0 else None
    dist.gather_object(mine, gathered)
    if gathered is None:
        return None
    _, first_host, _, first_barrier = gathered[0]
    starts = [origin + (0.0 if host == first_host else first_barrier - barrier) for _, host, origin, barrier in gathered]
    earliest = min(starts)
    aligned = (
        event._replace(start_seconds=event.start_seconds + shift, end_seconds=event.end_seconds + shift)
        for (of_rank, *_), shift in zip(gathered, (start - earliest for start in starts), strict=True)
        for event in of_rank
    )
    return Timeline(plan.lanes, tuple(aligned))
