from heapq import heapify, heappop, heappush
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.differencing_partition import partition_by_differencing
from benchmarks.exact_partition import least_costliest
from benchmarks.partition_bound import batch_cost, partition_lower_bound
from multimodal.balance.algorithms.longest_first_partition import partition_longest_first
from multimodal.balance.algorithms.post_balance import post_balance
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
FEW = st.lists(st.integers(1, 12), min_size=1, max_size=7)


def in_bins(bin_of_item, num_bins):
    return [np.flatnonzero(np.asarray(bin_of_item) == index).tolist() for index in range(num_bins)]


def costliest(lengths, bin_of_item, cost):
    return max(batch_cost([lengths[item] for item in items], cost) for items in in_bins(bin_of_item, max(bin_of_item) + 1))


def optimum(lengths, num_bins, cost):
    return min(costliest(lengths, bin_of_item, cost) for bin_of_item in product(range(num_bins), repeat=len(lengths)))


@pytest.mark.parametrize("cost", COSTS, ids=str)
@given(lengths=LENGTHS, num_bins=st.integers(1, 9), steps=st.integers(1, 2000))
def test_more_refinement_is_never_worse_than_less_and_greedy_is_as_without_kernels(cost, lengths, num_bins, steps):
    budgets = (0, steps, 2 * steps, 2**18)
    bins = [post_balance(lengths, num_bins=num_bins, cost=cost, refinement_steps=budget) for budget in budgets]
    by_itself = without_kernels(post_balance)(lengths, num_bins=num_bins, cost=cost)
    if cost.form is not CostForm.PADDED_ATTENTION:  # the kernel tries bins that are filled less, too
        assert np.array_equal(bins[0], by_itself)
    assert all(len(each) == len(lengths) and min(each) >= 0 and max(each) < num_bins for each in (by_itself, *bins))
    found = [costliest(lengths, each, cost) for each in bins]
    assert all(after <= before * (1 + ROUNDING) for before, after in pairwise(found))
    assert found[-1] >= partition_lower_bound(lengths, num_bins=num_bins, cost=cost) * (1 - ROUNDING)


@pytest.mark.parametrize("cost", [*COSTS, LengthCost(CostForm.PADDED_ATTENTION, 5.0)], ids=str)
@given(lengths=FEW, num_bins=st.integers(1, 3))
def test_few_items_come_close_to_the_optimum_whatever_the_budget(cost, lengths, num_bins):
    """Padded partitions are optimal, sums within Graham's bound, and padded attention within the same."""
    best, share = optimum(lengths, num_bins, cost), 4 / 3 - 1 / (3 * num_bins)
    most = best * {CostForm.PADDED: 1, CostForm.PADDED_ATTENTION: 4 / 3}.get(cost.form, share) * (1 + ROUNDING)
    assert partition_lower_bound(lengths, num_bins=num_bins, cost=cost) <= best * (1 + ROUNDING)
    for steps in (0, 2**18) if cost.form is not CostForm.PADDED_ATTENTION else (2**18,):
        found = costliest(lengths, post_balance(lengths, num_bins=num_bins, cost=cost, refinement_steps=steps), cost)
        assert best * (1 - ROUNDING) <= found <= most


@pytest.mark.deep(when=lambda num_bins, kind: (num_bins % 4 == 2) != (kind == "even"))
@pytest.mark.parametrize("cost", COSTS, ids=str)
@pytest.mark.parametrize(("num_bins", "num_items"), [(6, 12), (4, 10), (3, 9), (2, 10)])
@pytest.mark.parametrize("kind", ["even", "long-tailed"])
def test_few_items_are_placed_as_an_exact_solver_does(cost, num_bins, num_items, kind):
    generator = np.random.default_rng(num_bins)
    even, long_tailed = generator.integers(1, 1000, num_items), generator.lognormal(5, 1, num_items).astype(int) + 1
    lengths = (even if kind == "even" else long_tailed).tolist()
    best = least_costliest(lengths, num_bins=num_bins, cost=cost)
    found = costliest(lengths, post_balance(lengths, num_bins=num_bins, cost=cost), cost)
    assert best * (1 - ROUNDING) <= found <= best * (1 + 1 / 1000 + ROUNDING)


