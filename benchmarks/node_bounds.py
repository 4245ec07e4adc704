"""Bounds and measures that node-wise rearrangement is held against."""

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from multimodal.balance.nodes.integer_program import build_program, solve_program
from multimodal.balance.nodes.node_volumes import NodeVolumes, VolumeMatrix, read_volumes
from multimodal.values.errors import AssignmentError


def lp_bound(volume: VolumeMatrix, *, ranks_per_node: int) -> float:
    """Return a lower bound on the most bytes that any rank must send to other nodes: Alg. 3 with fractions of batches.

    The true optimum can be far above it where few samples are large, see `single_node_bound`. Takes half a minute for
    2,560 ranks x 60 samples. Arguments and errors as in `rearrange_nodes`.
    """
    volumes = read_volumes(volume, ranks_per_node=ranks_per_node)
    if not volumes.volumes.size:
        return 0.0
    program = build_program(volumes)
    costs = program.objective
    bounds = [(0.0, None)] * (len(costs) - 1) + [(program.least, None)]
    solution = linprog(costs, A_ub=program.matrix, b_ub=program.limits, bounds=bounds, method="highs-ipm")
    if solution.fun is None:
        raise AssignmentError(f"HiGHS did not solve the relaxed program of {volumes.num_ranks} ranks: {solution.message}")
    return float(solution.fun) * program.bytes_per_unit


def single_node_bound(volume: VolumeMatrix, *, ranks_per_node: int, node: int, time_limit_seconds: float = 60.0) -> float:
    """Return a lower bound from one node that gets whatever batches it likes, whole ones: exact where others do not compete.

    node: most telling is the node of the rank that sends most after rearrangement. Arguments and errors as in `rearrange_nodes`.
    """
    volumes = read_volumes(volume, ranks_per_node=ranks_per_node)
    first, last = node * ranks_per_node, min((node + 1) * ranks_per_node, volumes.num_ranks)
    entries = slice(volumes.row_starts[first], volumes.row_starts[last])
    starts = np.clip(volumes.row_starts, entries.start, entries.stop) - entries.start
    alone = NodeVolumes(starts, volumes.batches[entries], volumes.volumes[entries], ranks_per_node)
    if not alone.volumes.size:
        return 0.0
    program = build_program(alone)
    solution = solve_program(program, time_limit_seconds=time_limit_seconds, upper=np.inf)
    bound: float = solution.mip_dual_bound
    return bound * program.bytes_per_unit


def inter_node_bytes(volume: VolumeMatrix, permutation: NDArray[np.integer], *, ranks_per_node: int) -> NDArray[np.int64]:
    """Return how many bytes each rank sends to ranks of other nodes: [num_ranks], int64.

    volume: see VolumeMatrix; entry [i, j] is what rank i holds of new batch j.
    permutation: [num_ranks]; rank r gets new batch permutation[r]. Alg. 3 minimizes the largest entry of what is returned.

    Raises AssignmentError when an argument is wrong.
    """
    volumes = read_volumes(volume, ranks_per_node=ranks_per_node)
    permutation = np.asarray(permutation)
    if permutation.shape != (volumes.num_ranks,) or not np.array_equal(np.sort(permutation), np.arange(volumes.num_ranks)):
        raise AssignmentError(
            f"the permutation, of shape {permutation.shape}, does not give each of {volumes.num_ranks} ranks one batch; "
            f"expected every number from 0 to {volumes.num_ranks - 1} once"
        )
    node_of_batch = np.empty(volumes.num_ranks, dtype=np.int64)
    node_of_batch[permutation] = np.arange(volumes.num_ranks) // ranks_per_node
    return volumes.bytes_sent(node_of_batch)
