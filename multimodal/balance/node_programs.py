"""The programs of node-wise rearrangement (OrchMLLM, Alg. 3) through HiGHS: exact, relaxed, and for one node alone."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, linprog, milp
from scipy.sparse import csr_matrix, vstack

from multimodal.balance.node_search import fill_nodes
from multimodal.balance.node_volumes import NodeVolumes, VolumeMatrix, read_volumes
from multimodal.values.errors import AssignmentError

_TIME_LIMIT_REACHED = 1


@dataclass(frozen=True, slots=True, eq=False)
class _Program:
    """Minimize the last variable subject to matrix @ x <= limits; the others say whether a batch goes to a node.

    Volumes are divided by the largest that a rank holds. Batches that a node holds nothing of have no variable: sums below their
    limits leave room for them.
    """

    matrix: csr_matrix
    limits: NDArray[np.float64]
    batches: NDArray[np.int64]
    """[num_variables - 1]."""
    nodes: NDArray[np.int64]
    """[num_variables - 1]."""
    least: float
    """A bound that every rank alone has: it keeps as many batches as its node gets, the ones it holds most of."""
    bytes_per_unit: float


def lp_bound(volume: VolumeMatrix, *, ranks_per_node: int) -> float:
    """Return a lower bound on the most bytes that any rank must send to other nodes: Alg. 3 with fractions of batches.

    The true optimum can be far above it where few samples are large, see `single_node_bound`. Takes half a minute for
    2,560 ranks x 60 samples; for tests and benchmarks. Arguments and errors as in `rearrange_nodes`.
    """
    volumes = read_volumes(volume, ranks_per_node=ranks_per_node)
    if not volumes.volumes.size:
        return 0.0
    program = _build_program(volumes)
    costs = _costs(program)
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
    program = _build_program(alone)
    solution = _solve(program, time_limit_seconds=time_limit_seconds, upper=np.inf)
    bound: float = solution.mip_dual_bound
    return bound * program.bytes_per_unit


def solve_integer_program(volumes: NodeVolumes, *, start: NDArray[np.int64], time_limit_seconds: float) -> NDArray[np.int64]:
    """Return the best node of every batch, [num_ranks], to within the solver's tolerance of 1e-6.

    start: a node for every batch, returned where nothing is better.
    Raises AssignmentError when the time is up before the optimum is proven.
    """
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
            f"{time_limit_seconds} s; allow more time or choose method 'search'"
        )
    if solution.x is None:
        return start
    nodes = np.full(volumes.num_ranks, -1, dtype=np.int64)
    chosen = solution.x[:-1] > 0.5
    nodes[program.batches[chosen]] = program.nodes[chosen]
    found = nodes.tolist()
    fill_nodes(found, volumes=volumes)
    best = np.array(found, dtype=np.int64)
    return best if volumes.bytes_sent(best).max() < most_at_start else start


def _solve(program: _Program, *, time_limit_seconds: float, upper: float) -> OptimizeResult:
    costs = _costs(program)
    return milp(
        costs,
        constraints=LinearConstraint(program.matrix, -np.inf, program.limits),
        integrality=1 - costs,
        bounds=Bounds(program.least * costs, np.where(costs > 0, upper, 1)),
        options={"time_limit": time_limit_seconds, "mip_rel_gap": 0.0},
    )


def _costs(program: _Program) -> NDArray[np.float64]:
    return np.append(np.zeros(len(program.batches)), 1.0)


def _build_program(volumes: NodeVolumes) -> _Program:
    num_ranks, num_nodes = volumes.num_ranks, volumes.num_nodes
    held = volumes.held
    unit = float(held.max())
    least = max(0, int((held - _most_kept(volumes)).max()))
    # A rank that holds no more than what another one must send anyway binds nothing.
    binds = held > least
    entries = binds[volumes.ranks]
    ranks, batches, bytes_held = volumes.ranks[entries], volumes.batches[entries], volumes.volumes[entries]
    places, place_of_entry = np.unique(batches * num_nodes + ranks // volumes.ranks_per_node, return_inverse=True)
    num_places = len(places)
    kept = csr_matrix((-bytes_held / unit, (ranks, place_of_entry)), shape=(num_ranks, num_places + 1))
    most = csr_matrix((-np.ones(num_ranks), (np.arange(num_ranks), np.full(num_ranks, num_places))), shape=kept.shape)
    ones, each = np.ones(num_places), np.arange(num_places)
    one_node = csr_matrix((ones, (places // num_nodes, each)), shape=(num_ranks, num_places + 1))
    room = csr_matrix((ones, (places % num_nodes, each)), shape=(num_nodes, num_places + 1))
    return _Program(
        vstack([(kept + most)[binds], one_node, room]).tocsr(),
        np.concatenate([-held[binds] / unit, np.ones(num_ranks), volumes.room]),
        places // num_nodes,
        places % num_nodes,
        least / unit,
        unit,
    )


def _most_kept(volumes: NodeVolumes) -> NDArray[np.int64]:
    """Return [num_ranks]: the most bytes that each rank could keep on its node if it alone chose the node's batches."""
    order = np.lexsort((-volumes.volumes, volumes.ranks))
    place = np.arange(len(order)) - np.repeat(volumes.row_starts[:-1], np.diff(volumes.row_starts))
    ranks = volumes.ranks
    keeps = place < volumes.room[ranks // volumes.ranks_per_node]
    most = np.zeros(volumes.num_ranks, dtype=np.int64)
    np.add.at(most, ranks[keeps], volumes.volumes[order][keeps])
    return most
