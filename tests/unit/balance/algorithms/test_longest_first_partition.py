import shutil
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimodal.balance.algorithms import longest_first_partition
from multimodal.balance.algorithms.longest_first_partition import partition_longest_first
from multimodal.values.errors import AssignmentError
from tests.unit.without_kernels import without_kernels

COSTS = st.one_of(
    st.lists(st.integers(0, 20), max_size=40),
    st.lists(st.integers(0, 2**61), max_size=8),
    st.lists(st.floats(0, 1e6), max_size=40),
    st.lists(st.one_of(st.integers(0, 2**60), st.floats(0, 1e18)), max_size=10),
)


def test_the_kernel_is_built_where_a_compiler_is():
    if not any(shutil.which(compiler) for compiler in ("c++", "g++", "clang++")):
        pytest.skip("no C++ compiler on this machine")
    assert longest_first_partition.kernels is not None, "run 'pip install -e .' to build multimodal._kernels"


def test_the_longest_item_joins_the_least_loaded_bin():
    assert partition_longest_first([2, 9, 5, 3], num_bins=2) == ((1,), (2, 3, 0))


def test_equal_costs_go_by_item_and_equal_loads_by_bin():
    assert partition_longest_first([2, 2, 2, 2, 2], num_bins=3) == ((0, 3), (1, 4), (2,))


def test_a_full_bin_takes_no_more():
    assert partition_longest_first([10, 1, 1, 1], num_bins=2) == ((0,), (1, 2, 3))
    assert partition_longest_first([10, 1, 1, 1], num_bins=2, max_items_per_bin=2) == ((0, 3), (1, 2))


def test_no_items_leave_every_bin_empty():
    assert partition_longest_first([], num_bins=2) == ((), ())


def test_integers_beyond_the_kernel_stay_exact():
    assert partition_longest_first([2**70 + 1, 2**70, 2**70 + 2, 1], num_bins=3) == ((2,), (0,), (1, 3))


@pytest.mark.parametrize("partition", [partition_longest_first, without_kernels(partition_longest_first)])
@pytest.mark.parametrize(
    ("costs", "arguments", "message"),
    [
        ([1, 2], {"num_bins": 0}, "cannot spread 2 items over 0 bins; ask for 1 to 2147483647"),
        ([1, 2, 3], {"num_bins": 2, "max_items_per_bin": 1}, "do not fit 2 bins of at most 1 items; allow 2 items per bin"),
        ([1, 2], {"num_bins": 2, "max_items_per_bin": 0}, "allow 1 items per bin"),
        ([1, -2], {"num_bins": 2}, "item 1 has cost -2; costs must be finite and not negative"),
        ([1.0, float("nan")], {"num_bins": 2}, "item 1 has cost nan"),
        ([float("inf")], {"num_bins": 2}, "item 0 has cost inf"),
        ([1e308, 1e308], {"num_bins": 2}, "the costs add up to inf"),
    ],
)
def test_wrong_arguments_are_named(partition, costs, arguments, message):
    with pytest.raises(AssignmentError, match=message):
        partition(costs, **arguments)


@given(costs=COSTS, num_bins=st.integers(1, 9), slack=st.one_of(st.none(), st.integers(0, 3)))
def test_the_kernel_equals_its_reference(costs, num_bins, slack):
    limit = None if slack is None else max(1, -(-len(costs) // num_bins) + slack)
    bins = partition_longest_first(costs, num_bins=num_bins, max_items_per_bin=limit)
    assert bins == without_kernels(partition_longest_first)(costs, num_bins=num_bins, max_items_per_bin=limit)
    assert sorted(index for members in bins for index in members) == list(range(len(costs)))
    assert limit is None or max(map(len, bins)) <= limit


@given(costs=st.lists(st.integers(1, 12), min_size=1, max_size=7), num_bins=st.integers(1, 3))
def test_the_heaviest_bin_keeps_grahams_bound(costs, num_bins):
    def heaviest(bin_of_item):
        loads = [0] * num_bins
        for cost, index in zip(costs, bin_of_item, strict=True):
            loads[index] += cost
        return max(loads)

    best = min(map(heaviest, product(range(num_bins), repeat=len(costs))))
    found = max(sum(costs[index] for index in members) for members in partition_longest_first(costs, num_bins=num_bins))
    assert best <= found
    assert 3 * num_bins * found <= (4 * num_bins - 1) * best
