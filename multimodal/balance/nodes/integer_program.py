"""The integer program of node-wise rearrangement (OrchMLLM, Alg. 3) through HiGHS."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import csr_matrix, vstack

from multimodal.balance.nodes.node_search import fill_nodes
from multimodal.balance.nodes.node_volumes import NodeVolumes
from multimodal.values.errors import AssignmentError

_TIME_LIMIT_REACHED = 1


@dataclass(frozen=True, slots=True, eq=False)
class NodeProgram:
    """Minimize the last variable subject to matrix @ x <= limits; each of the others is 1 if a batch goes to a node.

    Volumes are divided by the largest that a rank holds. A batch has no variable for a node that holds nothing of it: sums below
    their limits leave room for such batches.
    """

    matrix: csr_matrix
    limits: NDArray[np.float64]
    batches: NDArray[np.int64]
    """[num_variables - 1]: the batch of each variable."""
    nodes: NDArray[np.int64]
    """[num_variables - 1]: the node of each variable."""
    least: float
    """A lower bound from every rank alone: it keeps as many batches as its node gets, the ones it holds most of."""
    bytes_per_unit: float

    @property
    def objective(self) -> NDArray[np.float64]:
        """[num_variables]: 1 for the last one, which is minimized."""
        return np.append(np.zeros(len(self.batches)), 1.0)


def solve_integer_program(volumes: NodeVolumes, *, start: NDArray[np.int64], time_limit_seconds: float) -> NDArray[np.int64]:
    """Return the best node of every batch, [num_ranks], to within the solver's tolerance of 1e-6.

    start: a node for every batch, returned where nothing is better.
    Raises AssignmentError when the time is up before the optimum is proven.
    """
    most_at_start = int(volumes.bytes_sent(start).max(initial=0))
    if not most_at_start:
        return start
    program = build_program(volumes)
    if program.least * program.bytes_per_unit >= most_at_start:
        return start
    upper = most_at_start / program.bytes_per_unit
    solution = solve_program(program, time_limit_seconds=time_limit_seconds, upper=upper * (1 + 1e-9))
    if solution.status == _TIME_LIMIT_REACHED:
        raise AssignmentError(
            f"the integer program of {volumes.num_ranks} ranks on {volumes.num_nodes} nodes was not solved in "
            f"{time_limit_seconds} s; allow more time or choose method 'search'"
        )
    if solution.x is None:
        return start
    nodes = np.full(volumes.num_ranks, -1, dtype=np.int64)
    chosen = solution.x[:-1] > 0.5
    nodes[program.batches[chosen]] = program.nodes[chosen]
    best = np.array(fill_nodes(nodes.tolist(), volumes=volumes), dtype=np.int64)
    return best if volumes.bytes_sent(best).max() < most_at_start else start


def solve_program(program: NodeProgram, *, time_limit_seconds: float, upper: float) -> OptimizeResult:
    """Solve a program whose optimum is at most `upper`; a result without x has none."""
    costs = program.objective
    return milp(
        costs,
        constraints=LinearConstraint(program.matrix, -np.inf, program.limits),
        integrality=1 - costs,
        bounds=Bounds(program.least * costs, np.where(costs > 0, upper, 1)),
        options={"time_limit": time_limit_seconds, "mip_rel_gap": 0.0},
    )


def build_program(volumes: NodeVolumes) -> NodeProgram:
    """Build Alg. 3's program: every batch goes to one node, no node gets more batches than it has ranks."""
    num_ranks, num_nodes = volumes.num_ranks, volumes.num_nodes
    held, unit = volumes.held, float(volumes.held.max())
    least = max(0, int((held - _keepable_bytes(volumes)).max()))
    # A rank that holds no more than what another one must send anyway binds nothing.
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
    return NodeProgram(
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
