"""Measures when each action of a step ran, by host time on CPU and by events on the stream on CUDA."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from multimodal.values.schedule import ACTION_TABLE, Action, Resource
from multimodal.values.timeline import TimelineEvent

Mark = float | torch.cuda.Event


class StepClock:
    """Records (action, start, end) of one rank; times count from `start_step`."""

    def __init__(self, *, lane: int) -> None:
        self._lane = lane
        self._is_cuda = torch.cuda.is_available()
        self._origin: Mark = 0.0
        self.origin_seconds = 0.0
        """Host time of the step's start."""
        self._spans: list[tuple[Action, Mark, Mark]] = []

    def start_step(self) -> None:
        """Forget the last step and count from now."""
        self._spans.clear()
        self._origin = self._mark()
        self.origin_seconds = time.perf_counter()

    @contextmanager
    def span(self, action: Action) -> Iterator[None]:
        """Record what runs inside as `action`."""
        start = self._mark()
        yield
        self._spans.append((action, start, self._mark()))

    def events(self) -> tuple[TimelineEvent, ...]:
        """What was recorded since `start_step`, in seconds."""
        if self._is_cuda:
            torch.cuda.synchronize()
        return tuple(
            TimelineEvent(action, self._lane, self._seconds(self._origin, start), self._seconds(self._origin, end))
            for action, start, end in self._spans
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
    """Split a lane's events: compute; communication (sending, collectives); waiting for receives."""
    split = {"compute": 0.0, "communication": 0.0, "waiting": 0.0}
    kinds = {
        Resource.COMPUTE: "compute",
        Resource.SEND: "communication",
        Resource.COLLECTIVE: "communication",
        Resource.RECEIVE: "waiting",
    }
    for event in events:
        split[kinds[ACTION_TABLE[event.action.kind].resource]] += event.end_seconds - event.start_seconds
    return split
