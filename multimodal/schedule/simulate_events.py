"""The event kernel of the simulator: runs a schedule in array form on a clock."""

from collections import defaultdict
from dataclasses import dataclass
from enum import IntEnum
from heapq import heappop, heappush
from itertools import pairwise
from math import nan

import numpy as np
from numpy.typing import NDArray

from multimodal.kernels import kernels
from multimodal.values.work.step_work import Bytes, Integers

Floats = NDArray[np.float64]


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


@dataclass(frozen=True)
class EventArrays:
    """One step as a graph of nodes. A collective is one node for the lanes of all replicas; receives are not nodes.

    Rows of variable length are given as `starts` (one more than there are rows) into a flat array.
    """

    lane_starts: Integers
    """[num_lanes + 1] into `lane_nodes`."""
    lane_nodes: Integers
    """The nodes of each lane, in its order."""
    lane_fillers: Bytes
    """[entries of `lane_nodes`] True for fillers; their carrier is the lane's next computation that is not a filler."""
    kinds: Bytes
    """[num_nodes] `NodeKind`."""
    need_starts: Integers
    """[num_nodes + 1] into `needs`."""
    needs: Integers
    """The nodes that must have ended (sends: arrived) before a node starts."""
    receiver_starts: Integers
    """[num_nodes + 1] into `receivers`."""
    receivers: Integers
    """The lanes that receive a send."""
    seconds: Floats
    """[num_nodes] seconds of computing, of occupying send, receive and link, or of the collective."""
    latency_seconds: Floats
    """[num_nodes] from the end of sending to arrival; 0 for other nodes."""
    links: Integers
    """[num_nodes] the shared link that a send passes, 0 .. num_links - 1; -1: none."""
    num_links: int

    @property
    def num_lanes(self) -> int:
        """Number of lanes."""
        return len(self.lane_starts) - 1

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.kinds)


@dataclass(frozen=True)
class EventTimes:
    """Start and end of every node, in seconds; a send ends when its resources are free again, before it arrives."""

    start_seconds: Floats
    """[num_nodes] NaN for nodes that never started."""
    end_seconds: Floats
    """[num_nodes] NaN for nodes that never started."""
    positions: Integers
    """[num_lanes] number of entries of `lane_nodes` that the lane passed; all of them if it finished."""


_ENDS, _FILLS = 0, 1
"""Kinds of events, in the order in which events of one moment are handled: ends, then the decisions that follow from them."""


def simulate_events(arrays: EventArrays) -> EventTimes:
    """Run every lane in its order, each node as early as its needs and resources allow.

    A computation starts when all its lanes have reached it and its needs have ended. Sends and collectives are only started by
    their lanes: a send occupies its lanes' sending, the receivers' receiving and its link together, as soon as all of these have
    finished earlier work; a collective that all its lanes have started occupies their collective resource. While a computation
    waits, the fillers before it run one after another, as long as it still waits when the next would start; fillers with unmet
    needs, or of several lanes, are passed over. The remaining fillers run right after the computation, before its sends. Of
    events at one moment, ends come first, by the number of the node.

    Lanes that wait for each other in a circle stop, see `EventTimes.positions`. Runs as a C++ kernel, with the same result to the
    last bit, if the kernels are built. O((nodes + needs) log lanes).
    """
    if kernels is None:
        return simulate_events_reference(arrays)
    return EventTimes(
        *kernels.simulate_events(
            arrays.lane_starts,
            arrays.lane_nodes,
            arrays.lane_fillers,
            arrays.kinds,
            arrays.need_starts,
            arrays.needs,
            arrays.receiver_starts,
            arrays.receivers,
            arrays.seconds,
            arrays.latency_seconds,
            arrays.links,
            num_links=arrays.num_links,
        )
    )


def simulate_events_reference(arrays: EventArrays) -> EventTimes:
    """Do the same as `simulate_events` in Python."""
    run = _Run(arrays)
    run.run()
    return EventTimes(np.array(run.start), np.array(run.end), np.array(run.position, dtype=np.int64))


