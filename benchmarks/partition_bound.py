"""A lower bound to compare partitions with."""

import numpy as np
from numpy.typing import ArrayLike

from multimodal.balance.algorithms.post_balance import lower_bound, post_balance
from multimodal.balance.length_cost import LINEAR_COST, LengthCost, integer_costs


def partition_lower_bound(lengths: ArrayLike, *, num_bins: int, cost: LengthCost = LINEAR_COST) -> float:
    """Return a lower bound, in tokens, of the cost of the costliest bin in any partition.

    The bound is the optimum for `padded`, otherwise `lower_bound`; for `padded-attention` it is loose.
    """
    costs = integer_costs(lengths, cost=cost)
    if costs.additive is None:
        bins = post_balance(lengths, num_bins=num_bins, cost=cost, refinement_steps=0)
        return max(cost.batch_cost(costs.lengths[bins == index].tolist()) for index in np.unique(bins))
    order = np.argsort(-costs.lengths, kind="stable")
    padded = None if costs.padded is None else costs.padded[order].tolist()
    return lower_bound(costs.additive[order].tolist(), padded, num_bins=num_bins) / costs.scale
