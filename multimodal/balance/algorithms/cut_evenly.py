"""Cuts sequences into runs of nearly equal amounts."""

from bisect import bisect_left
from itertools import accumulate, pairwise

import numpy as np

from multimodal.kernels import kernels
from multimodal.values.arrays.rows import Integers, row_starts


def cut_evenly(amounts: Integers, starts: Integers, counts: Integers) -> tuple[Integers, Integers]:
    """Cut every row into at most the given number of runs, so that the largest is as small as possible; no run is empty.

    amounts: of the entries of all rows, not negative; starts: [num_rows + 1] into them; counts: [num_rows] most runs of each row.
    Returns the starts of all runs, followed by the number of entries, and [num_rows + 1] the starts of the rows among the runs.
    Runs as a C++ kernel, with the same result, if the kernels are built. O(n log sum).
    """
    cut = cut_evenly_reference if kernels is None else kernels.cut_evenly
    runs, num_runs = cut(amounts, starts, counts)
    return np.append(runs, len(amounts)).astype(np.int64), row_starts(num_runs)


def cut_evenly_reference(amounts: Integers, starts: Integers, counts: Integers) -> tuple[Integers, Integers]:
    """Compute the kernel's result in Python: the starts of all runs, and the number of runs of each row."""
    runs: list[int] = []
    num_runs: list[int] = []
    for (first, last), count in zip(pairwise(starts.tolist()), counts.tolist(), strict=True):
        found = _cut(amounts[first:last].tolist(), count)
        runs += [first + start for start in found]
        num_runs.append(len(found))
    return np.array(runs, np.int64), np.array(num_runs, np.int64)


def _cut(amounts: list[int], count: int) -> list[int]:
    count = min(count, len(amounts))
    if count <= 0:
        return []
    limits = range(max(max(amounts), -(-sum(amounts) // count)), sum(amounts) + 1)
    limit = limits[bisect_left(limits, True, key=lambda limit: len(_cut_at_limit(amounts, limit)) <= count)]
    return _split_further(_cut_at_limit(amounts, limit), amounts, count=count)


def _cut_at_limit(amounts: list[int], limit: int) -> list[int]:
    """Return the starts of the fewest runs that are all within the limit."""
    starts, total = [0], 0
    for index, amount in enumerate(amounts):
        if total + amount > limit:
            starts.append(index)
            total = 0
        total += amount
    return starts


def _split_further(starts: list[int], amounts: list[int], *, count: int) -> list[int]:
    """Halve the largest run that has more than one entry until there are `count` runs."""
    sums = [0, *accumulate(amounts)]
    while len(starts) < count:
        runs = [run for run in pairwise((*starts, len(amounts))) if run[1] - run[0] > 1]
        first, last = max(runs, key=lambda run: (sums[run[1]] - sums[run[0]], -run[0]))
        half = min(range(first + 1, last), key=lambda cut: (max(sums[cut] - sums[first], sums[last] - sums[cut]), cut))
        starts = sorted([*starts, half])
    return starts
