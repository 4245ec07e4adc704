"""The kernel of `execute_lanes` in Python: csrc/execute_lanes.cpp, step by step."""

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from multimodal.values.action import Resource
from multimodal.values.work.step_work import RESOURCE_NUMBERS, Bytes, Integers

_SEND, _RECEIVE = RESOURCE_NUMBERS[Resource.SEND], RESOURCE_NUMBERS[Resource.RECEIVE]
Floats = NDArray[np.float64]


def execute_lanes_reference(
    *,
    lane_starts: Integers,
    lane_actions: Integers,
    resources: Bytes,
    stages: Integers,
    stage_starts: Integers,
    stage_lanes: Integers,
    need_starts: Integers,
    needs: Integers,
    collectives: Integers,
    member_starts: Integers,
    members: Integers,
    durations: Floats,
) -> tuple[Integers, Integers, Floats, Floats, Integers, Bytes]:
    """Return events (pieces, lanes, starts, ends), the lanes' positions, and which pieces are complete."""
    lane_rows = _rows(stage_starts, stage_lanes)
    run = _Run(
        lanes=_rows(lane_starts, lane_actions),
        resources=resources.tolist(),
        lanes_of=[lane_rows[stage] for stage in stages.tolist()],
        needs=_rows(need_starts, needs),
        collectives=collectives.tolist(),
        members=_rows(member_starts, members),
        durations=durations.tolist(),
    )
    run.advance_all()
    pieces, lanes, starts, ends = zip(*run.events, strict=True) if run.events else ((), (), (), ())
    return (
        np.array(pieces, np.int64),
        np.array(lanes, np.int64),
        np.array(starts, np.float64),
        np.array(ends, np.float64),
        np.array(run.positions, np.int64),
        np.array([time >= 0 for time in run.done_at], np.uint8),
    )


@dataclass
class _Run:
    """The state of one execution. Times do not depend on the order in which lanes are visited."""

    lanes: list[list[int]]
    resources: list[int]
    lanes_of: list[list[int]]
    needs: list[list[int]]
    collectives: list[int]
    members: list[list[int]]
    durations: list[float]

    def __post_init__(self) -> None:
        num_pieces = len(self.resources)
        self.positions, self.free_at = [0] * len(self.lanes), [0.0] * len(self.lanes)
        self.done_at = [-1.0] * num_pieces
        """-1: not complete."""
        self.num_passed, self.passed_at = [0] * num_pieces, [0.0] * num_pieces
        self.waiters: list[set[int]] = [set() for _ in range(num_pieces)]
        self.queue = deque(range(len(self.lanes)))
        self.events: list[tuple[int, int, float, float]] = []

    def advance_all(self) -> None:
        while self.queue:
            lane = self.queue.popleft()
            while self._head(lane) >= 0 and self._advance(lane):
                pass

    def _head(self, lane: int) -> int:
        position = self.positions[lane]
        return self.lanes[lane][position] if position < len(self.lanes[lane]) else -1

    def _advance(self, lane: int) -> bool:
        piece = self._head(lane)
        if self.resources[piece] == _SEND:
            if not self._is_met(piece, [lane]):
                return False
            self._pass(piece, lane)
            return True
        if self.resources[piece] == _RECEIVE:
            self._pass(piece, lane)
            send = self.needs[piece][0]
            if self.done_at[send] < 0:
                self.waiters[send].add(lane)
            return True
        return self._compute(piece)

    def _pass(self, piece: int, lane: int) -> None:
        """Pass a message; it is complete when all lanes of its stage have passed it."""
        self.positions[lane] += 1
        self.passed_at[piece] = max(self.passed_at[piece], self.free_at[lane])
        self.num_passed[piece] += 1
        if self.num_passed[piece] == len(self.lanes_of[piece]) and self.resources[piece] == _SEND:
            self._complete(piece, self.passed_at[piece])

    def _awaited(self, need: int) -> int:
        """Return the piece whose end meets a need: for a receive, its send."""
        return self.needs[need][0] if self.resources[need] == _RECEIVE else need

    def _ended_at(self, need: int) -> float:
        """Return the time at which a need was met, or -1; a receive is met when posted in all lanes of its stage, and sent."""
        if self.resources[need] == _RECEIVE and self.num_passed[need] < len(self.lanes_of[need]):
            return -1.0
        return self.done_at[self._awaited(need)]

    def _is_met(self, piece: int, lanes: list[int]) -> bool:
        for need in self.needs[piece]:
            if self._ended_at(need) < 0:
                self.waiters[self._awaited(need)].update(lanes)
                return False
        return True

    def _compute(self, piece: int) -> bool:
        collective = self.collectives[piece]
        together = [piece] if collective < 0 else self.members[collective]
        lanes = list(dict.fromkeys(lane for each in together for lane in self.lanes_of[each]))
        if not {self._head(lane) for lane in lanes} <= set(together):
            return False
        if not all(self._is_met(each, lanes) for each in together):
            return False
        ends = (self._ended_at(need) for each in together for need in self.needs[each])
        start = max([0.0, *ends, *(self.free_at[lane] for lane in lanes)])
        for each in together:
            end = start + self.durations[each]
            for lane in self.lanes_of[each]:
                if end > start:
                    self.events.append((each, lane, start, end))
                self.positions[lane] += 1
                self.free_at[lane] = end
            self._complete(each, end)
        self.queue.extend(lanes)
        return True

    def _complete(self, piece: int, time: float) -> None:
        self.done_at[piece] = time
        self.queue.extend(sorted(self.waiters[piece]))
        self.waiters[piece].clear()


def _rows(starts: Integers, values: Integers) -> list[list[int]]:
    flat = values.tolist()
    return [flat[first:last] for first, last in pairwise(starts.tolist())]
