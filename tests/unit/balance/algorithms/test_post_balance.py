from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.partition_bound import partition_lower_bound
from multimodal.balance.algorithms.longest_first_partition import partition_longest_first
from multimodal.balance.algorithms.post_balance import post_balance, post_balance_array
from multimodal.balance.length_cost import CostForm, LengthCost
from multimodal.values.errors import AssignmentError
from tests.unit.without_kernels import without_kernels

COSTS = [
    LengthCost(),
    LengthCost(CostForm.LINEAR_QUADRATIC, 0.05),
    LengthCost(CostForm.PADDED),
    LengthCost(CostForm.PADDED_ATTENTION, 0.05),
    LengthCost(CostForm.PADDED_ATTENTION, 0.0),
]
ROUNDING = 1e-7
LENGTHS = st.one_of(
    st.lists(st.integers(0, 20), min_size=1, max_size=40),
    st.lists(st.integers(1, 10**6), min_size=1, max_size=25),
    st.lists(st.sampled_from([1, 2, 3, 500, 10**9]), min_size=1, max_size=60),
)


def costliest(lengths, bins, cost):
    return max(cost.batch_cost([lengths[item] for item in items]) for items in bins)


def optimum(lengths, num_bins, cost, limit=None):
    best = float("inf")
    for bin_of_item in product(range(num_bins), repeat=len(lengths)):
        bins = [[item for item, index in enumerate(bin_of_item) if index == each] for each in range(num_bins)]
        if limit is None or max(map(len, bins)) <= limit:
            best = min(best, costliest(lengths, bins, cost))
    return best


def limit_of(lengths, num_bins, slack):
    return None if slack is None else -(-len(lengths) // num_bins) + slack


@pytest.mark.parametrize("cost", COSTS, ids=str)
@given(
    lengths=LENGTHS,
    num_bins=st.integers(1, 9),
    slack=st.one_of(st.none(), st.integers(0, 3)),
    steps=st.sampled_from([0, 40, 2**14]),
)
def test_the_kernel_equals_its_reference_and_places_every_item_once(cost, lengths, num_bins, slack, steps):
    given = {
        "num_bins": num_bins,
        "cost": cost,
        "max_items_per_bin": limit_of(lengths, num_bins, slack),
        "refinement_steps": steps,
    }
    bins = post_balance(lengths, **given)
    assert bins == without_kernels(post_balance)(lengths, **given)
    assert sorted(item for items in bins for item in items) == list(range(len(lengths)))
    assert slack is None or max(map(len, bins)) <= given["max_items_per_bin"]
    bin_of_item = post_balance_array(np.array(lengths), **given)
    assert all(bin_of_item[item] == index for index, items in enumerate(bins) for item in items)
    assert costliest(lengths, bins, cost) >= partition_lower_bound(lengths, num_bins=num_bins, cost=cost) * (1 - ROUNDING)


@pytest.mark.parametrize("cost", COSTS, ids=str)
@given(lengths=LENGTHS, num_bins=st.integers(1, 9), steps=st.integers(1, 2000))
def test_refinement_is_never_worse_than_greedy_and_more_of_it_never_worse_than_less(cost, lengths, num_bins, steps):
    found = [
        costliest(lengths, post_balance(lengths, num_bins=num_bins, cost=cost, refinement_steps=budget), cost)
        for budget in (0, steps, 2 * steps, 2**18)
    ]
    assert found[1] <= found[0] * (1 + ROUNDING)
    assert found[2] <= found[1] * (1 + ROUNDING)
    assert found[3] <= found[2] * (1 + ROUNDING)


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    num_bins=st.integers(1, 3),
    slack=st.one_of(st.none(), st.integers(0, 2)),
)
def test_the_padded_partition_is_optimal(lengths, num_bins, slack):
    limit = limit_of(lengths, num_bins, slack)
    cost = LengthCost(CostForm.PADDED)
    bins = post_balance(lengths, num_bins=num_bins, cost=cost, max_items_per_bin=limit)
    assert costliest(lengths, bins, cost) == optimum(lengths, num_bins, cost, limit)
    if limit is None:
        assert partition_lower_bound(lengths, num_bins=num_bins, cost=cost) == costliest(lengths, bins, cost)


@pytest.mark.parametrize("cost", COSTS[:2], ids=str)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=7), num_bins=st.integers(1, 3))
def test_sums_stay_within_four_thirds_of_the_optimum(cost, lengths, num_bins):
    best = optimum(lengths, num_bins, cost)
    for steps in (0, 2**18):
        found = costliest(lengths, post_balance(lengths, num_bins=num_bins, cost=cost, refinement_steps=steps), cost)
        assert best * (1 - ROUNDING) <= found <= best * (4 / 3 - 1 / (3 * num_bins)) * (1 + ROUNDING)


@pytest.mark.parametrize("weight", [0.0, 0.01, 0.3, 5.0])
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=7), num_bins=st.integers(1, 3))
def test_padded_attention_comes_close_to_the_optimum(weight, lengths, num_bins):
    cost = LengthCost(CostForm.PADDED_ATTENTION, weight)
    best = optimum(lengths, num_bins, cost)
    found = costliest(lengths, post_balance(lengths, num_bins=num_bins, cost=cost), cost)
    assert partition_lower_bound(lengths, num_bins=num_bins, cost=cost) <= best * (1 + ROUNDING)
    assert best * (1 - ROUNDING) <= found <= best * 4 / 3


