"""Entrain's b_min: the samples of a batch from which units' shares of the work are stable (Entrain, Alg. 2)."""

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

NUM_TRIALS = math.ceil(math.log(0.05) / math.log(1 - 0.05))
"""k = ceil(ln alpha / ln(1 - p_error)): k equal outcomes bound the error with confidence 1 - alpha (Eq. C.5)."""
FIRST_SIZE = 8
"""The smallest batch to try."""
POOL_SIZE = 1024
"""Samples whose work is computed; batches are drawn from them."""
LARGEST_BATCH = 1 << 16
"""The largest batch to try: no batch is large enough if the proportions are on the border between two allocations."""


def proportional_gpus(work: dict[str, float], *, fewest: dict[str, int], num_gpus: int) -> dict[str, int]:
    """Divide GPUs in proportion to work, but at least `fewest` to each unit; the largest remainders are rounded up."""
    lifted: set[str] = set()
    while True:
        left = num_gpus - sum(fewest[unit] for unit in lifted)
        total = sum(amount for unit, amount in work.items() if unit not in lifted)
        shares = {
            unit: float(fewest[unit]) if unit in lifted else (left * amount / total if total else left / len(work))
            for unit, amount in work.items()
        }
        below = {unit for unit, share in shares.items() if share < fewest[unit]}
        if not below:
            break
        lifted |= below
    gpus = {unit: math.floor(share + 1e-9) for unit, share in shares.items()}
    remainders = sorted((unit for unit in gpus if unit not in lifted), key=lambda unit: gpus[unit] - shares[unit])
    for unit in remainders[: num_gpus - sum(gpus.values())]:
        gpus[unit] += 1
    return gpus


def stable_batch_size(work: Mapping[str, NDArray[np.float64]], *, num_gpus: int) -> int:
    """Return b_min: random batches of this many samples keep dividing a replica's GPUs alike (Entrain, Alg. 2).

    work: unit -> seconds of each sample of a pool, from which batches are drawn with replacement; num_gpus: a replica's GPUs, or
    blocks of them, which are divided in proportion to work, one at least (Entrain's ProportionalAllocation). Doubles the size
    from `FIRST_SIZE` until `NUM_TRIALS` trials agree with a reference draw, or it reaches `LARGEST_BATCH`. O(NUM_TRIALS x b_min)
    per size.
    """
    random = np.random.default_rng(0)
    columns = np.stack(list(work.values()))

    def draw(size: int) -> dict[str, int]:
        rows = random.integers(0, columns.shape[1], size)
        means = dict(zip(work, columns[:, rows].mean(axis=1).tolist(), strict=True))
        return proportional_gpus(means, fewest=dict.fromkeys(work, 1), num_gpus=num_gpus)

    size = FIRST_SIZE
    while size < LARGEST_BATCH:
        reference = draw(size)
        if all(draw(size) == reference for _ in range(NUM_TRIALS)):
            return size
        size *= 2
    return size
