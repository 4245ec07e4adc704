"""The optimum of node-wise rearrangement (OrchMLLM, Alg. 3) and bounds of it, through HiGHS, to compare the search with."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, linprog, milp
from scipy.sparse import csr_matrix, vstack

from multimodal.balance.batch_work import sum_by
from multimodal.balance.rearrange_nodes import (
    NodeRearrangement,
    NodeVolumes,
    build_rearrangement,
    read_volumes,
    search_nodes,
)
from multimodal.values.errors import AssignmentError

_TIME_LIMIT_REACHED = 1


@dataclass(frozen=True, slots=True, eq=False)
class _Program:
    """Minimize the last variable subject to matrix @ x <= limits; every other variable is 1 if a batch goes to a node.

    Volumes are divided by the largest that a rank holds. A batch has no variable for a node that holds nothing of it: such
    batches are allowed by sums below their limits.
    """

    matrix: csr_matrix
    limits: NDArray[np.float64]
    batches: NDArray[np.int64]
    """[num_variables - 1]: the batch of each variable."""
    nodes: NDArray[np.int64]
    """[num_variables - 1]: the node of each variable."""
    least: float
    """Lower bound from every rank alone: it keeps as many batches as its node gets, those that it holds most of."""
    bytes_per_unit: float

    @property
    def objective(self) -> NDArray[np.float64]:
        """Return [num_variables]: 1 for the last variable, which is minimized."""
        return np.append(np.zeros(len(self.batches)), 1.0)


def rearrange_exactly(volume: ArrayLike, *, ranks_per_node: int, time_limit_seconds: float = 60.0) -> NodeRearrangement:
    """Return the optimum, within the solver's tolerance of 1e-6; the solver starts from the result of the search.

    Arguments as in `rearrange_nodes`. Raises AssignmentError if the time is up before the optimum is proven.
    """
    volumes = read_volumes(volume, ranks_per_node=ranks_per_node)
    start = search_nodes(volumes)
    nodes = _solve_integer_program(volumes, start=start, time_limit_seconds=time_limit_seconds)
    return build_rearrangement(volumes, nodes)


def _solve_integer_program(volumes: NodeVolumes, *, start: NDArray[np.int64], time_limit_seconds: float) -> NDArray[np.int64]:
    most_at_start = int(volumes.bytes_sent(start).max(initial=0))
    if not most_at_start:
        return start
    program = _build_program(volumes)
    if program.least * program.bytes_per_unit >= most_at_start:
        return start
    upper = most_at_start / program.bytes_per_unit
    solution = _solve(program, time_limit_seconds=time_limit_seconds, upper=upper * (1 + 1e-9))
    if solution.status == _TIME_LIMIT_REACHED:
        raise AssignmentError(
            f"the integer program of {volumes.num_ranks} ranks on {volumes.num_nodes} nodes was not solved in "
            f"{time_limit_seconds} s; allow more time"
        )
    if solution.x is None:
        return start
    nodes = np.full(volumes.num_ranks, -1, dtype=np.int64)
    chosen = solution.x[:-1] > 0.5
    nodes[program.batches[chosen]] = program.nodes[chosen]
    best = _fill_nodes(nodes, volumes)
    return best if volumes.bytes_sent(best).max() < most_at_start else start


def _fill_nodes(nodes: NDArray[np.int64], volumes: NodeVolumes) -> NDArray[np.int64]:
    """Give every batch whose node is -1 one that has room: its own rank's node, else the first."""
    filled, room = nodes.copy(), volumes.room - np.bincount(nodes[nodes >= 0], minlength=volumes.num_nodes)
    for batch in np.flatnonzero(nodes < 0).tolist():
        if room[batch // volumes.ranks_per_node]:
            filled[batch] = batch // volumes.ranks_per_node
            room[filled[batch]] -= 1
    filled[filled < 0] = np.repeat(np.arange(volumes.num_nodes), room)
    return filled


def lp_bound(volume: ArrayLike, *, ranks_per_node: int) -> float:
    """Return a lower bound on the most bytes that any rank must send to other nodes: Alg. 3 with fractions of batches.

    The true optimum can be far above it where few samples are large, see `single_node_bound`. Takes half a minute for
    2,560 ranks x 60 samples. Arguments as in `rearrange_nodes`.
    """
    volumes = read_volumes(volume, ranks_per_node=ranks_per_node)
    if not volumes.volumes.size:
        return 0.0
    program = _build_program(volumes)
    costs = program.objective
    bounds = [(0.0, None)] * (len(costs) - 1) + [(program.least, None)]
    solution = linprog(costs, A_ub=program.matrix, b_ub=program.limits, bounds=bounds, method="highs-ipm")
    if solution.fun is None:
        raise AssignmentError(f"HiGHS did not solve the relaxed program of {volumes.num_ranks} ranks: {solution.message}")
    return float(solution.fun) * program.bytes_per_unit


def single_node_bound(volume: ArrayLike, *, ranks_per_node: int, node: int, time_limit_seconds: float = 60.0) -> float:
    """Return a lower bound from one node that picks whole batches freely: exact if other nodes do not need the same batches.

    node: the best bound comes from the node of the rank that sends most after rearrangement. Arguments as in
    `rearrange_nodes`.
    """
    volumes = read_volumes(volume, ranks_per_node=ranks_per_node)
    first, last = node * ranks_per_node, min((node + 1) * ranks_per_node, volumes.num_ranks)
    entries = slice(volumes.row_starts[first], volumes.row_starts[last])
    starts = np.clip(volumes.row_starts, entries.start, entries.stop) - entries.start
    alone = NodeVolumes(starts, volumes.batches[entries], volumes.volumes[entries], ranks_per_node)
    if not alone.volumes.size:
        return 0.0
    program = _build_program(alone)
    solution = _solve(program, time_limit_seconds=time_limit_seconds, upper=np.inf)
    bound: float = solution.mip_dual_bound
    return bound * program.bytes_per_unit


def inter_node_bytes(volume: ArrayLike, permutation: NDArray[np.integer], *, ranks_per_node: int) -> NDArray[np.int64]:
    """Return the number of bytes that each rank sends to ranks of other nodes: [num_ranks], int64.

    volume: entry [i, j] is what rank i holds of new batch j.
    permutation: [num_ranks]; rank r gets new batch permutation[r]. Alg. 3 minimizes the largest entry of the result.
    """
    volumes = read_volumes(volume, ranks_per_node=ranks_per_node)
    node_of_batch = np.empty(volumes.num_ranks, dtype=np.int64)
    node_of_batch[permutation] = np.arange(volumes.num_ranks) // ranks_per_node
    return volumes.bytes_sent(node_of_batch)


def _solve(program: _Program, *, time_limit_seconds: float, upper: float) -> OptimizeResult:
    """Solve a program whose optimum is at most `upper`; the result has no x if none was found."""
    costs = program.objective
    return milp(
        costs,
        constraints=LinearConstraint(program.matrix, -np.inf, program.limits),
        integrality=1 - costs,
        bounds=Bounds(program.least * costs, np.where(costs > 0, upper, 1)),
        options={"time_limit": time_limit_seconds, "mip_rel_gap": 0.0},
    )


def _build_program(volumes: NodeVolumes) -> _Program:
    """Build Alg. 3's program: every batch goes to one node, and no node gets more batches than it has ranks."""
    num_ranks, num_nodes = volumes.num_ranks, volumes.num_nodes
    held = sum_by(volumes.ranks, volumes.volumes, volumes.num_ranks)
    unit = float(held.max())
    least = max(0, int((held - _keepable_bytes(volumes)).max()))
    # A rank that holds no more than another rank must send in any case adds no constraint.
    binds = held > least
    entries = binds[volumes.ranks]
    ranks, batches, bytes_held = volumes.ranks[entries], volumes.batches[entries], volumes.volumes[entries]
    choices, choice_of_entry = np.unique(batches * num_nodes + ranks // volumes.ranks_per_node, return_inverse=True)
    num_choices = len(choices)
    shape, all_choices, ones = (num_ranks, num_choices + 1), np.arange(num_choices), np.ones(num_choices)
    stays = csr_matrix((-bytes_held / unit, (ranks, choice_of_entry)), shape=shape)
    most = csr_matrix((-np.ones(num_ranks), (np.arange(num_ranks), np.full(num_ranks, num_choices))), shape=shape)
    one_node = csr_matrix((ones, (choices // num_nodes, all_choices)), shape=shape)
    room = csr_matrix((ones, (choices % num_nodes, all_choices)), shape=(num_nodes, num_choices + 1))
    return _Program(
        vstack([(stays + most)[binds], one_node, room]).tocsr(),
        np.concatenate([-held[binds] / unit, np.ones(num_ranks), volumes.room]),
        choices // num_nodes,
        choices % num_nodes,
        least / unit,
        unit,
    )


def _keepable_bytes(volumes: NodeVolumes) -> NDArray[np.int64]:
    """Return [num_ranks]: the most bytes that each rank could keep on its node if it alone chose the node's batches."""
    order = np.lexsort((-volumes.volumes, volumes.ranks))
    position_in_row = np.arange(len(order)) - np.repeat(volumes.row_starts[:-1], np.diff(volumes.row_starts))
    ranks = volumes.ranks
    keeps = position_in_row < volumes.room[ranks // volumes.ranks_per_node]
    most = np.zeros(volumes.num_ranks, dtype=np.int64)
    np.add.at(most, ranks[keeps], volumes.volumes[order][keeps])
    return most