@given(lengths=LENGTHS, num_bins=st.integers(1, 9), slack=st.one_of(st.none(), st.integers(0, 3)))
def test_the_linear_greedy_step_is_longest_first(lengths, num_bins, slack):
    limit = limit_of(lengths, num_bins, slack)
    assert post_balance(lengths, num_bins=num_bins, max_items_per_bin=limit, refinement_steps=0) == partition_longest_first(
        lengths, num_bins=num_bins, max_items_per_bin=limit
    )


@pytest.mark.parametrize("sigma", [0.3, 1.0, 2.5])
def test_runs_and_heap_of_the_kernel_place_large_batches_as_the_reference_does(sigma):
    lengths = np.random.default_rng(0).lognormal(6, sigma, size=3000).astype(np.int64) + 1
    for num_bins, limit in ((50, None), (50, 60), (700, 9)):
        greedy = post_balance(lengths, num_bins=num_bins, max_items_per_bin=limit, refinement_steps=0)
        assert greedy == partition_longest_first(lengths.tolist(), num_bins=num_bins, max_items_per_bin=limit)


def test_costs_beyond_32_and_64_bits_beside_a_bin_are_placed_as_the_reference_does():
    for longest in (2**33, 2**55):
        lengths = [longest + item * item for item in range(30)]
        assert post_balance(lengths, num_bins=4) == without_kernels(post_balance)(lengths, num_bins=4)


def test_swaps_balance_what_longest_first_does_not():
    lengths = [3, 3, 2, 2, 2]
    assert post_balance(lengths, num_bins=2, refinement_steps=0) == ((0, 2, 4), (1, 3))
    assert costliest(lengths, post_balance(lengths, num_bins=2), LengthCost()) == 6


def test_items_of_like_length_share_a_padded_bin():
    assert post_balance([10, 1, 10, 1, 1, 1], num_bins=3, cost=LengthCost(CostForm.PADDED)) == ((0,), (2,), (1, 3, 4, 5))


def test_padded_bins_that_stayed_empty_take_from_the_costliest():
    bins = post_balance([100, 1, 1, 1, 1], num_bins=4, cost=LengthCost(CostForm.PADDED))
    assert bins == ((0,), (1, 2), (3,), (4,))


@pytest.mark.parametrize("balance", [post_balance, post_balance_array, without_kernels(post_balance)])
@pytest.mark.parametrize(
    ("lengths", "arguments", "message"),
    [
        ([], {"num_bins": 2}, "the batch has no items; give at least one length"),
        ([1, -2], {"num_bins": 2}, "item 1 has length -2; lengths must be whole numbers of tokens from 0 to 2\\^62 - 1"),
        (np.array([1, -2]), {"num_bins": 2}, "item 1 has length -2"),
        ([1.0, float("nan")], {"num_bins": 2}, "item 1 has length nan"),
        ([float("inf")], {"num_bins": 2}, "item 0 has length inf"),
        ([1, 2.5], {"num_bins": 2}, "item 1 has length 2.5"),
        ([1, 2**70], {"num_bins": 2}, "item 1 has length 1180591620717411303424"),
        (["a"], {"num_bins": 2}, "item 0 has length 'a'"),
        ([[1, 2], [3, 4]], {"num_bins": 2}, "lengths have 2 dimensions; give one length per item"),
        ([2**61, 2**61], {"num_bins": 2}, "a batch of all items would cost up to 4.61e\\+18 tokens"),
        ([2**40] * 9, {"num_bins": 2, "cost": LengthCost(CostForm.LINEAR_QUADRATIC, 1.0)}, "check the lengths and the quadratic"),
        ([2**60, 1, 1, 1], {"num_bins": 2, "cost": LengthCost(CostForm.PADDED)}, "would cost up to 4.61e\\+18 tokens"),
        ([10**9] * 9, {"num_bins": 2, "cost": LengthCost(CostForm.PADDED_ATTENTION, 1e300)}, "would cost up to inf tokens"),
        ([1, 2], {"num_bins": 0}, "cannot spread 2 items over 0 bins; ask for 1 to 2147483647"),
        ([1, 2], {"num_bins": 2**31}, "cannot spread 2 items over 2147483648 bins"),
        ([1, 2, 3], {"num_bins": 2, "max_items_per_bin": 1}, "do not fit 2 bins of at most 1 items; allow 2 items per bin"),
        ([1, 2], {"num_bins": 2, "max_items_per_bin": 0}, "allow 1 items per bin"),
    ],
)
def test_wrong_arguments_are_named(balance, lengths, arguments, message):
    with pytest.raises(AssignmentError, match=message):
        balance(lengths, **arguments)


def test_fewer_items_than_bins_leave_bins_empty():
    for cost in COSTS:
        assert sorted(post_balance([4, 4], num_bins=3, cost=cost)) == [(), (0,), (1,)]
