"""Greedy longest-first partition of items into bins (LPT)."""

import math
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from multimodal.balance.algorithms.validate_arguments import validate_bins
from multimodal.kernels import kernels
from multimodal.values.errors import AssignmentError

Partition = tuple[tuple[int, ...], ...]
"""The indices of the items of each bin."""

_INT64_MAX = 2**63 - 1


def partition_longest_first(costs: Sequence[float], *, num_bins: int, max_items_per_bin: int | None = None) -> Partition:
    """Distribute items over bins evenly: the longest remaining item goes to the least loaded bin.

    The heaviest bin is at most 4/3 - 1/(3 num_bins) times the optimum when bins are unbounded (Graham 1969); DistTrain, Alg. 2
    balances data-parallel groups this way and OrchMLLM, Alg. 1 microbatches without padding. DistTrain's listing sorts in
    ascending order; descending is what the bound requires and what OrchMLLM lists.

    costs: one per item, finite and not negative, in any unit; compared and added exactly if all are integers, else in
        double precision.
    num_bins: at least 1; bins may stay empty.
    max_items_per_bin: most items in a bin; None: no limit.

    Returns per bin the indices of its items by descending cost. Equal costs are ordered by item index, equal loads by bin index.
    Runs as a C++ kernel, with the same result, if the kernels are built. Raises AssignmentError if an argument is out of range.
    O(n log n + n log num_bins).
    """
    limit = validate_bins(len(costs), num_bins=num_bins, max_items_per_bin=max_items_per_bin)
    total = _add_up(costs)
    is_large = isinstance(total, int) and total > _INT64_MAX
    partition = partition_longest_first_reference if kernels is None or is_large else kernels.partition_longest_first
    return tuple(map(tuple, partition(costs, num_bins=num_bins, max_items_per_bin=limit)))


def partition_longest_first_reference(costs: Sequence[float], *, num_bins: int, max_items_per_bin: int) -> list[list[int]]:
    """Compute the kernel's result in Python; integers may be of any size."""
    exact = costs if all(isinstance(cost, int) for cost in costs) else [float(cost) for cost in costs]
    open_bins: list[tuple[float, int]] = [(0, index) for index in range(num_bins)]
    heapify(open_bins)
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    for item in sorted(range(len(exact)), key=exact.__getitem__, reverse=True):
        load, index = heappop(open_bins)
        bins[index].append(item)
        if len(bins[index]) < max_items_per_bin:
            heappush(open_bins, (load + exact[item], index))
    return bins


def _add_up(costs: Sequence[float]) -> float:
    """Return the sum of all costs, an int if all costs are; raises AssignmentError if one is out of range."""
    total = sum(costs)
    if len(costs) and not (min(costs) >= 0 and (isinstance(total, int) or math.isfinite(total))):
        wrong = next((index for index, cost in enumerate(costs) if not (cost >= 0 and math.isfinite(cost))), None)
        problem = f"item {wrong} has cost {costs[wrong]}" if wrong is not None else f"the costs add up to {total}"
        raise AssignmentError(f"{problem}; costs must be finite and not negative, and so must their sum")
    return total
