"""Partitions of few items, held against an exact solver and against the algorithms that are known to do well on them."""

from heapq import heapify, heappop, heappush

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.exact_partition import least_costliest
from multimodal.balance.algorithms.bounded_search import search_partition
from multimodal.balance.algorithms.differencing_partition import partition_by_differencing
from multimodal.balance.algorithms.exchange_refinement import GOOD_ENOUGH, BinLimits
from multimodal.balance.algorithms.post_balance import MOST_SEARCHED_ITEMS, post_balance
from multimodal.balance.length_cost import CostForm, LengthCost
from tests.unit.without_kernels import without_kernels

COSTS = [
    LengthCost(),
    LengthCost(CostForm.LINEAR_QUADRATIC, 0.01),
    LengthCost(CostForm.PADDED),
    LengthCost(CostForm.PADDED_ATTENTION, 0.01),
]
ROUNDING = 1e-7


def costliest(lengths, bins, cost):
    return max(cost.batch_cost([lengths[item] for item in items]) for items in bins)


def draw(kind, num_items, seed):
    generator = np.random.default_rng(seed)
    if kind == "even":
        return generator.integers(1, 1000, num_items).tolist()
    return (generator.lognormal(5, 1, num_items).astype(int) + 1).tolist()


@pytest.mark.parametrize("cost", COSTS, ids=str)
@pytest.mark.parametrize(("num_bins", "num_items"), [(6, 12), (4, 10), (3, 9), (2, 10)])
@pytest.mark.parametrize("kind", ["even", "long-tailed"])
def test_few_items_are_placed_as_an_exact_solver_does(cost, num_bins, num_items, kind):
    lengths = draw(kind, num_items, seed=num_bins)
    best = least_costliest(lengths, num_bins=num_bins, cost=cost)
    found = costliest(lengths, post_balance(lengths, num_bins=num_bins, cost=cost), cost)
    assert best * (1 - ROUNDING) <= found <= best * (1 + 1 / GOOD_ENOUGH + ROUNDING)


def longest_first(costs, num_bins):
    bins = [(0, index, []) for index in range(num_bins)]
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        load, index, items = heappop(bins)
        heappush(bins, (load + costs[item], index, [*items, item]))
    return [items for _, _, items in bins]


def differencing(costs, num_bins):
    order = sorted(range(len(costs)), key=lambda item: -costs[item])
    states = [(-costs[item], age, [(costs[item], [item])] + [(0, [])] * (num_bins - 1)) for age, item in enumerate(order)]
    heapify(states)
    for age in range(len(costs), 2 * len(costs) - 1):
        one, other = heappop(states)[2], heappop(states)[2]
        bins = [(a + b, [*mine, *theirs]) for (a, mine), (b, theirs) in zip(one, reversed(other), strict=True)]
        bins.sort(key=lambda each: -each[0])
        heappush(states, (bins[-1][0] - bins[0][0], age, [(load - bins[-1][0], items) for load, items in bins]))
    return [items for _, items in states[0][2]]


@pytest.mark.parametrize("cost", COSTS, ids=str)
@pytest.mark.parametrize("rule", [longest_first, differencing])
@given(
    lengths=st.one_of(
        st.lists(st.integers(1, 30), min_size=1, max_size=40), st.lists(st.integers(1, 10**5), min_size=1, max_size=40)
    ),
    num_bins=st.integers(1, 9),
)
def test_no_partition_is_worse_than_longest_first_or_differencing(cost, rule, lengths, num_bins):
    peer = rule([cost.batch_cost([length]) for length in lengths], num_bins)
    found = post_balance(lengths, num_bins=num_bins, cost=cost)
    assert costliest(lengths, found, cost) <= costliest(lengths, peer, cost) * (1 + ROUNDING)


@pytest.mark.parametrize("cost", COSTS, ids=str)
@pytest.mark.parametrize(("num_items", "num_bins"), [(60, 23), (MOST_SEARCHED_ITEMS, 7), (MOST_SEARCHED_ITEMS + 1, 7)])
def test_the_kernel_searches_as_its_reference_does(cost, num_items, num_bins):
    for kind in ("even", "long-tailed"):
        lengths = draw(kind, num_items, seed=num_bins)
        limit = -(-num_items // num_bins) + 1
        given = {"num_bins": num_bins, "cost": cost, "max_items_per_bin": limit, "refinement_steps": 2**14}
        assert post_balance(lengths, **given) == without_kernels(post_balance)(lengths, **given)


def test_differencing_decides_for_the_difference_of_the_largest():
    assert partition_by_differencing([8, 7, 6, 5, 4], num_bins=2) == [1, 0, 1, 0, 0]


def test_a_search_without_budget_changes_nothing_and_one_with_enough_finds_the_optimum():
    costs, bins = [7, 6, 5, 4, 4, 4], [0, 1, 2, 2, 1, 0]
    limits = BinLimits(num_bins=3, max_items_per_bin=6, bound=10)
    assert search_partition(bins, costs, None, limits=limits, num_steps=0) == bins
    found = search_partition(bins, costs, None, limits=limits, num_steps=1000)
    assert max(sum(cost for cost, index in zip(costs, found, strict=True) if index == each) for each in range(3)) == 11
    few = search_partition(bins, costs, None, limits=limits._replace(max_items_per_bin=2), num_steps=1000)
    assert sorted(few) == [0, 0, 1, 1, 2, 2]
