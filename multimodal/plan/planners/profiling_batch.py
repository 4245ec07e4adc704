"""How many samples are enough to know how GPUs should be divided (Entrain, Alg. 2)."""

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from multimodal.cost.unit_load import UnitLoad
from multimodal.plan.planners.flops_ratio import proportional_gpus
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.values.backward_need import layers_backward_need

POOL_SIZE = 1024
"""Samples whose work is computed; batches are drawn from them."""
LARGEST_BATCH = 1 << 16
"""Where the proportions lie on the border between two allocations, no batch is large enough; then this one must do."""


def sample_work(request: PlanningRequest, *, seed: int = 0) -> Mapping[str, NDArray[np.float64]]:
    """Return unit -> seconds of single samples, forward and backward on one GPU, of at most `POOL_SIZE` samples of the data."""
    random = np.random.default_rng(seed)
    count = len(request.lengths)
    rows = np.arange(count) if count <= POOL_SIZE else np.sort(random.choice(count, POOL_SIZE, replace=False))
    found = {}
    for unit in request.graph.units:
        loads = request.sample_loads[unit.name][rows]
        distinct, position = np.unique(loads, axis=0, return_inverse=True)
        kinds = {kind: (unit.layers.index(kind), unit.layers.count(kind)) for kind in dict.fromkeys(unit.layers)}
        needs = {
            kind: layers_backward_need(request.graph, unit.name, range(index, index + 1)) for kind, (index, _) in kinds.items()
        }
        seconds = []
        for row in distinct.tolist():
            load = UnitLoad(*map(int, row))
            layers = {kind: request.layer_costs.seconds(unit.name, kind, load, recompute=request.recompute) for kind in kinds}
            seconds.append(sum(kinds[kind][1] * (one.forward + one.backward(kind, needs[kind])) for kind, one in layers.items()))
        found[unit.name] = np.array(seconds)[position.ravel()]
    return found


def num_trials(*, alpha: float = 0.05, error: float = 0.05) -> int:
    """Return k = ceil(ln alpha / ln(1 - p_error)): so many equal outcomes bound the error with confidence 1 - alpha (Eq. C.5)."""
    return math.ceil(math.log(alpha) / math.log(1 - error))


def gpu_block(request: PlanningRequest) -> int:
    """Return what every unit's number of GPUs must be a multiple of: 1, or what fixed tp and cp ask for."""
    size = request.default_micro_batch_size
    sizes = (
        (request.tensor_parallel_sizes(unit), request.context_parallel_sizes(unit, micro_batch_size=size))
        for unit in request.graph.unit_names
    )
    return math.lcm(*(math.gcd(*tensor) * math.gcd(*context) for tensor, context in sizes))


def replica_allocation(work: Mapping[str, float], *, num_gpus: int, data_parallel_size: int, block: int = 1) -> dict[str, int]:
    """Divide a replica's GPUs over units in proportion to their work, at least one block each (Entrain's ProportionalAllocation).

    block: GPUs are handed out by so many, so that none are lost to sizes that a unit's tensor parallelism does not allow.
    """
    blocks = proportional_gpus(dict(work), fewest=dict.fromkeys(work, 1), num_gpus=num_gpus // data_parallel_size // block)
    return {unit: block * count for unit, count in blocks.items()}


def stable_batch_size(
    work: Mapping[str, NDArray[np.float64]],
    *,
    num_gpus: int,
    data_parallel_size: int,
    block: int = 1,
    first_size: int = 8,
    alpha: float = 0.05,
    error: float = 0.05,
    seed: int = 0,
) -> int:
    """Return b_min: random batches of so many samples keep giving the same allocation (Entrain, Alg. 2).

    work: unit -> seconds of each sample of a pool, from which batches are drawn with replacement; block: as for
    `replica_allocation`. Doubles the size from
    `first_size` until k trials agree with a reference draw. Terminates by the law of large numbers unless the proportions lie on
    a border, where it stops at `LARGEST_BATCH`. O(k x b_min) per size.
    """
    random = np.random.default_rng(seed)
    names = list(work)
    columns = np.stack([work[name] for name in names])
    trials = num_trials(alpha=alpha, error=error)

    def draw(size: int) -> dict[str, int]:
        rows = random.integers(0, columns.shape[1], size)
        means = dict(zip(names, columns[:, rows].mean(axis=1).tolist(), strict=True))
        return replica_allocation(means, num_gpus=num_gpus, data_parallel_size=data_parallel_size, block=block)

    size = first_size
    while size < LARGEST_BATCH:
        reference = draw(size)
        if all(draw(size) == reference for _ in range(trials)):
            return size
        size *= 2
    return size
