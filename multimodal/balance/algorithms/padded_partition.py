"""Partitions for batches that are padded: items of similar length share a bin."""

from bisect import bisect_right
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import accumulate

GOOD_ENOUGH = 1000
"""Inverse tolerance: a costliest bin that exceeds the lower bound by less than 1 / GOOD_ENOUGH is not improved."""
CLOSE_BITS = 16
"""The bound of a cut that is not optimal anyway is searched to one part in 2^16."""
NUM_BOUNDS = 4
"""Bounds tried between the lower bound and that of the best contiguous partition."""


def partition_padded(additive: Sequence[int], padded: Sequence[int], *, num_bins: int, lower_bound: int) -> list[list[int]]:
    """Return the items of each bin; items are given longest first.

    A bin costs the sum of `additive` plus its number of items times its largest `padded`. A binary search finds the least
    bound under which the items, cut in descending order into segments as long as the bound allows, need no more than
    `num_bins` segments (OrchMLLM, Alg. 2; its listing starts from the shortest item's length, forgets an assignment, and
    returns the last trial instead of the best).

    Without an additive part, that is the optimum. Take any partition. The bin with the longest item costs no more if its other
    items are swapped for the next longest ones, and no other bin gets longer items; then it may also take further items up to the
    bound. What remains is the same problem with one bin less. So the first segment of the greedy cut can always be part of a best
    partition, and by induction so can all.

    With an additive part it is a heuristic (OrchMLLM, Alg. 5): bins are also filled to lower bounds, and the remaining items go
    to the bin that is cheapest afterwards. The best of all trials is taken; bins that stayed empty get halves of the costliest.

    O(n + num_bins log(cost) log(n)) without an additive part, else O(n log n) for each of five bounds.
    """
    prefix = list(accumulate(additive, initial=0))

    def cost(begin: int, end: int) -> int:
        return prefix[end] - prefix[begin] + (end - begin) * padded[begin]

    def segment_end(begin: int, bound: int) -> int:
        return begin - 1 + bisect_right(range(begin, len(padded) + 1), bound, key=lambda end: cost(begin, end))

    def fits(bound: int) -> bool:
        begin = 0
        for _ in range(num_bins):
            end = segment_end(begin, bound) if begin < len(padded) else begin
            if end == begin:
                break
            begin = end
        return begin == len(padded)

    def fill(bound: int) -> tuple[list[list[int]], int]:
        bins: list[list[int]] = []
        begin = 0
        while begin < len(padded) and len(bins) < num_bins:
            end = max(begin + 1, segment_end(begin, bound))
            bins.append(list(range(begin, end)))
            begin = end
        return bins + [[] for _ in range(num_bins - len(bins))], begin

    even = -(-len(padded) // num_bins)
    low, high = cost(0, 1), max(cost(begin, min(len(padded), begin + even)) for begin in range(0, len(padded), even))
    close = high >> CLOSE_BITS if prefix[-1] else 0
    while high - low > close:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)

    def complete(bound: int) -> list[list[int]]:
        bins, begin = fill(bound)
        if begin < len(padded):
            _place_rest(bins, begin, additive, padded)
        return bins

    def costliest(bins: Sequence[Sequence[int]]) -> int:
        return max(bin_cost(members, additive, padded) for members in bins)

    best = complete(high)
    for step in range(NUM_BOUNDS - 1, -1, -1) if prefix[-1] else ():
        if costliest(best) <= lower_bound + lower_bound // GOOD_ENOUGH:
            break
        bound = lower_bound + (high - lower_bound) // NUM_BOUNDS * step if step else 0
        best = min(best, complete(bound), key=costliest)
    _fill_empty_bins(best, additive, padded)
    return best


def bin_cost(items: Sequence[int], additive: Sequence[int], padded: Sequence[int]) -> int:
    """Return the cost of a bin of these items, longest first: their additive costs, and their number times the largest padded."""
    return sum(additive[item] for item in items) + (len(items) * padded[items[0]] if items else 0)


def _place_rest(bins: list[list[int]], begin: int, additive: Sequence[int], padded: Sequence[int]) -> None:
    """Put each item from `begin` on into the bin that is cheapest afterwards; all bins hold some."""
    costs = [(bin_cost(members, additive, padded) + padded[members[0]], index) for index, members in enumerate(bins)]
    heapify(costs)
    for item in range(begin, len(padded)):
        cost, index = costs[0]
        bins[index].append(item)
        heapreplace(costs, (cost + additive[item] + padded[bins[index][0]], index))


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
