"""Rows of variable length as two flat arrays: where each row starts, and the values of all rows."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from multimodal.kernels import kernels

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Bytes = NDArray[np.uint8]


def integers(values: Iterable[int]) -> Integers:
    """Return whole numbers as an array."""
    return np.array(list(values), np.int64)


def row_starts(lengths: ArrayLike) -> Integers:
    """Return where rows of these lengths start: one entry more than there are rows."""
    sizes = np.asarray(lengths, np.int64)
    starts = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=starts[1:])
    return starts


def take_rows(starts: Integers, values: Integers, rows: Integers) -> tuple[Integers, Integers]:
    """Select rows, in any order: starts, values."""
    lengths = starts[rows + 1] - starts[rows]
    new_starts = row_starts(lengths)
    return new_starts, values[np.arange(new_starts[-1]) + np.repeat(starts[rows] - new_starts[:-1], lengths)]


def row_sums(starts: Integers, values: Integers) -> Integers:
    """Add up each row of whole numbers."""
    before = row_starts(values)
    return before[starts[1:]] - before[starts[:-1]]


def row_numbers(starts: Integers) -> Integers:
    """Return the row of each value."""
    return np.repeat(np.arange(len(starts) - 1), np.diff(starts))


def group_rows(owners: Integers, values: Integers, num_rows: int) -> tuple[Integers, Integers]:
    """Group values by the rows that own them (starts, values); values keep their order within a row. O(values + rows).

    Runs as a C++ kernel, with the same result, if the kernels are built.
    """
    return (group_rows_reference if kernels is None else kernels.group_rows)(owners, values, num_rows)


def group_rows_reference(owners: Integers, values: Integers, num_rows: int) -> tuple[Integers, Integers]:
    """Compute the kernel's result with numpy."""
    return row_starts(np.bincount(owners, minlength=num_rows)), values[np.argsort(owners, kind="stable")]


def order_by(*keys: Integers) -> Integers:
    """Return the order by several keys, the most significant first: small whole numbers, not negative. O(n + largest)."""
    order = np.arange(len(keys[0]))
    for key in reversed(keys):
        _, order = group_rows(key[order], order, int(key.max(initial=0)) + 1)
    return order


def linked_groups(links: tuple[ArrayLike, ArrayLike], size: int, *, is_directed: bool = False) -> Integers:
    """Return [size] the number of each place's group: places that links join, directly or not.

    links: [num_links] firsts and seconds. is_directed: only places that links lead to and back from share a group.
    """
    from scipy.sparse import coo_matrix  # loaded when first used: every rank and tool would wait for it at its start otherwise
    from scipy.sparse.csgraph import connected_components

    entries = coo_matrix((np.ones(len(np.atleast_1d(links[0])), np.int8), links), shape=(size, size))
    return connected_components(entries, connection="strong" if is_directed else "weak")[1].astype(np.int64)
