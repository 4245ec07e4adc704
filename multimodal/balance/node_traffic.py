"""What crosses nodes when balanced batches go to other replicas than the ones that loaded their samples."""

from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_matrix

from multimodal.balance.batch_work import BatchWork
from multimodal.balance.node_volumes import inter_node_bytes
from multimodal.balance.rearrange_nodes import rearrange_nodes
from multimodal.values.assignment import Assignment


class NodeTraffic(NamedTuple):
    """Bytes that the rank with most of them sends to other nodes."""

    before: int
    """Where new batch j goes to replica j."""
    after: int
    """After node-wise rearrangement."""


def moved_volume(before: Assignment, after: Assignment, work: BatchWork, *, unit: str, bytes_per_token: int) -> csr_matrix:
    """Return [num_replicas, num_replicas] bytes of raw data that each replica loaded of each new batch. O(atoms).

    before: places atoms with who loads them; after: makes the new batches.
    """
    loaded = before.place_of_atom[unit]
    sources, batches, volumes = [], [], []
    for atom, (replica, _) in after.place_of_atom[unit].items():
        sources.append(loaded[atom][0])
        batches.append(replica)
        volumes.append(bytes_per_token * work.load(unit, atom).num_tokens)
    num_replicas = len(after.units[unit])
    entries = np.array(volumes, dtype=np.int64), (np.array(sources, dtype=np.int64), np.array(batches, dtype=np.int64))
    return csr_matrix(entries, shape=(num_replicas, num_replicas))


def measure_traffic(volume: csr_matrix, *, ranks_per_node: int) -> NodeTraffic:
    """Hold the volume between nodes against what node-wise rearrangement leaves of it (OrchMLLM, Alg. 3)."""
    identity = np.arange(volume.shape[0])
    arranged = rearrange_nodes(volume, ranks_per_node=ranks_per_node).permutation
    sent = (int(inter_node_bytes(volume, order, ranks_per_node=ranks_per_node).max()) for order in (identity, arranged))
    return NodeTraffic(*sent)
