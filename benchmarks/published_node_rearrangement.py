"""OrchMLLM's node-wise rearrangement as the paper lists it (Alg. 3), by scipy: a peer for `node_rearrangement.py`."""

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import block_array, csr_matrix, eye_array, kron


def published_node_rearrangement(
    volume: csr_matrix, *, ranks_per_node: int, time_limit_seconds: float
) -> NDArray[np.int64] | None:
    """Solve the integer program with one variable per batch and node and one row per rank; None if it finds nothing in time.

    volume: [num_ranks, num_ranks] bytes; the number of ranks is a multiple of ranks_per_node.
    Returns [num_ranks]: rank r gets batch permutation[r]. Filled in: x is [d, d / c] (the listing declares [d / c, c]), volumes
    are divided by the largest that a rank holds (HiGHS solves none of the larger programs in bytes).
    """
    num_ranks = volume.shape[0]
    num_nodes = num_ranks // ranks_per_node
    held = np.asarray(volume.sum(axis=1)).ravel().astype(np.float64)
    entries = volume.tocoo()
    num_variables = num_ranks * num_nodes
    # Variable j * num_nodes + n: batch j goes to node n.
    kept = csr_matrix(
        (-entries.data / held.max(), (entries.row, entries.col * num_nodes + entries.row // ranks_per_node)),
        shape=(num_ranks, num_variables),
    )
    rows = block_array(
        [
            [kron(eye_array(num_ranks), np.ones((1, num_nodes))), None],
            [kron(np.ones((1, num_ranks)), eye_array(num_nodes)), None],
            [kept, -np.ones((num_ranks, 1))],
        ]
    ).tocsr()
    free = np.full(num_ranks, -np.inf)
    ones, room = np.ones(num_ranks), np.full(num_nodes, float(ranks_per_node))
    solution = milp(
        np.append(np.zeros(num_variables), 1.0),
        constraints=LinearConstraint(rows, np.concatenate([ones, room, free]), np.concatenate([ones, room, -held / held.max()])),
        integrality=np.append(np.ones(num_variables), 0),
        bounds=Bounds(0, np.append(np.ones(num_variables), np.inf)),
        options={"time_limit": time_limit_seconds},
    )
    if solution.x is None:
        return None
    node_of_batch = solution.x[:-1].reshape(num_ranks, num_nodes).argmax(axis=1)
    return np.argsort(node_of_batch, kind="stable")
