"""The kernel of `list_schedule` in Python: csrc/list_schedule.cpp, step by step."""

import heapq
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

from multimodal.schedule.link_actions import HAS_GRADIENT, HAS_WEIGHT_GRADIENT, IS_FORWARD, IS_GRADIENT, IS_WEIGHT_GRADIENT
from multimodal.values.arrays.rows import flat_rows
from multimodal.values.work.step_work import Bytes, Integers


def list_schedule_reference(
    *,
    lane_starts: Integers,
    lanes: Integers,
    costs: Integers,
    microbatches: Integers,
    groups: Integers,
    flags: Bytes,
    follower_starts: Integers,
    followers: Integers,
    release_starts: Integers,
    releases: Integers,
    phases: Integers,
    forward_limits: Integers,
    storage_limits: Integers,
    forward_floors: Integers,
    num_lanes: int,
) -> tuple[Integers, Integers]:
    """Return the actions of every lane in order, as rows; they are numbered by urgency, the most urgent first."""
    run = _Run(
        lanes=_rows(lane_starts, lanes),
        num_lanes=num_lanes,
        costs=costs.tolist(),
        microbatches=microbatches.tolist(),
        groups=groups.tolist(),
        flags=flags.tolist(),
        followers=_rows(follower_starts, followers),
        releases=_rows(release_starts, releases),
        phases=phases.tolist(),
        forward_limits=forward_limits.tolist(),
        storage_limits=storage_limits.tolist(),
        forward_floors=forward_floors.tolist(),
    )
    return flat_rows(run.run())


@dataclass
class _Run:
    """The state of one run: the open needs of each action, and the microbatches in flight per group of stages."""

    lanes: list[list[int]]
    num_lanes: int
    costs: list[int]
    microbatches: list[int]
    groups: list[int]
    flags: list[int]
    followers: list[list[int]]
    releases: list[list[int]]
    phases: list[int]
    forward_limits: list[int]
    storage_limits: list[int]
    forward_floors: list[int]

    def __post_init__(self) -> None:
        num_lanes, num_groups = self.num_lanes, len(self.forward_limits)
        self.num_unmet = [0] * len(self.lanes)
        self.num_holds = [0] * len(self.lanes)
        self.now = 0
        self.running: list[tuple[int, int]] = []
        self.ready: list[list[int]] = [[] for _ in range(num_lanes)]
        self.is_free = [True] * num_lanes
        self.touched: set[int] = set()
        self.order: list[list[int]] = [[] for _ in range(num_lanes)]
        self.in_flight, self.stored, self.begun, self.to_begin = ([0] * num_groups for _ in range(4))
        self.parked: list[set[int]] = [set() for _ in range(num_groups)]
        self.early: list[set[int]] = [set() for _ in range(num_groups)]
        self.num_left: list[dict[int, int]] = [defaultdict(int) for _ in range(num_lanes)]
        self.held: list[dict[int, list[int]]] = [defaultdict(list) for _ in range(num_lanes)]

    def run(self) -> list[list[int]]:
        for row in self.followers:
            for follower in row:
                self.num_unmet[follower] += 1
        for row in self.releases:
            for forward in row:
                self.num_holds[forward] += 1
        for index, group in enumerate(self.groups):
            self.to_begin[group] += self._gives_back(index)
        self._hold_phases()
        for index in [index for index, num_unmet in enumerate(self.num_unmet) if num_unmet == 0]:
            self._make_ready(index)
        while True:
            self._start_ready()
            if self.running:
                self._finish_next()
            elif any(self.early):
                self._let_back(self._first(self.early))
            elif any(self.parked):
                self._admit(self._first(self.parked))
            else:
                return self.order

    def _first(self, waiting: list[set[int]]) -> int:
        return min((index for group in waiting for index in group), key=lambda index: (self.microbatches[index], index))

    def _hold_phases(self) -> None:
        """Make every action wait, once per lane, for that lane's earlier phases."""
        for phase, lanes in zip(self.phases, self.lanes, strict=False):
            for lane in lanes:
                self.num_left[lane][phase] += 1
        for index, (phase, lanes) in enumerate(zip(self.phases, self.lanes, strict=False)):
            for lane in lanes:
                if phase > min(self.num_left[lane]):
                    self.held[lane][phase].append(index)
                    self.num_unmet[index] += 1

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
            heapq.heappush(self.ready[lane], index)
            self.touched.add(lane)

    def _start_ready(self) -> None:
        for lane in sorted(self.touched):
            if not self.is_free[lane] or not self.ready[lane]:
                continue
            index = self.ready[lane][0]
            if all(self.is_free[other] and self.ready[other][0] == index for other in self.lanes[index]):
                self._start(index)
        self.touched.clear()

    def _start(self, index: int) -> None:
        for lane in self.lanes[index]:
            heapq.heappop(self.ready[lane])
            self.is_free[lane] = False
            self.order[lane].append(index)
        if self._gives_back(index):
            self.begun[self.groups[index]] += 1
            self.to_begin[self.groups[index]] -= 1
            self._let_back_on_time(self.groups[index])
        heapq.heappush(self.running, (self.now + self.costs[index], index))

    def _finish_next(self) -> None:
        """Advance the clock to the next completion and finish all actions that complete then."""
        self.now = self.running[0][0]
        while self.running and self.running[0][0] == self.now:
            self._finish(heapq.heappop(self.running)[1])

    def _finish(self, index: int) -> None:
        for lane in self.lanes[index]:
            self.is_free[lane] = True
            self.touched.add(lane)
        self._end_flights(index)
        for follower in self.followers[index]:
            self._meet(follower)
        if self.phases:
            self._end_phases(index)

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

    def _end_phases(self, index: int) -> None:
        phase = self.phases[index]
        for lane in self.lanes[index]:
            num_left = self.num_left[lane]
            num_left[phase] -= 1
            if num_left[phase] == 0:
                del num_left[phase]
                for held in self.held[lane].pop(min(num_left), ()) if num_left else ():
                    self._meet(held)

    def _meet(self, index: int) -> None:
        self.num_unmet[index] -= 1
        if self.num_unmet[index] == 0:
            self._make_ready(index)


def _rows(starts: Integers, values: Integers) -> list[list[int]]:
    flat = values.tolist()
    return [flat[first:last] for first, last in pairwise(starts.tolist())]
