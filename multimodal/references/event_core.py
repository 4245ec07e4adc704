"""The one loop of the references that run work in lanes on a clock: csrc/event_core.h."""

from heapq import heappop, heappush
from itertools import pairwise
from typing import Generic, TypeVar

Time = TypeVar("Time", int, float)


class EventRun(Generic[Time]):
    """A run of work on a clock. A subclass is a rule: what starts at a moment, and what follows from an end."""

    def __init__(self, now: Time) -> None:
        self.now: Time = now
        self._events: list[tuple[Time, int]] = []

    def add(self, time: Time, number: int) -> None:
        """Let an event happen."""
        heappush(self._events, (time, number))

    def run_events(self) -> None:
        """Start work at every moment, and end what ends at the next one; where nothing runs, force something to start."""
        while self.start() and (self._pass() or self.force()):
            pass

    def start(self) -> bool:
        """Start what can start now; False if the run is done. By default work starts when what it waits for ends."""
        return True

    def end(self, number: int) -> None:
        """Take note of an event. By default everything is looked at anew at every moment."""

    def force(self) -> bool:
        """Start something although it should wait; False if there is nothing."""
        return False

    def _pass(self) -> bool:
        """Go on to the next moment and end its events, by number, those included that are added meanwhile."""
        if not self._events:
            return False
        self.now = self._events[0][0]
        while self._events and self._events[0][0] == self.now:
            self.end(heappop(self._events)[1])
        return True


def rows_of(starts: list[int], values: list[int]) -> list[list[int]]:
    """Return rows as lists."""
    return [values[first:last] for first, last in pairwise(starts)]
