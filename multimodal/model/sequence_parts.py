"""Cuts rows into parts that travel one by one."""

import itertools


def sequence_parts(num_rows: int, *, num_parts: int) -> tuple[slice, ...]:
    """Return `num_parts` consecutive slices of `num_rows` rows, of sizes that differ by at most one, the larger ones last.

    Fewer where there are fewer rows, at least one (of no rows, if there are none). Ranks that have as many rows cut alike. With
    the larger parts last, the first one, which is waited for, is no longer than the others.
    """
    count = max(1, min(num_parts, num_rows))
    bounds = [num_rows * index // count for index in range(count + 1)]
    return tuple(slice(first, last) for first, last in itertools.pairwise(bounds))
