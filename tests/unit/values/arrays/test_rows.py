import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimodal.kernels import kernels
from multimodal.values.arrays.rows import flat_rows, group_rows_reference, order_by, row_numbers, take_rows

OWNERS = st.lists(st.integers(0, 5), max_size=20)


@given(owners=OWNERS)
@pytest.mark.skipif(kernels is None, reason="the kernels are not built")
def test_grouping_in_cpp_equals_its_reference(owners: list[int]) -> None:
    column, values = np.array(owners, np.int64), np.arange(len(owners))[::-1].copy()
    found, wanted = (group(column, values, 6) for group in (kernels.group_rows, group_rows_reference))
    assert [each.tolist() for each in found] == [each.tolist() for each in wanted]


@pytest.mark.skipif(kernels is None, reason="the kernels are not built")
def test_an_owner_that_is_no_row_is_refused() -> None:
    with pytest.raises(IndexError, match="no row"):
        kernels.group_rows(np.array([3]), np.array([0]), 3)


@given(pairs=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=20))
def test_several_keys_order_as_tuples_do(pairs: list[tuple[int, int]]) -> None:
    columns = np.array(pairs).T
    assert order_by(*columns).tolist() == sorted(range(len(pairs)), key=pairs.__getitem__)


@given(rows=st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=5), data=st.data())
def test_rows_are_taken_in_any_order(rows: list[list[int]], data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=6))
    starts, values = take_rows(*flat_rows(rows), np.array(chosen, np.int64))
    assert [part.tolist() for part in np.split(values, starts[1:-1])][: len(chosen)] == [rows[index] for index in chosen]
    assert row_numbers(starts).tolist() == [number for number, index in enumerate(chosen) for _ in rows[index]]
