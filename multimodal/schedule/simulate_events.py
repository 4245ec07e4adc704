"""The event kernel of the simulator: runs a schedule in array form on a clock."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from multimodal.kernels import kernels
from multimodal.references.simulate_events import NodeKind
from multimodal.references.simulate_events import simulate_events as reference
from multimodal.values.arrays.rows import Bytes, Floats, Integers

__all__ = ["EventArrays", "EventTimes", "NodeKind", "simulate_events"]


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


class EventTimes(NamedTuple):
    """Start and end of every node, in seconds; a send ends when its resources are free again, before it arrives."""

    start_seconds: Floats
    """[num_nodes] NaN for nodes that never started."""
    end_seconds: Floats
    """[num_nodes] NaN for nodes that never started."""
    positions: Integers
    """[num_lanes] number of entries of `lane_nodes` that the lane passed; all of them if it finished."""


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
    run = reference if kernels is None else kernels.simulate_events
    return EventTimes(*run(**vars(arrays)))


def run_without_messages(
    lane_starts: Integers, lane_nodes: Integers, kinds: Bytes, need_starts: Integers, needs: Integers, seconds: Floats
) -> EventTimes:
    """Run nodes (`EventArrays`) whose messages, if any, take no time and share nothing, in lanes without fillers."""
    arrays = EventArrays(
        lane_starts=lane_starts,
        lane_nodes=lane_nodes,
        lane_fillers=np.zeros(len(lane_nodes), np.uint8),
        kinds=kinds,
        need_starts=need_starts,
        needs=needs,
        receiver_starts=np.zeros(len(kinds) + 1, np.int64),
        receivers=np.zeros(0, np.int64),
        seconds=seconds,
        latency_seconds=np.zeros(len(kinds)),
        links=np.full(len(kinds), -1),
        num_links=0,
    )
    return simulate_events(arrays)
