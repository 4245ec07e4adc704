"""Rows cut into parts."""

from hypothesis import given
from hypothesis import strategies as st

from multimodal.model.collectives import sequence_parts


@given(st.integers(0, 200), st.integers(1, 20))
def test_parts_are_consecutive_and_alike_the_larger_ones_last(num_rows: int, num_parts: int) -> None:
    parts = sequence_parts(num_rows, num_parts=num_parts)
    sizes = [part.stop - part.start for part in parts]
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(num_rows))
    assert len(parts) == max(1, min(num_parts, num_rows))
    assert sizes[0] == min(sizes) and max(sizes) - min(sizes) <= 1
