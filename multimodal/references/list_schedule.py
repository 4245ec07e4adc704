"""The list scheduler of the builders: csrc/list_schedule.cpp, step by step."""

from collections import defaultdict
from heapq import heappop, heappush
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multimodal.references.event_core import EventRun, rows_of

IS_FORWARD, IS_GRADIENT, IS_WEIGHT_GRADIENT, HAS_GRADIENT, HAS_WEIGHT_GRADIENT = 1, 2, 4, 8, 16
"""Bits of an action's flags; csrc/list_schedule.h."""


def list_schedule(*, num_lanes: int, **arrays: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the actions of every lane in order, as rows; they are numbered by urgency, the most urgent first.

    arrays: `ListedActions` of csrc/list_schedule.h.
    """
    run = _Run(num_lanes, {name: array.tolist() for name, array in arrays.items()})
    run.run_events()
    starts = np.cumsum([0, *map(len, run.order)], dtype=np.int64)
    return starts, np.array(list(chain.from_iterable(run.order)), np.int64)


class _Run(EventRun[int]):
    """The state of one run: the open needs of each action, and the microbatches in flight per group of stages."""

    def __init__(self, num_lanes: int, arrays: dict[str, list[int]]) -> None:
        super().__init__(0)
        self.lanes = rows_of(arrays["lane_starts"], arrays["lanes"])
        self.followers = rows_of(arrays["follower_starts"], arrays["followers"])
        self.releases = rows_of(arrays["release_starts"], arrays["releases"])
        self.costs, self.microbatches, self.groups = arrays["costs"], arrays["microbatches"], arrays["groups"]
        self.flags, self.phases = arrays["flags"], arrays["phases"]
        self.forward_limits, self.storage_limits = arrays["forward_limits"], arrays["storage_limits"]
        self.forward_floors = arrays["forward_floors"]
        self.ready: list[list[int]] = [[] for _ in range(num_lanes)]
        self.is_free = [True] * num_lanes
        self.touched: set[int] = set()
        self.order: list[list[int]] = [[] for _ in range(num_lanes)]
        num_groups = len(self.forward_limits)
        self.in_flight, self.stored, self.begun, self.to_begin = ([0] * num_groups for _ in range(4))
        self.parked: list[set[int]] = [set() for _ in range(num_groups)]
        self.early: list[set[int]] = [set() for _ in range(num_groups)]
        self.num_left: list[dict[int, int]] = [defaultdict(int) for _ in range(num_lanes)]
        self.held: list[dict[int, list[int]]] = [defaultdict(list) for _ in range(num_lanes)]
        self.num_unmet, self.num_holds = [0] * len(self.lanes), [0] * len(self.lanes)
        for follower in chain.from_iterable(self.followers):
            self.num_unmet[follower] += 1
        for forward in chain.from_iterable(self.releases):
            self.num_holds[forward] += 1
        for index, group in enumerate(self.groups):
            self.to_begin[group] += self._gives_back(index)
        # Every action waits, once per lane, for that lane's earlier phases.
        for phase, lanes in zip(self.phases, self.lanes, strict=False):
            for lane in lanes:
                self.num_left[lane][phase] += 1
        for index, (phase, lanes) in enumerate(zip(self.phases, self.lanes, strict=False)):
            for lane in lanes:
                if phase > min(self.num_left[lane]):
                    self.held[lane][phase].append(index)
                    self.num_unmet[index] += 1
        for index in [index for index, num_unmet in enumerate(self.num_unmet) if num_unmet == 0]:
            self._make_ready(index)

    def start(self) -> bool:
        for lane in sorted(self.touched):
            if not self.is_free[lane] or not self.ready[lane]:
                continue
            index = self.ready[lane][0]
            if all(self.is_free[other] and self.ready[other][0] == index for other in self.lanes[index]):
                self._begin(index)
        self.touched.clear()
        return True

    def force(self) -> bool:
        """Let the earliest backward or forward go on that a limit holds back."""
        if any(self.early):
            self._let_back(self._first(self.early))
            return True
        if any(self.parked):
            self._admit(self._first(self.parked))
            return True
        return False

    def end(self, number: int) -> None:
        for lane in self.lanes[number]:
            self.is_free[lane] = True
            self.touched.add(lane)
        self._end_flights(number)
        for follower in self.followers[number]:
            self._meet(follower)
        for lane in self.lanes[number] if self.phases else ():
            phase, num_left = self.phases[number], self.num_left[lane]
            num_left[phase] -= 1
            if num_left[phase] == 0:
                del num_left[phase]
                for held in self.held[lane].pop(min(num_left), ()) if num_left else ():
                    self._meet(held)

    def _first(self, waiting: list[set[int]]) -> int:
        return min((index for group in waiting for index in group), key=lambda index: (self.microbatches[index], index))

    def _make_ready(self, index: int) -> None:
        group = self.groups[index]
        if self.flags[index] & IS_FORWARD:
            if self._is_full(group):
                self.parked[group].add(index)
                return
            self._take_off(group)
        elif self.flags[index] & IS_GRADIENT:
            self.early[group].add(index)
            self._let_back_on_time(group)
            return
        self._enqueue(index)

    def _gives_back(self, index: int) -> bool:
        """Return True for a forward that a backward follows."""
        return self.flags[index] & (IS_FORWARD | HAS_GRADIENT) == IS_FORWARD | HAS_GRADIENT

    def _let_back_on_time(self, group: int) -> None:
        """Release the backwards that have enough microbatches in flight, or no forwards left to wait for."""
        while self.early[group] and (self.begun[group] >= self.forward_floors[group] or self.to_begin[group] == 0):
            self._let_back(min(self.early[group]))

    def _let_back(self, index: int) -> None:
        self.early[self.groups[index]].remove(index)
        self.begun[self.groups[index]] -= 1
        self._enqueue(index)

    def _is_full(self, group: int) -> bool:
        limit, storage = self.forward_limits[group], self.storage_limits[group]
        return 0 <= limit <= self.in_flight[group] or 0 <= storage <= self.stored[group]

    def _take_off(self, group: int) -> None:
        self.in_flight[group] += 1
        self.stored[group] += 1

    def _admit(self, index: int) -> None:
        self.parked[self.groups[index]].remove(index)
        self._take_off(self.groups[index])
        self._enqueue(index)

    def _enqueue(self, index: int) -> None:
        for lane in self.lanes[index]:
            heappush(self.ready[lane], index)
            self.touched.add(lane)

    def _begin(self, index: int) -> None:
        for lane in self.lanes[index]:
            heappop(self.ready[lane])
            self.is_free[lane] = False
            self.order[lane].append(index)
        if self._gives_back(index):
            self.begun[self.groups[index]] += 1
            self.to_begin[self.groups[index]] -= 1
            self._let_back_on_time(self.groups[index])
        self.add(self.now + self.costs[index], index)

    def _end_flights(self, index: int) -> None:
        """Note the microbatches that are no longer in flight or stored after an action, which may admit forwards."""
        landed = [index] if self.flags[index] & IS_FORWARD and self.num_holds[index] == 0 else []
        for forward in self.releases[index]:
            self.num_holds[forward] -= 1
            if self.num_holds[forward] == 0:
                landed.append(forward)
        for forward in landed:
            self.in_flight[self.groups[forward]] -= 1
            if not self.flags[forward] & HAS_WEIGHT_GRADIENT:
                self.stored[self.groups[forward]] -= 1
        if self.flags[index] & IS_WEIGHT_GRADIENT:
            self.stored[self.groups[index]] -= 1
        for group in dict.fromkeys([*(self.groups[forward] for forward in landed), self.groups[index]]):
            while self.parked[group] and not self._is_full(group):
                self._admit(min(self.parked[group]))

    def _meet(self, index: int) -> None:
        self.num_unmet[index] -= 1
        if self.num_unmet[index] == 0:
            self._make_ready(index)
