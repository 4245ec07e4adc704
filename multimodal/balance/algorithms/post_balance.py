"""Post-balancing: spreads the items of a drawn batch over bins so that the costliest costs as little as possible."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import partial
from heapq import heapify, heappop, heappush, heapreplace
from itertools import accumulate

import numpy as np
from numpy.typing import ArrayLike, NDArray

from multimodal.balance.length_cost import LINEAR_COST, LengthCost, integer_costs
from multimodal.kernels import kernels
from multimodal.values.arrays.rows import Integers


def partition_longest_first(costs: Sequence[float], *, num_bins: int) -> list[list[int]]:
    """Return the items of each bin by descending cost: the longest remaining item goes to the least loaded bin.

    The heaviest bin is at most 4/3 - 1/(3 num_bins) times the optimum (Graham 1969; DistTrain, Alg. 2; OrchMLLM, Alg. 1). costs:
    one per item, finite and not negative; compared and added exactly if all are integers (with a sum below 2^63), else in double
    precision. Equal costs are ordered by item index, equal loads by bin index; bins may stay empty. Runs as a C++ kernel, with
    the same result, if the kernels are built. O(n log n + n log num_bins).
    """
    if kernels is not None:
        return kernels.partition_longest_first(costs, num_bins=num_bins, max_items_per_bin=len(costs))
    return partition_longest_first_reference(costs, num_bins=num_bins)


def partition_longest_first_reference(
    costs: Sequence[float], *, num_bins: int, max_items_per_bin: int | None = None
) -> list[list[int]]:
    """Compute the kernel's result in Python; integers may be of any size."""
    exact = costs if all(isinstance(cost, int) for cost in costs) else [float(cost) for cost in costs]
    loads: list[tuple[float, int]] = [(0, index) for index in range(num_bins)]
    heapify(loads)
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    for item in sorted(range(len(exact)), key=exact.__getitem__, reverse=True):
        load, index = loads[0]
        bins[index].append(item)
        if len(bins[index]) == max_items_per_bin:
            heappop(loads)
        else:
            heapreplace(loads, (load + exact[item], index))
    return bins


REFINEMENT_STEPS = 2**18
"""Default budget of the local search, about half a millisecond."""


def post_balance(
    lengths: ArrayLike,
    *,
    num_bins: int,
    cost: LengthCost = LINEAR_COST,
    refinement_steps: int = REFINEMENT_STEPS,
    max_items_per_bin: int | None = None,
) -> NDArray[np.int32]:
    """Return the bin (a replica, or a microbatch) of each item, [num_items].

    The greedy step depends on how the unit's cost grows (OrchMLLM, Sec. 5.1 and Appendix A):

    - linear (Alg. 1) and linear+quadratic (Alg. 4): longest first onto the cheapest bin (`partition_longest_first`). The paper's
      tolerance survives as the unit that costs are rounded to, see `IntegerCosts`.
    - padded (Alg. 2): binary search over the bound; optimal, see `partition_padded`.
    - padded-attention (Alg. 5): the same search, and trials that fill bins less and place the rest where it is cheapest.

    A local search then moves and swaps items between the costliest and cheaper bins (`csrc/exchange_refinement.cpp`), until it is
    within a thousandth of the lower bound. Batches of up to 256 items that miss the bound are also partitioned by largest
    differencing (Karmarkar and Karp 1982), and from the best partition a branch and bound continues (`csrc/bounded_search.cpp`).
    So the result is never worse than longest first or differencing. Equal lengths are ordered by item, equal costs by bin.

    lengths: [num_items] whole numbers of tokens, not negative, at least one; with fewer items than bins some stay empty.
    refinement_steps: budget of the local search in examined items, 0 for none; a count, so that all ranks end alike.
    max_items_per_bin: None: no limit; without the kernels, longest first serves for padded costs under a limit, too. Runs as a
    C++ kernel; without the kernels, the greedy step is all. Raises AssignmentError as `integer_costs` does. O(n log num_bins +
    refinement_steps), and for few items O(n num_bins log num_bins).
    """
    costs = integer_costs(lengths, cost=cost)
    columns = costs.lengths, costs.additive, costs.padded
    if kernels is None:
        return _place_greedily(*columns, num_bins=num_bins, most=max_items_per_bin)
    most = max_items_per_bin or len(costs.lengths)
    return kernels.post_balance(*columns, num_bins=num_bins, max_items_per_bin=most, refinement_steps=refinement_steps)


def _place_greedily(
    lengths: Integers, additive: Integers | None, padded: Integers | None, *, num_bins: int, most: int | None
) -> NDArray[np.int32]:
    """Return the bins as the kernel does without refinement; for padded attention by the least bound's cut alone."""
    order = np.argsort(-lengths, kind="stable")
    added = [0] * len(order) if additive is None else additive[order].tolist()
    if padded is None or most is not None:
        costs = added if padded is None else padded[order].tolist()
        bins = partition_longest_first_reference(costs, num_bins=num_bins, max_items_per_bin=most)
    else:
        bins = partition_padded(added, padded[order].tolist(), num_bins=num_bins)
    bin_of_item = np.empty(len(order), dtype=np.int32)
    for index, members in enumerate(bins):
        bin_of_item[order[members]] = index
    return bin_of_item


def partition_padded(additive: Sequence[int], padded: Sequence[int], *, num_bins: int) -> list[list[int]]:
    """Return the items of each bin; items are given longest first.

    A bin costs the sum of `additive` plus its number of items times its largest `padded`. A binary search finds the least bound
    under which the items, cut in descending order into segments as long as the bound allows, need no more than `num_bins`
    segments (OrchMLLM, Alg. 2, without the slips of its listing). Bins that stayed empty get halves of the costliest. Without an
    additive part, that is the optimum: in any partition, the bin with the longest item costs no more with the next longest ones
    and all that the bound allows, and what remains is the same problem with one bin less. O(n + segments log(n) log(cost)).
    """
    prefix = list(accumulate(additive, initial=0))

    def cost(begin: int, end: int) -> int:
        return prefix[end] - prefix[begin] + (end - begin) * padded[begin]

    def cut(bound: int) -> list[list[int]]:
        segments, begin = [], 0
        while begin < len(padded):
            end = begin + bisect_right(range(begin + 1, len(padded) + 1), bound, key=partial(cost, begin))
            segments.append(list(range(begin, end)))
            begin = end
        return segments

    bounds = range(cost(0, 1), cost(0, len(padded)) + 1)
    bins = cut(bounds[bisect_left(bounds, True, key=lambda bound: len(cut(bound)) <= num_bins)])
    bins += [[] for _ in range(num_bins - len(bins))]
    # Every empty bin gets half of the costliest bin that has more than one item.
    divisible = [(-bin_cost(members, additive, padded), -index) for index, members in enumerate(bins) if len(members) > 1]
    heapify(divisible)
    for index, members in enumerate(bins):
        if divisible and not members:
            whole = -heappop(divisible)[1]
            half = len(bins[whole]) // 2
            bins[index], bins[whole] = bins[whole][half:], bins[whole][:half]
            for part in (whole, index):
                if len(bins[part]) > 1:
                    heappush(divisible, (-bin_cost(bins[part], additive, padded), -part))
    return bins


def bin_cost(items: Sequence[int], additive: Sequence[int], padded: Sequence[int]) -> int:
    """Return the cost of a bin of these items, longest first: their additive costs, and their number times the largest padded."""
    return sum(additive[item] for item in items) + (len(items) * padded[items[0]] if items else 0)
