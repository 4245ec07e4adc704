"""Post-balancing: spreads the items of a drawn batch over bins so that the costliest bin costs as little as possible."""

from collections import Counter

import numpy as np
from numpy.typing import ArrayLike, NDArray

from multimodal.balance.algorithms.bounded_search import search_partition
from multimodal.balance.algorithms.differencing_partition import partition_by_differencing
from multimodal.balance.algorithms.exchange_refinement import BinLimits, bin_cost, refine_by_exchange
from multimodal.balance.algorithms.longest_first_partition import Partition, partition_longest_first_reference
from multimodal.balance.algorithms.padded_partition import partition_padded
from multimodal.balance.algorithms.validate_arguments import validate_bins
from multimodal.balance.length_cost import LINEAR_COST, Integers, LengthCost, integer_costs
from multimodal.kernels import kernels

REFINEMENT_STEPS = 2**18
"""Default budget of the local search, about half a millisecond of the C++ kernel."""

MOST_SEARCHED_ITEMS = 256
"""Larger batches have enough short items to fill bins evenly, and are not searched."""
MOST_SEARCH_STEPS = 2**15
"""Budget of the search among few items, a tenth of a millisecond of the C++ kernel."""

_MOST_ROUNDS = 16


def post_balance(
    lengths: ArrayLike,
    *,
    num_bins: int,
    cost: LengthCost = LINEAR_COST,
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
    costliest bin costlier. Batches of up to MOST_SEARCHED_ITEMS items that miss the bound are also partitioned by largest
    differencing (and, if there is padding, longest first by the items' own costs), with the same exchanges; `search_partition`
    continues from the best of these. So the result is never worse than longest first or differencing, and within a thousandth of
    the optimum if items are so few that the budget lasts. Equal lengths are ordered by item index, equal costs by bin index.

    lengths: [num_items] whole numbers of tokens, not negative, at least one.
    num_bins: at least 1; with fewer items than bins some stay empty.
    max_items_per_bin: most items in a bin; None: no limit.
    refinement_steps: budget of the local search in examined items, 0 for none. It is a count, since a time limit would end the
    search at different places on different ranks: the result is a function of the arguments alone.

    Runs as a C++ kernel, with the same result, if the kernels are built. Raises AssignmentError if an argument is out of range.
    O(n log num_bins + refinement_steps), and for few items O(n num_bins log num_bins).
    """
    bins = post_balance_array(
        lengths, num_bins=num_bins, cost=cost, max_items_per_bin=max_items_per_bin, refinement_steps=refinement_steps
    )
    items = np.lexsort((-np.asarray(lengths), bins)).tolist()
    ends = np.cumsum(np.bincount(bins, minlength=num_bins)).tolist()
    return tuple(tuple(items[begin:end]) for begin, end in zip([0, *ends[:-1]], ends, strict=True))


def post_balance_array(
    lengths: ArrayLike,
    *,
    num_bins: int,
    cost: LengthCost = LINEAR_COST,
    max_items_per_bin: int | None = None,
    refinement_steps: int = REFINEMENT_STEPS,
) -> NDArray[np.int32]:
    """Return the bin of each item, [num_items] int32, in the partition that `post_balance` returns.

    This is the form for large batches: the kernel reads an int64 array as it is. Arguments and errors as in `post_balance`.
    """
    costs = integer_costs(lengths, cost=cost)
    limit = validate_bins(len(costs.lengths), num_bins=num_bins, max_items_per_bin=max_items_per_bin)
    balance = post_balance_reference if kernels is None else kernels.post_balance
    return balance(
        costs.lengths,
        costs.additive,
        costs.padded,
        num_bins=num_bins,
        max_items_per_bin=limit,
        refinement_steps=refinement_steps,
    )


def post_balance_reference(
    lengths: Integers,
    additive: Integers | None,
    padded: Integers | None,
    *,
    num_bins: int,
    max_items_per_bin: int,
    refinement_steps: int,
) -> NDArray[np.int32]:
    """Compute the kernel's result in Python: the greedy step by the form of the cost, then, unless exact, the local search."""
    order = np.argsort(-lengths, kind="stable")
    added = [0] * len(order) if additive is None else additive[order].tolist()
    padding = None if padded is None else padded[order].tolist()
    limits = BinLimits(num_bins, max_items_per_bin, lower_bound(added, padding, num_bins=num_bins))
    if padding is None:
        bins = _place_longest_first(added, limits)
    else:
        bins = partition_padded(added, padding, num_bins=num_bins, max_items_per_bin=max_items_per_bin, lower_bound=limits.bound)
    if additive is not None:
        bins, num_steps = refine_by_exchange(bins, added, padding, limits=limits, num_steps=refinement_steps)
        if len(bins) <= MOST_SEARCHED_ITEMS:
            bins = _search_few_items(bins, added, padding, limits=limits, num_steps=num_steps)
    bin_of_item = np.empty(len(order), dtype=np.int32)
    bin_of_item[order] = bins
    return bin_of_item


def _place_longest_first(costs: list[int], limits: BinLimits) -> list[int]:
    partition = partition_longest_first_reference(costs, num_bins=limits.num_bins, max_items_per_bin=limits.max_items_per_bin)
    bin_of_item = {item: index for index, members in enumerate(partition) for item in members}
    return [bin_of_item[item] for item in range(len(costs))]


def _search_few_items(
    bins: list[int], additive: list[int], padded: list[int] | None, *, limits: BinLimits, num_steps: int
) -> list[int]:
    """Compare a partition that misses the bound with others, and search from the best of them."""

    def costliest(bin_of_item: list[int]) -> int:
        members: list[list[int]] = [[] for _ in range(limits.num_bins)]
        for item, index in enumerate(bin_of_item):
            members[index].append(item)
        return max(bin_cost(items, additive, padded) for items in members)

    if num_steps <= 0 or costliest(bins) <= limits.bound:
        return bins
    alone = additive if padded is None else [sum(pair) for pair in zip(additive, padded, strict=True)]
    others = [] if padded is None else [_place_longest_first(alone, limits)]
    for other in (*others, partition_by_differencing(alone, num_bins=limits.num_bins)):
        if max(Counter(other).values()) <= limits.max_items_per_bin:
            refined, num_steps = refine_by_exchange(other, additive, padded, limits=limits, num_steps=num_steps)
            bins = min(bins, refined, key=costliest)
    return search_partition(bins, additive, padded, limits=limits, num_steps=min(num_steps, MOST_SEARCH_STEPS))


def lower_bound(additive: list[int], padded: list[int] | None, *, num_bins: int) -> int:
    """Return a lower bound of the cost of the costliest bin; costs descend.

    It is the largest of: the mean; the costliest item; the cheapest k + 1 of the first k num_bins + 1 items, since one bin holds
    k + 1 of these. No item is padded beyond its own length there, so with padding the bound is loose.
    """
    costs = additive if padded is None else [sum(pair) for pair in zip(additive, padded, strict=True)]
    crowded = (
        sum(costs[(num_bins - 1) * round_index : num_bins * round_index + 1])
        for round_index in range(_MOST_ROUNDS + 1)
        if num_bins * round_index < len(costs)
    )
    return max(-(-sum(costs) // num_bins), *crowded)
