"""The search behind node-wise rearrangement, in Python; `csrc/rearrange_nodes.cpp` does the same, step by step."""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from multimodal.balance.nodes.node_volumes import NodeVolumes


@dataclass(frozen=True, slots=True)
class NodeSearchLimits:
    """Limits of the search: counts instead of seconds, so that every rank ends with the same result."""

    num_first_swaps: int = 64
    """Chains of swaps that are tried from one state."""
    max_chain_length: int = 8
    """Swaps in a chain."""
    max_evaluations: int = 200_000
    """Total number of evaluated swaps; about 20 million a second in C++."""


class _Swap(NamedTuple):
    """Two batches that change places; the best swap has the lowest peak, then the lowest batches."""

    peak: int
    """The most bytes that any rank of the two nodes sends to other nodes afterwards."""
    leaving: int
    coming: int


class _Worst(NamedTuple):
    """The first of the ranks that send most, and the number of ranks that send as much."""

    sent: int
    num_equal: int
    rank: int

    def improves(self, other: "_Worst") -> bool:
        return self[:2] < other[:2]


def search_nodes_reference(volumes: NodeVolumes, *, limits: NodeSearchLimits) -> NDArray[np.int64]:
    """Return the node of every batch, [num_ranks]; never worse than batch j on the node of rank j."""
    columns = _Columns(volumes)
    identity = _NodeSearch(columns, limits, (np.arange(volumes.num_ranks) // volumes.ranks_per_node).tolist())
    greedy = _NodeSearch(columns, limits, _find_greedy_nodes(columns))
    search = greedy if greedy.worst().sent < identity.worst().sent else identity
    return np.array(search.run(), dtype=np.int64)


def fill_nodes(nodes: list[int], *, volumes: NodeVolumes) -> list[int]:
    """Return the nodes with one that has room for every batch whose node is -1: its own rank's node, else the first."""
    nodes, taken = nodes.copy(), np.bincount([node for node in nodes if node >= 0], minlength=volumes.num_nodes)
    room = (volumes.room - taken).tolist()
    for batch, node in enumerate(nodes):
        node_of_rank = batch // volumes.ranks_per_node
        if node < 0 and room[node_of_rank]:
            nodes[batch] = node_of_rank
            room[node_of_rank] -= 1
    free_nodes = iter([node for node, num_free in enumerate(room) for _ in range(num_free)])
    return [node if node >= 0 else next(free_nodes) for node in nodes]


class _Columns:
    """The volumes by rank and by (batch, node)."""

    def __init__(self, volumes: NodeVolumes) -> None:
        self.volumes, self.ranks_per_node = volumes, volumes.ranks_per_node
        entries = list(zip(volumes.batches.tolist(), volumes.volumes.tolist(), strict=True))
        self.rows = [dict(entries[first:last]) for first, last in pairwise(volumes.row_starts.tolist())]
        """Rank -> batch, ascending -> bytes."""
        self._holders: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for rank, row in enumerate(self.rows):
            for batch, held in row.items():
                self._holders.setdefault((batch, rank // self.ranks_per_node), []).append((rank, held))

    def holders(self, batch: int, node: int) -> Iterator[tuple[int, int]]:
        """Yield (rank, bytes) of the ranks of a node that hold a part of a batch."""
        yield from self._holders.get((batch, node), ())


def _find_greedy_nodes(columns: _Columns) -> list[int]:
    """Give the free batch of which it holds most to the rank with most left to send, again and again."""
    volumes = columns.volumes
    nodes, room = [-1] * volumes.num_ranks, volumes.room.tolist()
    left = [sum(row.values()) for row in columns.rows]
    wants = [sorted((held, -batch) for batch, held in row.items()) for row in columns.rows]
    senders = [(-volume, rank) for rank, volume in enumerate(left)]
    heapify(senders)
    while senders:
        minus_volume, rank = heappop(senders)
        node = rank // columns.ranks_per_node
        if -minus_volume != left[rank]:
            heappush(senders, (-left[rank], rank))
            continue
        while wants[rank] and nodes[-wants[rank][-1][1]] >= 0:
            wants[rank].pop()
        if not room[node] or not wants[rank]:
            continue
        batch = -wants[rank][-1][1]
        nodes[batch] = node
        room[node] -= 1
        for holder, held in columns.holders(batch, node):
            left[holder] -= held
        heappush(senders, (-left[rank], rank))
    return fill_nodes(nodes, volumes=volumes)


class _NodeSearch:
    """The state of one search: the node of each batch, and the bytes that each rank sends to other nodes because of it."""

    def __init__(self, columns: _Columns, limits: NodeSearchLimits, nodes: list[int]) -> None:
        self.columns, self.limits, self.nodes = columns, limits, nodes
        self.sent: list[int] = columns.volumes.bytes_sent(np.array(nodes, dtype=np.int64)).tolist()
        self.members: list[set[int]] = [set() for _ in range(columns.volumes.num_nodes)]
        for batch, node in enumerate(nodes):
            self.members[node].add(batch)
        self.moved: set[int] = set()
        """Batches that the current chain has moved."""
        self.num_evaluations = 0

    def worst(self) -> _Worst:
        most = max(self.sent, default=0)
        return _Worst(most, self.sent.count(most), self.sent.index(most) if self.sent else -1)

    def run(self) -> list[int]:
        """Reduce the bytes of the worst rank chain by chain, until no chain does or the evaluations are used up."""
        now = self.worst()
        while now.sent > 0 and self._improve(now):
            now = self.worst()
        return self.nodes

    def _improve(self, before: _Worst) -> bool:
        """Keep the first chain of swaps that improves the worst rank; undo the others."""
        return any(self._follow(first, before) for first in self._swaps_for(before.rank, self.limits.num_first_swaps))

    def _follow(self, swap: _Swap, before: _Worst) -> bool:
        """Make this swap and others after it, each the best for the rank that is then worst; True if that helped."""
        done: list[_Swap] = []
        while True:
            self._exchange(swap.leaving, swap.coming)
            self.moved |= {swap.leaving, swap.coming}
            done.append(swap)
            now = self.worst()
            improved = now.improves(before)
            following = [] if improved or len(done) == self.limits.max_chain_length else self._swaps_for(now.rank, 1)
            if not following:
                break
            swap = following[0]
        self.moved.clear()
        if not improved:
            for undone in reversed(done):
                self._exchange(undone.coming, undone.leaving)
        return improved

    def _swaps_for(self, rank: int, num_swaps: int) -> list[_Swap]:
        """Return the best swaps that reduce a rank's bytes, best first; none once the evaluations are used up."""
        if self.num_evaluations >= self.limits.max_evaluations:
            return []
        node, row = rank // self.columns.ranks_per_node, self.columns.rows[rank]
        swaps = [
            _Swap(
                max(self._peak_after(node, leaving, coming), self._peak_after(self.nodes[coming], coming, leaving)),
                leaving,
                coming,
            )
            for coming, held in row.items()
            if self.nodes[coming] != node and coming not in self.moved
            for leaving in self.members[node]
            if leaving not in self.moved and row.get(leaving, 0) < held
        ]
        self.num_evaluations += len(swaps)
        return sorted(swaps)[:num_swaps]

    def _peak_after(self, node: int, leaving: int, coming: int) -> int:
        first = node * self.columns.ranks_per_node
        sent = self.sent[first : first + self.columns.ranks_per_node]
        for rank, held in self.columns.holders(leaving, node):
            sent[rank - first] += held
        for rank, held in self.columns.holders(coming, node):
            sent[rank - first] -= held
        return max(sent)

    def _exchange(self, one: int, other: int) -> None:
        """Let two batches change places."""
        node_of_one, node_of_other = self.nodes[one], self.nodes[other]
        self._move(one, node_of_one, node_of_other)
        self._move(other, node_of_other, node_of_one)

    def _move(self, batch: int, origin: int, target: int) -> None:
        for rank, held in self.columns.holders(batch, origin):
            self.sent[rank] += held
        for rank, held in self.columns.holders(batch, target):
            self.sent[rank] -= held
        self.members[origin].remove(batch)
        self.members[target].add(batch)
        self.nodes[batch] = target
