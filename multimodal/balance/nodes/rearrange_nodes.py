"""Node-wise rearrangement: permutes new batches over ranks so that few bytes cross nodes (OrchMLLM, Alg. 3)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from multimodal.kernels import kernels

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

FIRST_SWAPS, MAX_CHAIN_LENGTH, MAX_EVALUATIONS = 64, 8, 200_000
"""Limits of the search: chains tried from one state, swaps in a chain, and swaps evaluated in all, about 20 million a second.

Counts instead of seconds, so that every rank ends with the same result.
"""


@dataclass(frozen=True, slots=True, eq=False)
class NodeVolumes:
    """A volume matrix in compressed rows: batches ascend in each, volumes are positive. Rank i is on node i // ranks_per_node."""

    row_starts: NDArray[np.int64]
    """[num_ranks + 1]: rank i has the entries row_starts[i] .. row_starts[i + 1] - 1."""
    batches: NDArray[np.int64]
    """[num_entries]: index of the new batch."""
    volumes: NDArray[np.int64]
    """[num_entries]: bytes of the batch that the rank holds."""
    ranks_per_node: int
    """The last node may have fewer."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks, which is also that of new batches."""
        return len(self.row_starts) - 1

    @property
    def num_nodes(self) -> int:
        """Number of nodes, including an incomplete last one."""
        return -(-self.num_ranks // self.ranks_per_node)

    @property
    def room(self) -> NDArray[np.int64]:
        """[num_nodes]: ranks of each node, which is the number of batches it gets."""
        return np.bincount(np.arange(self.num_ranks) // self.ranks_per_node).astype(np.int64)

    @property
    def ranks(self) -> NDArray[np.int64]:
        """[num_entries]: rank that holds each entry."""
        return np.repeat(np.arange(self.num_ranks), np.diff(self.row_starts))

    @property
    def held(self) -> NDArray[np.int64]:
        """[num_ranks]: bytes that each rank holds of all batches."""
        return _sum_by_rank(self.volumes, self.ranks, self.num_ranks)

    def bytes_sent(self, node_of_batch: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return [num_ranks]: bytes that each rank sends to other nodes if batches go to these nodes."""
        ranks = self.ranks
        leaves = node_of_batch[self.batches] != ranks // self.ranks_per_node
        return _sum_by_rank(self.volumes[leaves], ranks[leaves], self.num_ranks)


def read_volumes(volume: "ArrayLike | csr_matrix", *, ranks_per_node: int) -> NodeVolumes:
    """Bring a volume matrix into one form; duplicate entries of a sparse one are added.

    volume: [num_ranks, num_ranks] whole numbers of bytes, at least 0, dense or scipy sparse; a row's sum fits int64.
    """
    from scipy.sparse import csr_matrix  # loaded when first used

    exact = csr_matrix(volume).astype(np.int64)  # A copy, so that the caller's array does not change.
    exact.sum_duplicates()
    exact.eliminate_zeros()
    return NodeVolumes(exact.indptr.astype(np.int64), exact.indices.astype(np.int64), exact.data, ranks_per_node)


def _sum_by_rank(volumes: NDArray[np.int64], ranks: NDArray[np.int64], num_ranks: int) -> NDArray[np.int64]:
    """Add up in int64 (`bincount` would add in float64)."""
    sums = np.zeros(num_ranks, dtype=np.int64)
    np.add.at(sums, ranks, volumes)
    return sums


@dataclass(frozen=True, slots=True, eq=False)
class NodeRearrangement:
    """A permutation of new batches over ranks."""

    permutation: NDArray[np.int64]
    """[num_ranks]: rank r gets new batch permutation[r]. A batch whose own rank is on its node stays on that rank."""
    bytes_before: NDArray[np.int64]
    """[num_ranks]: bytes that each rank sends to other nodes if rank r gets new batch r."""
    bytes_after: NDArray[np.int64]
    """[num_ranks]: the same under the permutation; its maximum has been minimised."""


def rearrange_nodes(volume: "ArrayLike | csr_matrix", *, ranks_per_node: int) -> NodeRearrangement:
    """Permute balanced batches over ranks such that the most bytes that any rank sends to other nodes are minimal.

    The objective is OrchMLLM's (5): the maximum over ranks i of the sum of volume[i, j] over the batches j whose new rank is on
    another node than i. Two slips of the paper are read as intended: its text calls this the intra-node volume, and its listing
    declares x as [d / c, c] where it uses [d, d / c] (batch, node). The rank of a batch within a node does not matter here.

    The search takes the better of the identity and a greedy start (the rank with most left to send gets the free batch of which
    it holds most), then follows chains of swaps of two batches: each swap helps the rank that is then worst and may make others
    worse; a chain is kept as soon as the worst rank, or the number of ranks as bad as it, has improved. The result is never worse
    than the identity, and depends only on the arguments.

    volume: as in `read_volumes`; entry [i, j] is the number of bytes that rank i holds of new batch j.
    ranks_per_node: rank i is on node i // ranks_per_node; the last node may have fewer ranks.

    The search is a C++ kernel; without the kernels, batches are placed greedily, which is never worse than the identity, either.
    O(entries log entries) for the start, then at most `MAX_EVALUATIONS` swaps of O(ranks_per_node).
    """
    volumes = read_volumes(volume, ranks_per_node=ranks_per_node)
    return build_rearrangement(volumes, search_nodes(volumes))


def search_nodes(volumes: NodeVolumes) -> NDArray[np.int64]:
    """Return the node of every batch, [num_ranks]."""
    if kernels is None:
        return _place_greedily(volumes)
    return kernels.rearrange_nodes(
        volumes.row_starts,
        volumes.batches,
        volumes.volumes,
        ranks_per_node=volumes.ranks_per_node,
        num_first_swaps=FIRST_SWAPS,
        max_chain_length=MAX_CHAIN_LENGTH,
        max_evaluations=MAX_EVALUATIONS,
    )


def _place_greedily(volumes: NodeVolumes) -> NDArray[np.int64]:
    """Give each batch to the node with room that holds most of it; those of which a node holds most choose first."""
    node_of_rank, room = np.arange(volumes.num_ranks) // volumes.ranks_per_node, volumes.room
    held = np.zeros((volumes.num_nodes, volumes.num_ranks))
    np.add.at(held, (node_of_rank[volumes.ranks], volumes.batches), volumes.volumes)
    found = np.zeros_like(node_of_rank)
    for batch in np.argsort(-held.max(axis=0, initial=0), kind="stable"):
        found[batch] = np.where(room > 0, held[:, batch], -1).argmax()
        room[found[batch]] -= 1
    is_better = volumes.bytes_sent(found).max(initial=0) < volumes.bytes_sent(node_of_rank).max(initial=0)
    return found if is_better else node_of_rank


def build_rearrangement(volumes: NodeVolumes, node_of_batch: NDArray[np.int64]) -> NodeRearrangement:
    """Give the batches of every node to its ranks; a batch whose own rank is there stays on it."""
    node_of_rank = np.arange(volumes.num_ranks) // volumes.ranks_per_node
    stays = node_of_batch == node_of_rank
    permutation = np.where(stays, np.arange(volumes.num_ranks), -1)
    # Both sides in the order of nodes: a node receives as many batches as it has ranks whose own batch leaves.
    arriving = np.flatnonzero(~stays)
    permutation[~stays] = arriving[np.argsort(node_of_batch[arriving], kind="stable")]
    return NodeRearrangement(permutation, volumes.bytes_sent(node_of_rank), volumes.bytes_sent(node_of_batch))
