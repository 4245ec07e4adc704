"""Rows cut into parts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimodal.model.collectives import sequence_parts


@pytest.mark.parametrize(
    ("num_rows", "num_parts", "bounds"),
    [
        (8, 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (7, 3, [(0, 2), (2, 4), (4, 7)]),
        (2, 4, [(0, 1), (1, 2)]),
        (5, 1, [(0, 5)]),
        (0, 4, [(0, 0)]),
    ],
)
def test_parts(num_rows: int, num_parts: int, bounds: list[tuple[int, int]]) -> None:
    assert [(part.start, part.stop) for part in sequence_parts(num_rows, num_parts=num_parts)] == bounds


@given(st.integers(1, 200), st.integers(1, 20))
def test_parts_are_consecutive_and_alike(num_rows: int, num_parts: int) -> None:
    parts = sequence_parts(num_rows, num_parts=num_parts)
    sizes = [part.stop - part.start for part in parts]
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(num_rows))
    assert len(parts) == min(num_parts, num_rows)
    assert sizes[0] == min(sizes) and max(sizes) - min(sizes) <= 1
