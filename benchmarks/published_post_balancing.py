"""OrchMLLM's post-balancing as the paper lists it, slips included: peers for `balance.py`, not for use.

Every function takes `[num_items]` lengths and returns lists of item indices, one per batch. Where a listing cannot run as
printed, it is completed with as little as possible, and the docstring says with what.
"""

from collections.abc import Sequence
from functools import cmp_to_key
from heapq import heapify, heappop, heappush
from typing import Any

Batches = list[list[int]]


def published_linear(lengths: Sequence[int], *, num_bins: int) -> Batches:
    """Run Alg. 1: longest first onto the batch with the least sum; runs as printed."""
    batches: Batches = [[] for _ in range(num_bins)]
    queue = [(0, index) for index in range(num_bins)]
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        load, index = heappop(queue)
        batches[index].append(item)
        heappush(queue, (load + lengths[item], index))
    return batches


def published_padded(lengths: Sequence[int], *, num_bins: int) -> Batches:
    """Run Alg. 2: binary search over the bound of the padded length.

    Filled in: `right <- mid` (the listing has an if without a value). Kept: the search runs between the *shortest* length (the
    order is ascending) and n / d + 1 times it, so if lengths differ much it ends below every sufficient bound; and it returns its
    last trial. Either may leave more batches than there are replicas.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)

    def least_batches(bound: int) -> Batches:
        batches: Batches = [[]]
        for item in order:
            if (len(batches[-1]) + 1) * lengths[item] > bound:
                batches.append([])
            batches[-1].append(item)
        return batches

    left, right = lengths[order[0]], int(lengths[order[0]] * (len(lengths) / num_bins + 1))
    batches = least_batches(right)
    while left < right:
        middle = (left + right) // 2
        batches = least_batches(middle)
        if len(batches) <= num_bins:
            right = middle
        else:
            left = middle + 1
    return [batch for batch in batches if batch]


def published_linear_quadratic(lengths: Sequence[int], *, num_bins: int, tolerance: float) -> Batches:
    """Run Alg. 4: sums of lengths that differ by less than the tolerance compare by their sums of squares.

    Runs as printed, though the comparison is not an order: it can put each of three batches before the next, in a cycle.
    """

    def compare(a: tuple[int, int, int], b: tuple[int, int, int]) -> int:
        if abs(a[0] - b[0]) < tolerance:
            return (a[1] > b[1]) - (a[1] < b[1])
        return -1 if a[0] < b[0] else 1

    key: Any = cmp_to_key(compare)
    batches: Batches = [[] for _ in range(num_bins)]
    queue = [key((0, 0, index)) for index in range(num_bins)]
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        total, squares, index = heappop(queue).obj
        batches[index].append(item)
        heappush(queue, key((total + lengths[item], squares + lengths[item] ** 2, index)))
    return batches


def published_padded_attention(lengths: Sequence[int], *, num_bins: int) -> Batches:
    """Run Alg. 5: descending batches up to the bound of Alg. 1 on the padded length, the rest onto the least sum of lengths.

    Filled in: the bound `b` is `max_sum_bounds`, `len` that of the new batches, and an item that opens no batch is left for the
    rest. Kept: `len > d` lets one batch more than there are replicas open, and the rest ignores padding.
    """
    order = sorted(range(len(lengths)), key=lambda item: -lengths[item])
    bound = max(sum(lengths[item] for item in batch) for batch in published_linear(lengths, num_bins=num_bins))
    batches: Batches = [[]]
    rest = len(order)
    for place, item in enumerate(order):
        if (len(batches[-1]) + 1) * lengths[item] > bound:
            if len(batches) > num_bins:
                rest = place
                break
            batches.append([])
        batches[-1].append(item)
    queue = [(sum(lengths[item] for item in batch), index) for index, batch in enumerate(batches)]
    heapify(queue)
    for item in order[rest:]:
        load, index = heappop(queue)
        batches[index].append(item)
        heappush(queue, (load + lengths[item], index))
    return [batch for batch in batches if batch]
