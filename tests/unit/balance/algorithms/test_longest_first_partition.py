import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimodal.balance.algorithms import longest_first_partition
from multimodal.balance.algorithms.longest_first_partition import partition_longest_first
from tests.unit.without_kernels import without_kernels

COSTS = st.one_of(
    st.lists(st.integers(0, 20), max_size=40),
    st.lists(st.floats(0, 1e6), max_size=40),
    st.lists(st.one_of(st.integers(0, 2**60), st.floats(0, 1e18)), max_size=10),
)


def test_the_kernel_is_built_where_a_compiler_is():
    if not any(shutil.which(compiler) for compiler in ("c++", "g++", "clang++")):
        pytest.skip("no C++ compiler on this machine")
    assert longest_first_partition.kernels is not None, "run 'pip install -e .' to build multimodal._kernels"


@pytest.mark.parametrize(
    ("costs", "num_bins", "bins"),
    [
        ([2, 9, 5, 3], 2, [[1], [2, 3, 0]]),
        ([2, 2, 2, 2, 2], 3, [[0, 3], [1, 4], [2]]),
        ([10, 1, 1, 1], 2, [[0], [1, 2, 3]]),
        ([], 2, [[], []]),
    ],
)
def test_the_longest_item_joins_the_least_loaded_bin(costs, num_bins, bins):
    assert partition_longest_first(costs, num_bins=num_bins) == bins


@given(costs=COSTS, num_bins=st.integers(1, 9))
def test_the_kernel_equals_its_reference(costs, num_bins):
    bins = partition_longest_first(costs, num_bins=num_bins)
    assert bins == without_kernels(partition_longest_first)(costs, num_bins=num_bins)
    assert sorted(index for members in bins for index in members) == list(range(len(costs)))
