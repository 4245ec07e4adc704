"""Greedy longest-first partition of items into bins (LPT)."""

from collections.abc import Sequence
from heapq import heapify, heapreplace

from multimodal.kernels import kernels


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


def partition_longest_first_reference(costs: Sequence[float], *, num_bins: int) -> list[list[int]]:
    """Compute the kernel's result in Python; integers may be of any size."""
    exact = costs if all(isinstance(cost, int) for cost in costs) else [float(cost) for cost in costs]
    loads: list[tuple[float, int]] = [(0, index) for index in range(num_bins)]
    heapify(loads)
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    for item in sorted(range(len(exact)), key=exact.__getitem__, reverse=True):
        load, index = loads[0]
        bins[index].append(item)
        heapreplace(loads, (load + exact[item], index))
    return bins
