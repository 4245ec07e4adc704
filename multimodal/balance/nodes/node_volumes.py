"""The bytes that every rank holds of every new batch, checked and in one form."""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, issparse

from multimodal.values.errors import AssignmentError

VolumeMatrix: TypeAlias = Any
"""Bytes: a dense [num_ranks, num_ranks] array, a scipy sparse matrix, or (indptr, indices, data) of a CSR matrix."""
_INT64_MAX = 2**63 - 1


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


def read_volumes(volume: VolumeMatrix, *, ranks_per_node: int) -> NodeVolumes:
    """Check a volume matrix and bring it into one form; duplicate entries of a sparse one are added.

    Raises AssignmentError if it is not square, has an entry that is negative, NaN, infinite or not whole, if a rank's bytes
    do not fit int64, or when ranks_per_node is below 1.
    """
    if ranks_per_node < 1:
        raise AssignmentError(f"cannot put {ranks_per_node} ranks on a node; expected ranks_per_node of at least 1")
    rows = _read_rows(volume)
    _validate_entries(rows)
    exact = rows.astype(np.int64)  # A copy, so that the caller's array does not change.
    exact.sum_duplicates()
    exact.eliminate_zeros()
    return NodeVolumes(exact.indptr.astype(np.int64), exact.indices.astype(np.int64), exact.data, ranks_per_node)


def _read_rows(volume: VolumeMatrix) -> csr_matrix:
    try:
        if isinstance(volume, tuple):
            indptr, indices, data = map(np.asarray, volume)
            rows = csr_matrix((data, indices, indptr), shape=(len(indptr) - 1, len(indptr) - 1))
            rows.check_format(full_check=True)
        else:
            rows = csr_matrix(volume) if issparse(volume) else csr_matrix(np.asarray(volume))
    except (ValueError, TypeError) as problem:
        raise AssignmentError(f"the volumes are no matrix ({problem}); give [num_ranks, num_ranks] bytes") from problem
    if rows.shape[0] != rows.shape[1]:
        raise AssignmentError(
            f"the volumes are of {rows.shape[0]} ranks and {rows.shape[1]} new batches; expected one new batch per rank"
        )
    if rows.dtype.kind not in "biuf":
        raise AssignmentError(f"the volumes are of type {rows.dtype}; expected whole numbers of bytes")
    return rows


def _validate_entries(rows: csr_matrix) -> None:
    data = rows.data
    with np.errstate(invalid="ignore"):
        is_right = (data >= 0) & (data <= _INT64_MAX) & (data == np.floor(data) if data.dtype.kind == "f" else True)
    if not is_right.all():
        entry = int(np.flatnonzero(~is_right)[0])
        rank = int(np.searchsorted(rows.indptr, entry, side="right")) - 1
        raise AssignmentError(
            f"rank {rank} holds {data[entry]} bytes of new batch {rows.indices[entry]}; expected a whole number of at least 0 "
            "that fits int64"
        )
    held = np.add.reduceat(np.append(data, 0).astype(np.float64), rows.indptr[:-1]) if rows.shape[0] else np.zeros(0)
    held[np.diff(rows.indptr) == 0] = 0
    if (held >= _INT64_MAX).any():
        rank = int(held.argmax())
        raise AssignmentError(
            f"the bytes of rank {rank} add up to {held[rank]:.3g}, which does not fit int64; give a coarser unit"
        )


def _sum_by_rank(volumes: NDArray[np.int64], ranks: NDArray[np.int64], num_ranks: int) -> NDArray[np.int64]:
    """Add up in int64 (`bincount` would add in float64)."""
    sums = np.zeros(num_ranks, dtype=np.int64)
    np.add.at(sums, ranks, volumes)
    return sums
