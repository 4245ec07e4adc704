"""The cost of one batch, and a lower bound to compare partitions with."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from multimodal.balance.algorithms.post_balance import post_balance
from multimodal.balance.length_cost import LINEAR_COST, CostForm, LengthCost, integer_costs

MOST_ROUNDS = 16


def batch_cost(lengths: Sequence[float], cost: LengthCost) -> float:
    """Return the cost of a batch of these lengths, in tokens and without rounding; an empty batch costs nothing."""
    if not len(lengths):
        return 0
    linear, longest = sum(lengths), max(lengths)
    match cost.form:
        case CostForm.LINEAR:
            return linear
        case CostForm.LINEAR_QUADRATIC:
            return linear + cost.quadratic_weight * sum(length * length for length in lengths)
        case CostForm.PADDED:
            return len(lengths) * longest
        case CostForm.PADDED_ATTENTION:
            return linear + cost.quadratic_weight * (len(lengths) * longest * longest)


def partition_lower_bound(lengths: ArrayLike, *, num_bins: int, cost: LengthCost = LINEAR_COST) -> float:
    """Return a lower bound, in tokens, of the cost of the costliest bin in any partition.

    The bound is the optimum for `padded`, otherwise `lower_bound`; for `padded-attention` it is loose.
    """
    costs = integer_costs(lengths, cost=cost)
    if costs.additive is None:
        bins = post_balance(lengths, num_bins=num_bins, cost=cost, refinement_steps=0)
        return max(batch_cost(costs.lengths[bins == index].tolist(), cost) for index in np.unique(bins))
    order = np.argsort(-costs.lengths, kind="stable")
    padded = None if costs.padded is None else costs.padded[order].tolist()
    return lower_bound(costs.additive[order].tolist(), padded, num_bins=num_bins) / costs.scale


def lower_bound(additive: list[int], padded: list[int] | None, *, num_bins: int) -> int:
    """Return a lower bound of the cost of the costliest bin; costs descend.

    It is the largest of: the mean; the costliest item; the cheapest k + 1 of the first k num_bins + 1 items, since one bin holds
    k + 1 of these. No item is padded beyond its own length there, so with padding the bound is loose.
    """
    costs = additive if padded is None else [sum(pair) for pair in zip(additive, padded, strict=True)]
    crowded = (
        sum(costs[(num_bins - 1) * round_index : num_bins * round_index + 1])
        for round_index in range(MOST_ROUNDS + 1)
        if num_bins * round_index < len(costs)
    )
    return max(-(-sum(costs) // num_bins), *crowded)
