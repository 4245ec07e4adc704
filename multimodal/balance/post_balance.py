"""Post-balancing: spreads the items of a drawn batch over bins so that the costliest bin costs as little as possible."""

import math
import operator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from multimodal.balance.exchange_refinement import refine_by_exchange
from multimodal.balance.integer_costs import IntegerCosts, integer_costs, validate_lengths
from multimodal.balance.longest_first_partition import Partition, partition_longest_first_reference
from multimodal.balance.padded_partition import partition_padded
from multimodal.balance.unit_cost import LINEAR_COST, UnitCost
from multimodal.kernels import kernels
from multimodal.values.errors import AssignmentError

REFINEMENT_STEPS = 2**18
"""Default budget of the local search, about half a millisecond of the C++ kernel."""

_LARGEST_NUM_BINS = 2**31 - 1
_MOST_ROUNDS = 16


def post_balance(
    lengths: ArrayLike,
    *,
    num_bins: int,
    cost: UnitCost = LINEAR_COST,
    max_items_per_bin: int | None = None,
    refinement_steps: int = REFINEMENT_STEPS,
) -> Partition:
    """Return per bin (a replica, or a microbatch) the indices of its items, longest first.

    The greedy step depends on how the unit's cost grows (OrchMLLM, Sec. 5.1 and Appendix A):

    - linear (Alg. 1) and linear+quadratic (Alg. 4): longest first onto the cheapest bin. Both are sums over items, so the
      costliest bin is at most 4/3 - 1/(3 num_bins) times the optimum (Graham 1969) while bins have no limit. The paper compares
      the sums of lengths with a tolerance, then those of squares; that is no order (a < b < c < a can happen), and the cost
      itself is what counts. Its tolerance survives as the unit that costs are rounded to, see `IntegerCosts`.
    - padded (Alg. 2): binary search over the bound; optimal, see `partition_padded`.
    - padded-attention (Alg. 5): the same search, and trials that fill bins less and place the rest where it is cheapest.

    A local search then exchanges items between the costliest and cheaper bins, see `refine_by_exchange`; it never makes the
    costliest bin costlier. Equal lengths go by item index, equal costs by bin index.

    lengths: [num_items] whole numbers of tokens, not negative, at least one.
    num_bins: at least 1; with fewer items than bins some stay empty.
    max_items_per_bin: a bin that holds so many is full; None: no limit.
    refinement_steps: budget of the local search in looks at items, 0 for none. It is no time, which would end the search at
        different places on different ranks: the result is a function of the arguments alone.

    Runs as a C++ kernel where that is built, with the same result. Raises AssignmentError when an argument is out of range.
    O(n log num_bins + refinement_steps).
    """
    bin_of_item = post_balance_array(
        lengths, num_bins=num_bins, cost=cost, max_items_per_bin=max_items_per_bin, refinement_steps=refinement_steps
    )
    return _to_partition(np.asarray(lengths), bin_of_item, num_bins)


def post_balance_array(
    lengths: ArrayLike,
    *,
    num_bins: int,
    cost: UnitCost = LINEAR_COST,
    max_items_per_bin: int | None = None,
    refinement_steps: int = REFINEMENT_STEPS,
) -> NDArray[np.int32]:
    """Return the bin of each item, [num_items] int32, of the partition that `post_balance` returns.

    The form for large batches: an int64 array goes to the kernel as it is. Arguments and errors are those of `post_balance`.
    """
    costs = integer_costs(lengths, cost=cost)
    limit = _validate_bins(len(costs.lengths), num_bins, max_items_per_bin)
    if kernels is None:
        return _balance_reference(costs, num_bins, limit, refinement_steps)
    return kernels.post_balance(
        costs.lengths,
        costs.additive,
        costs.padded,
        num_bins=num_bins,
        max_items_per_bin=limit,
        refinement_steps=refinement_steps,
    )


def post_balance_reference(
    lengths: ArrayLike,
    *,
    num_bins: int,
    cost: UnitCost = LINEAR_COST,
    max_items_per_bin: int | None = None,
    refinement_steps: int = REFINEMENT_STEPS,
) -> Partition:
    """Do in Python what `post_balance` does; arguments, result and errors are the same."""
    costs = integer_costs(lengths, cost=cost)
    limit = _validate_bins(len(costs.lengths), num_bins, max_items_per_bin)
    return _to_partition(np.asarray(lengths), _balance_reference(costs, num_bins, limit, refinement_steps), num_bins)