def longest_first(costs, num_bins):
    """Return the bin of each item; costs descend."""
    bin_of_item, bins = [], [(0, index) for index in range(num_bins)]
    heapify(bins)
    for cost in costs:
        load, index = heappop(bins)
        heappush(bins, (load + cost, index))
        bin_of_item.append(index)
    return bin_of_item


@pytest.mark.parametrize("cost", COSTS, ids=str)
@pytest.mark.parametrize("rule", [longest_first, lambda costs, count: partition_by_differencing(costs, num_bins=count)])
@given(
    lengths=st.one_of(
        st.lists(st.integers(1, 30), min_size=1, max_size=40), st.lists(st.integers(1, 10**5), min_size=1, max_size=40)
    ),
    num_bins=st.integers(1, 9),
)
def test_no_partition_is_worse_than_longest_first_or_differencing(cost, rule, lengths, num_bins):
    lengths.sort(reverse=True)
    peer = rule([batch_cost([length], cost) for length in lengths], num_bins)
    found = post_balance(lengths, num_bins=num_bins, cost=cost)
    assert costliest(lengths, found, cost) <= costliest(lengths, peer, cost) * (1 + ROUNDING)


@pytest.mark.parametrize("lengths", [[2**33 + item * item for item in range(30)], [2**55 + item * item for item in range(30)]])
@pytest.mark.parametrize("sigma", [0.3, 1.0, 2.5])
def test_the_linear_greedy_step_is_longest_first(sigma, lengths):
    """Large batches, which the kernel places by runs and by a heap, and costs beyond 32 and 64 bits beside a bin."""
    many = (np.random.default_rng(0).lognormal(6, sigma, size=3000).astype(np.int64) + 1).tolist()
    for given_lengths, num_bins in ((many, 50), (many, 700), (lengths, 4)):
        greedy = post_balance(given_lengths, num_bins=num_bins, refinement_steps=0)
        bins = partition_longest_first(given_lengths, num_bins=num_bins)
        assert in_bins(greedy, num_bins) == list(map(sorted, bins))


def test_items_of_like_length_share_a_padded_bin_and_empty_ones_take_from_the_costliest():
    cost = LengthCost(CostForm.PADDED)
    assert post_balance([10, 1, 10, 1, 1, 1], num_bins=3, cost=cost).tolist() == [0, 2, 1, 2, 2, 2]
    assert post_balance([100, 1, 1, 1, 1], num_bins=4, cost=cost).tolist() == [0, 1, 1, 2, 3]


@pytest.mark.parametrize(
    ("lengths", "arguments", "message"),
    [
        ([1, -2], {}, "item 1 has length -2; lengths must be whole numbers of tokens from 0 to 2\\^62 - 1"),
        (np.array([1, -2]), {}, "item 1 has length -2"),
        ([1.0, float("nan")], {}, "item 1 has length nan"),
        ([1, 2.5], {}, "item 1 has length 2.5"),
        ([1, 2**70], {}, "item 1 has length 1180591620717411303424"),
        ([2**61, 2**61], {}, "a batch of all items would cost up to 4.61e\\+18 tokens"),
        ([2**40] * 9, {"cost": LengthCost(CostForm.LINEAR_QUADRATIC, 1.0)}, "check the lengths and the quadratic"),
        ([2**60, 1, 1, 1], {"cost": LengthCost(CostForm.PADDED)}, "would cost up to 4.61e\\+18 tokens"),
        ([10**9] * 9, {"cost": LengthCost(CostForm.PADDED_ATTENTION, 1e300)}, "would cost up to inf tokens"),
    ],
)
def test_wrong_arguments_are_named(lengths, arguments, message):
    with pytest.raises(AssignmentError, match=message):
        post_balance(lengths, num_bins=2, **arguments)