class _Run:
    """The state of one simulation. `csrc/simulate_events.cpp` does the same, step by step."""

    def __init__(self, arrays: EventArrays) -> None:
        starts = arrays.lane_starts.tolist()
        entries, fillers = arrays.lane_nodes.tolist(), arrays.lane_fillers.tolist()
        self.entries = [entries[first:last] for first, last in pairwise(starts)]
        self.is_filler = [fillers[first:last] for first, last in pairwise(starts)]
        self.kinds, self.seconds = arrays.kinds.tolist(), arrays.seconds.tolist()
        self.latency, self.links = arrays.latency_seconds.tolist(), arrays.links.tolist()
        num_nodes, num_lanes = arrays.num_nodes, arrays.num_lanes
        self.receivers = _rows(arrays.receiver_starts.tolist(), arrays.receivers.tolist())
        self.lanes: list[list[int]] = [[] for _ in range(num_nodes)]
        for lane, nodes in enumerate(self.entries):
            for node in nodes:
                self.lanes[node].append(lane)
        self.followers: list[list[int]] = [[] for _ in range(num_nodes)]
        needs = _rows(arrays.need_starts.tolist(), arrays.needs.tolist())
        self.num_unmet = [len(row) for row in needs]
        for node, row in enumerate(needs):
            for need in row:
                self.followers[need].append(node)
        self.num_arrived = [0] * num_nodes
        """Lanes that have reached a node; for a computation, lanes that are at it."""
        self.start, self.end = [nan] * num_nodes, [nan] * num_nodes
        self.position = [0] * num_lanes
        self.running = [-1] * num_lanes
        self.pending: list[list[int]] = [[] for _ in range(num_lanes)]
        """Fillers that the lane has reached and not run."""
        self.num_tried = [0] * num_lanes
        """Number of `pending` fillers that were passed over while the carrier waits."""
        self.is_draining = [False] * num_lanes
        self.send_free, self.receive_free, self.collective_free = ([0.0] * num_lanes for _ in range(3))
        self.link_free: dict[int, float] = defaultdict(float)
        self.events: list[tuple[float, int, int]] = []

    def run(self) -> None:
        for lane in range(len(self.entries)):
            self._advance(lane, 0.0)
        while self.events:
            now, phase, index = heappop(self.events)
            if phase == _ENDS:
                self._finish(index, now)
            else:
                self._fill(index, now)

    def _finish(self, node: int, now: float) -> None:
        for follower in self.followers[node]:
            self.num_unmet[follower] -= 1
            if self.num_unmet[follower] == 0:
                self._meet(follower, now)
        if self.kinds[node] == NodeKind.COMPUTE:
            for lane in self.lanes[node]:
                self._leave(lane, node, now)

    def _meet(self, node: int, now: float) -> None:
        self._start_if_ready(node, now)
        for lane in self.lanes[node] if self.kinds[node] == NodeKind.GATE else ():
            if self.entries[lane][self.position[lane] :][:1] == [node]:
                self._advance(lane, now)

    def _leave(self, lane: int, node: int, now: float) -> None:
        """Advance a lane whose computation has ended."""
        self.running[lane] = -1
        position = self.position[lane]
        if self.is_draining[lane]:
            self.pending[lane].pop(0)
        elif position < len(self.entries[lane]) and self.entries[lane][position] == node:
            self.position[lane] += 1
            self.is_draining[lane] = bool(self.pending[lane])
            self.num_tried[lane] = 0
        else:
            self.pending[lane].remove(node)
        self._advance(lane, now)

    def _advance(self, lane: int, now: float) -> None:
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
                self._stand(node, now)
            else:
                self._stand(node, now)
                if self.running[lane] < 0 and self.num_tried[lane] < len(self.pending[lane]):
                    heappush(self.events, (now, _FILLS, lane))
                return
        if self.pending[lane]:
            self.is_draining[lane] = True
            self._stand(self.pending[lane][0], now)
        elif self.is_draining[lane]:
            self.is_draining[lane] = False
            self._advance(lane, now)

    def _stand(self, node: int, now: float) -> None:
        self.num_arrived[node] += 1
        self._start_if_ready(node, now)

    def _fill(self, lane: int, now: float) -> None:
        """Run the next filler in a lane whose carrier still waits."""
        if self.running[lane] >= 0 or self.is_draining[lane] or self.position[lane] == len(self.entries[lane]):
            return
        while self.num_tried[lane] < len(self.pending[lane]):
            filler = self.pending[lane][self.num_tried[lane]]
            if self.num_unmet[filler] == 0 and len(self.lanes[filler]) == 1:
                self.num_arrived[self.entries[lane][self.position[lane]]] -= 1
                self._compute(filler, now)
                return
            self.num_tried[lane] += 1

    def _start_if_ready(self, node: int, now: float) -> None:
        if self.num_unmet[node] or self.num_arrived[node] < max(1, len(self.lanes[node])):
            return
        kind = self.kinds[node]
        if kind == NodeKind.COMPUTE:
            self._compute(node, now)
        elif kind == NodeKind.SEND:
            self._send(node, now)
        elif kind == NodeKind.GATE:
            self._occupy(node, now)
        else:
            self._collect(node, now)

    def _compute(self, node: int, now: float) -> None:
        for lane in self.lanes[node]:
            self.running[lane] = node
        self._occupy(node, now)

    def _send(self, node: int, now: float) -> None:
        lanes, receivers, link = self.lanes[node], self.receivers[node], self.links[node]
        start = now
        for lane in lanes:
            start = max(start, self.send_free[lane])
        for lane in receivers:
            start = max(start, self.receive_free[lane])
        if link >= 0:
            start = max(start, self.link_free[link])
        end = start + self.seconds[node]
        for lane in lanes:
            self.send_free[lane] = end
        for lane in receivers:
            self.receive_free[lane] = end
        if link >= 0:
            self.link_free[link] = end
        self._occupy(node, start)

    def _collect(self, node: int, now: float) -> None:
        start = now
        for lane in self.lanes[node]:
            start = max(start, self.collective_free[lane])
        for lane in self.lanes[node]:
            self.collective_free[lane] = start + self.seconds[node]
        self._occupy(node, start)

    def _occupy(self, node: int, start: float) -> None:
        end = start + self.seconds[node]
        self.start[node], self.end[node] = start, end
        heappush(self.events, (end + self.latency[node], _ENDS, node))


def _rows(starts: list[int], values: list[int]) -> list[list[int]]:
    return [values[first:last] for first, last in pairwise(starts)]