def post_balance_lower_bound(lengths: ArrayLike, *, num_bins: int, cost: UnitCost = LINEAR_COST) -> float:
    """Return what the costliest bin costs at least in any partition, in tokens.

    The optimum for `padded`. Else the largest of: the mean; the longest item; the shortest k + 1 of the first k num_bins + 1
    items, longest first, of which one bin holds k + 1. Nothing is padded beyond itself there, so for `padded-attention` it
    is loose. Raises AssignmentError when an argument is out of range. O(n log n).
    """
    costs = integer_costs(lengths, cost=cost)
    _validate_bins(len(costs.lengths), num_bins, None)
    if costs.additive is None:
        parts = post_balance(lengths, num_bins=num_bins, cost=cost, refinement_steps=0)
        tokens = validate_lengths(lengths)
        return max(cost.batch_cost(tokens[list(part)].tolist()) for part in parts if part)
    additive, padded = _rank(costs, np.argsort(-costs.lengths, kind="stable"))
    return _lower_bound(additive, padded, num_bins) / costs.scale


def _balance_reference(costs: IntegerCosts, num_bins: int, limit: int, num_steps: int) -> NDArray[np.int32]:
    """The bin of each item: a greedy step by the form of the cost, then the local search where that was not exact."""
    order = np.argsort(-costs.lengths, kind="stable")
    additive, padded = _rank(costs, order)
    bound = _lower_bound(additive, padded, num_bins)
    if padded is None:
        parts = partition_longest_first_reference(additive, num_bins=num_bins, max_items_per_bin=limit)
        bin_of_rank = [0] * len(order)
        for index, part in enumerate(parts):
            for rank in part:
                bin_of_rank[rank] = index
    else:
        bin_of_rank = partition_padded(additive, padded, num_bins=num_bins, max_items_per_bin=limit, lower_bound=bound)
    if costs.additive is not None:
        bin_of_rank = refine_by_exchange(
            bin_of_rank, additive, padded, num_bins=num_bins, max_items_per_bin=limit, bound=bound, num_steps=num_steps
        )
    bin_of_item = np.empty(len(order), dtype=np.int32)
    bin_of_item[order] = bin_of_rank
    return bin_of_item


def _rank(costs: IntegerCosts, order: NDArray[np.int64]) -> tuple[list[int], list[int] | None]:
    """Additive and padded costs in the given order, as Python's integers."""
    additive = [0] * len(order) if costs.additive is None else costs.additive[order].tolist()
    return additive, None if costs.padded is None else costs.padded[order].tolist()


def _lower_bound(additive: list[int], padded: list[int] | None, num_bins: int) -> int:
    """What the costliest bin costs at least; costs descend."""
    costs = additive if padded is None else [sum(pair) for pair in zip(additive, padded, strict=True)]
    crowded = (
        sum(costs[(num_bins - 1) * round_index : num_bins * round_index + 1])
        for round_index in range(_MOST_ROUNDS + 1)
        if num_bins * round_index < len(costs)
    )
    return max(-(-sum(costs) // num_bins), *crowded)


def _validate_bins(num_items: int, num_bins: int, max_items_per_bin: int | None) -> int:
    """Return the limit of items per bin; raise AssignmentError where the items do not fit."""
    if not 1 <= operator.index(num_bins) <= _LARGEST_NUM_BINS:
        raise AssignmentError(f"cannot spread {num_items} items over {num_bins} bins; ask for 1 to {_LARGEST_NUM_BINS}")
    if max_items_per_bin is None:
        return num_items
    if max_items_per_bin < 1 or num_bins * max_items_per_bin < num_items:
        raise AssignmentError(
            f"{num_items} items do not fit {num_bins} bins of at most {max_items_per_bin} items; "
            f"allow {math.ceil(num_items / num_bins)} items per bin or use more bins"
        )
    return min(max_items_per_bin, num_items)


def _to_partition(lengths: NDArray[np.int64], bin_of_item: NDArray[np.int32], num_bins: int) -> Partition:
    order = np.lexsort((-lengths, bin_of_item))
    ends = np.cumsum(np.bincount(bin_of_item, minlength=num_bins)).tolist()
    items = order.tolist()
    return tuple(tuple(items[begin:end]) for begin, end in zip([0, *ends[:-1]], ends, strict=True))
