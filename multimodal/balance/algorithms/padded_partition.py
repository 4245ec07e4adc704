"""Partitions for batches that are padded: items of similar length share a bin."""

from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import accumulate


def partition_padded(additive: Sequence[int], padded: Sequence[int], *, num_bins: int) -> list[list[int]]:
    """Return the items of each bin; items are given longest first.

    A bin costs the sum of `additive` plus its number of items times its largest `padded`. A binary search finds the least
    bound under which the items, cut in descending order into segments as long as the bound allows, need no more than
    `num_bins` segments (OrchMLLM, Alg. 2; its listing starts from the shortest item's length, forgets an assignment, and
    returns the last trial instead of the best). Bins that stayed empty get halves of the costliest.

    Without an additive part, that is the optimum. Take any partition. The bin with the longest item costs no more if its other
    items are swapped for the next longest ones, and no other bin gets longer items; then it may also take further items up to the
    bound. What remains is the same problem with one bin less. So the first segment of the greedy cut can always be part of a best
    partition, and by induction so can all. With an additive part it is a heuristic.

    O(n + segments log(n) log(cost)).
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

    low, high = cost(0, 1), cost(0, len(padded))
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(cut(middle)) <= num_bins else (middle + 1, high)
    bins = cut(low)
    bins += [[] for _ in range(num_bins - len(bins))]
    _fill_empty_bins(bins, additive, padded)
    return bins


def bin_cost(items: Sequence[int], additive: Sequence[int], padded: Sequence[int]) -> int:
    """Return the cost of a bin of these items, longest first: their additive costs, and their number times the largest padded."""
    return sum(additive[item] for item in items) + (len(items) * padded[items[0]] if items else 0)


def _fill_empty_bins(bins: list[list[int]], additive: Sequence[int], padded: Sequence[int]) -> None:
    """Give every empty bin half of the costliest bin that has more than one item."""
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
