import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimodal.balance.algorithms.cut_evenly import cut_evenly, cut_evenly_reference
from multimodal.kernels import kernels
from multimodal.values.arrays.rows import flat_rows

ROWS = st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=7), st.integers(0, 9)), min_size=1, max_size=4)


@given(rows=ROWS)
@pytest.mark.skipif(kernels is None, reason="the kernels are not built")
def test_the_kernel_equals_its_reference(rows: list[tuple[list[int], int]]) -> None:
    starts, amounts = flat_rows([amounts for amounts, _ in rows])
    counts = np.array([count for _, count in rows])
    found, wanted = (cut(amounts, starts, counts) for cut in (kernels.cut_evenly, cut_evenly_reference))
    assert [column.tolist() for column in found] == [column.tolist() for column in wanted]


def largest_run(amounts: list[int], count: int) -> int:
    """The least that the largest of at most `count` runs can be, by trying all cuts."""
    if count == 1 or not amounts:
        return sum(amounts)
    return min(max(sum(amounts[:cut]), largest_run(amounts[cut:], count - 1)) for cut in range(1, len(amounts) + 1))


@given(amounts=st.lists(st.integers(0, 9), min_size=1, max_size=7), count=st.integers(1, 5))
def test_the_largest_run_is_the_least_possible_and_none_is_empty(amounts: list[int], count: int) -> None:
    starts, of_rows = cut_evenly(np.array(amounts), np.array([0, len(amounts)]), np.array([count]))
    assert of_rows.tolist() == [0, min(count, len(amounts))]
    assert (np.diff(starts) > 0).all()
    assert max(map(sum, np.split(np.array(amounts), starts[1:-1]))) == largest_run(amounts, count)
