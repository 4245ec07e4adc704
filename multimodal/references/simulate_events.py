"""The event kernel of the simulator: csrc/simulate_events.cpp, step by step."""

from collections import defaultdict
from enum import IntEnum
from math import nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multimodal.references.event_core import EventRun, rows_of


class NodeKind(IntEnum):
    """The kinds of nodes of the event graph."""

    COMPUTE = 0
    """Occupies its lanes, which wait for it."""
    SEND = 1
    """Is only started by its lanes; occupies their sending, the receivers' receiving and a link; arrives after a latency."""
    COLLECTIVE = 2
    """Is only started by its lanes; once all have started it, it occupies their collective resource."""
    GATE = 3
    """Each of its lanes waits until its needs have ended, and passes; it occupies nothing, and ends after the last one."""


def simulate_events(
    *, num_links: int, **arrays: NDArray[Any]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """Return the start and end of every node, and the position of every lane. arrays: `EventArrays`; num_links: not used."""
    run = _Run({name: array.tolist() for name, array in arrays.items()})
    for lane in range(len(run.entries)):
        run.advance(lane)
    run.run_events()
    return np.array(run.start_seconds), np.array(run.end_seconds), np.array(run.position, dtype=np.int64)


class _Run(EventRun[float]):
    """The state of one simulation. Events are ends of nodes, then, numbered on, lanes that decide whether to fill."""

    def __init__(self, arrays: dict[str, Any]) -> None:
        super().__init__(0.0)
        self.entries = rows_of(arrays["lane_starts"], arrays["lane_nodes"])
        self.is_filler = rows_of(arrays["lane_starts"], arrays["lane_fillers"])
        self.kinds, self.links = arrays["kinds"], arrays["links"]
        self.seconds: list[float] = arrays["seconds"]
        self.latency: list[float] = arrays["latency_seconds"]
        self.receivers = rows_of(arrays["receiver_starts"], arrays["receivers"])
        num_nodes, num_lanes = len(self.kinds), len(self.entries)
        self.lanes: list[list[int]] = [[] for _ in range(num_nodes)]
        for lane, nodes in enumerate(self.entries):
            for node in nodes:
                self.lanes[node].append(lane)
        self.followers: list[list[int]] = [[] for _ in range(num_nodes)]
        needs = rows_of(arrays["need_starts"], arrays["needs"])
        self.num_unmet = [len(row) for row in needs]
        for node, row in enumerate(needs):
            for need in row:
                self.followers[need].append(node)
        self.num_arrived = [0] * num_nodes
        """Lanes that have reached a node; for a computation, lanes that are at it."""
        self.start_seconds, self.end_seconds = [nan] * num_nodes, [nan] * num_nodes
        self.position = [0] * num_lanes
        self.running = [-1] * num_lanes
        self.pending: list[list[int]] = [[] for _ in range(num_lanes)]
        """Fillers that the lane has reached and not run."""
        self.num_tried = [0] * num_lanes
        """Number of `pending` fillers that were passed over while the carrier waits."""
        self.is_draining = [False] * num_lanes
        free = [defaultdict[int, float](float) for _ in range(4)]
        self.send_free, self.receive_free, self.collective_free, self.link_free = free

    def end(self, number: int) -> None:
        if number >= len(self.kinds):
            self._fill(number - len(self.kinds))
            return
        for follower in self.followers[number]:
            self.num_unmet[follower] -= 1
            if self.num_unmet[follower] == 0:
                self._meet(follower)
        if self.kinds[number] == NodeKind.COMPUTE:
            for lane in self.lanes[number]:
                self._leave(lane, number)

    def _is_at(self, lane: int, node: int) -> bool:
        position = self.position[lane]
        return position < len(self.entries[lane]) and self.entries[lane][position] == node

    def _meet(self, node: int) -> None:
        self._start_if_ready(node)
        for lane in self.lanes[node] if self.kinds[node] == NodeKind.GATE else ():
            if self._is_at(lane, node):
                self.advance(lane)

    def _leave(self, lane: int, node: int) -> None:
        """Advance a lane whose computation has ended."""
        self.running[lane] = -1
        if self.is_draining[lane]:
            self.pending[lane].pop(0)
        elif self._is_at(lane, node):
            self.position[lane] += 1
            self.is_draining[lane] = bool(self.pending[lane])
            self.num_tried[lane] = 0
        else:
            self.pending[lane].remove(node)
        self.advance(lane)

    def advance(self, lane: int) -> None:
        """Advance a free lane to its next computation."""
        entries, is_filler = self.entries[lane], self.is_filler[lane]
        while not self.is_draining[lane] and self.position[lane] < len(entries):
            node = entries[self.position[lane]]
            if is_filler[self.position[lane]]:
                self.pending[lane].append(node)
                self.position[lane] += 1
            elif self.kinds[node] == NodeKind.GATE and self.num_unmet[node]:
                return
            elif self.kinds[node] != NodeKind.COMPUTE:
                self.position[lane] += 1
                self._stand(node)
            else:
                self._stand(node)
                if self.running[lane] < 0 and self.num_tried[lane] < len(self.pending[lane]):
                    self.add(self.now, len(self.kinds) + lane)
                return
        if self.pending[lane]:
            self.is_draining[lane] = True
            self._stand(self.pending[lane][0])
        elif self.is_draining[lane]:
            self.is_draining[lane] = False
            self.advance(lane)

    def _stand(self, node: int) -> None:
        self.num_arrived[node] += 1
        self._start_if_ready(node)

    def _fill(self, lane: int) -> None:
        """Run the next filler in a lane whose carrier still waits."""
        if self.running[lane] >= 0 or self.is_draining[lane] or self.position[lane] == len(self.entries[lane]):
            return
        while self.num_tried[lane] < len(self.pending[lane]):
            filler = self.pending[lane][self.num_tried[lane]]
            if self.num_unmet[filler] == 0 and len(self.lanes[filler]) == 1:
                self.num_arrived[self.entries[lane][self.position[lane]]] -= 1
                self._run(filler)
                return
            self.num_tried[lane] += 1

    def _start_if_ready(self, node: int) -> None:
        if not self.num_unmet[node] and self.num_arrived[node] >= max(1, len(self.lanes[node])):
            self._run(node)

    def _run(self, node: int) -> None:
        """Run a node as soon as what it occupies is free."""
        kind, lanes, link = self.kinds[node], self.lanes[node], self.links[node]
        occupied: list[tuple[dict[int, float], int]] = []
        if kind == NodeKind.COMPUTE:
            for lane in lanes:
                self.running[lane] = node
        elif kind == NodeKind.COLLECTIVE:
            occupied = [(self.collective_free, lane) for lane in lanes]
        elif kind == NodeKind.SEND:
            occupied = [(self.send_free, lane) for lane in lanes]
            occupied += [(self.receive_free, lane) for lane in self.receivers[node]]
            occupied += [(self.link_free, link)] if link >= 0 else []
        start = max([self.now, *(free_at[each] for free_at, each in occupied)])
        end = start + self.seconds[node]
        for free_at, each in occupied:
            free_at[each] = end
        self.start_seconds[node], self.end_seconds[node] = start, end
        self.add(end + self.latency[node], node)
