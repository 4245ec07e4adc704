"""Largest differencing (Karmarkar and Karp 1982): a partition of few items that is often more even than longest first."""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

_Share = tuple[int, list[int]]
"""The items of one bin, behind their cost in excess of the lightest bin of the same partition."""


def partition_by_differencing(costs: Sequence[int], *, num_bins: int) -> list[int]:
    """Return the bin of each item; bins may hold any number of items.

    Every item starts as a partition of its own. The two partitions with the largest differences (between costliest and lightest
    bin) are merged: the costliest bins of one are combined with the lightest of the other; from then on only differences count.
    One partition of all items remains.

    costs: not negative, descending. Equal partitions go by age, equal bins of one by their order. O(n num_bins log num_bins).
    """
    partitions: list[list[_Share]] = [[(cost, [item])] for item, cost in enumerate(costs)]
    widest = [(-cost, index) for index, cost in enumerate(costs)]
    heapify(widest)
    while len(widest) > 1:
        first, second = heappop(widest)[1], heappop(widest)[1]
        partitions.append(_combine(partitions[first], partitions[second], num_bins))
        heappush(widest, (-partitions[-1][0][0], len(partitions) - 1))
    bin_of_item = {item: index for index, (_, items) in enumerate(partitions[-1]) for item in items}
    return [bin_of_item[item] for item in range(len(costs))]


def _combine(one: list[_Share], other: list[_Share], num_bins: int) -> list[_Share]:
    """Merge two partitions, all by descending cost; bins beyond the end of a list are empty."""
    shares = list(one)
    for place in reversed(range(len(other))):
        partner = num_bins - 1 - place
        if partner >= len(one):
            shares.append(other[place])
        else:
            shares[partner] = (shares[partner][0] + other[place][0], shares[partner][1] + other[place][1])
    shares.sort(key=lambda share: -share[0])
    least = shares[-1][0] if len(shares) == num_bins else 0
    return [(cost - least, items) for cost, items in shares]
