"""A schedule as flat arrays: what the event kernel takes and gives."""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]


class NodeKind(IntEnum):
    """What a node of the event graph is."""

    COMPUTE = 0
    """Occupies its lanes; they wait for it."""
    SEND = 1
    """Only started by its lanes; occupies their sending, the receivers' receiving and a link; arrives after a latency."""
    COLLECTIVE = 2
    """Only started by its lanes; once all have, it occupies their collective resource."""


@dataclass(frozen=True)
class EventArrays:
    """One step as a graph of nodes. A collective is one node over the lanes of all replicas; receives are no nodes.

    Rows of variable length are given as `starts` (one more than there are rows) into a flat array.
    """

    lane_starts: Integers
    """[num_lanes + 1] into `lane_nodes`."""
    lane_nodes: Integers
    """The nodes that each lane comes to, in its order."""
    lane_fillers: Bytes
    """Per entry of `lane_nodes`: whether it is a filler (of the next computation in its lane that is none)."""
    kinds: Bytes
    """[num_nodes] `NodeKind`."""
    need_starts: Integers
    """[num_nodes + 1] into `needs`."""
    needs: Integers
    """The nodes that must have ended (sends: arrived) before a node starts."""
    receiver_starts: Integers
    """[num_nodes + 1] into `receivers`."""
    receivers: Integers
    """The lanes that a send goes to."""
    seconds: Floats
    """[num_nodes] of computing, of occupying send, receive and link, or of the collective."""
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
    """When every node started and ended, in seconds; a send ends when its resources are free again, before it arrives."""

    start_seconds: Floats
    """[num_nodes]; NaN where a node never started."""
    end_seconds: Floats
    """[num_nodes]; NaN where a node never started."""
    positions: Integers
    """[num_lanes] how many entries of `lane_nodes` a lane got past; all of them when it finished."""
