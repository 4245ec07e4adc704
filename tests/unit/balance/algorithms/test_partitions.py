"""Partitions and cuts: kernels against their references, and both against brute force."""

import shutil
from itertools import pairwise, permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.differencing_partition import partition_by_differencing
from benchmarks.exact_partition import least_costliest
from benchmarks.partition_bound import batch_cost, partition_lower_bound
from benchmarks.reordering_steps import fill_intervals, pipeline_seconds, reorder_step_by_step
from multimodal.balance.algorithms.cut_evenly import cut_evenly, cut_evenly_reference
from multimodal.balance.algorithms.post_balance import partition_longest_first, post_balance
from multimodal.balance.algorithms.reorder_microbatches import pipeline_steps, reorder_microbatches
from multimodal.balance.length_cost import CostForm, LengthCost
from multimodal.kernels import kernels
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.passes.insert_communication import insert_communication
from multimodal.schedule.simulate import simulate_schedule
from multimodal.values.action import ActionKind
from multimodal.values.arrays.rows import row_starts
from tests.unit.golden_answers import Kinds, golden_test
from tests.unit.schedule.built_schedules import GivenCosts
from tests.unit.schedule.schedule_cases import build_case, build_graph, deal
from tests.unit.without_kernels import without_kernels

ROWS = st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=7), st.integers(0, 9)), min_size=1, max_size=4)


@given(rows=ROWS)
@pytest.mark.skipif(kernels is None, reason="the kernels are not built")
def test_the_kernel_equals_its_reference(rows: list[tuple[list[int], int]]) -> None:
    starts = row_starts([len(amounts) for amounts, _ in rows])
    amounts = np.array([amount for amounts, _ in rows for amount in amounts], np.int64)
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


ANY_COSTS = st.one_of(
    st.lists(st.integers(0, 20), max_size=40),
    st.lists(st.floats(0, 1e6), max_size=40),
    st.lists(st.one_of(st.integers(0, 2**60), st.floats(0, 1e18)), max_size=10),
)


def test_the_kernel_is_built_where_a_compiler_is():
    if not any(shutil.which(compiler) for compiler in ("c++", "g++", "clang++")):
        pytest.skip("no C++ compiler on this machine")
    assert kernels is not None, "run 'pip install -e .' to build multimodal._kernels"


@given(costs=ANY_COSTS, num_bins=st.integers(1, 9))
def test_bins_the_kernel_equals_its_reference(costs, num_bins):
    bins = partition_longest_first(costs, num_bins=num_bins)
    assert bins == without_kernels(partition_longest_first)(costs, num_bins=num_bins)
    assert sorted(index for members in bins for index in members) == list(range(len(costs)))


@given(lengths=st.lists(st.integers(0, 50), min_size=1, max_size=12), num_bins=st.integers(1, 4), is_padded=st.booleans())
def test_no_bin_has_more_items_than_allowed(lengths, num_bins, is_padded):
    most = -(-len(lengths) // num_bins)
    cost = LengthCost(CostForm.PADDED if is_padded else CostForm.LINEAR)
    for place in (post_balance, without_kernels(post_balance)):
        bins = place(lengths, num_bins=num_bins, cost=cost, max_items_per_bin=most)
        assert max(np.bincount(bins)) <= most and len(bins) == len(lengths)


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


@pytest.mark.parametrize("cost", COSTS, ids=str)
@given(
    lengths=st.one_of(
        st.lists(st.integers(1, 30), min_size=1, max_size=40), st.lists(st.integers(1, 10**5), min_size=1, max_size=40)
    ),
    num_bins=st.integers(1, 9),
)
def test_no_partition_is_worse_than_longest_first_or_differencing(cost, lengths, num_bins):
    lengths.sort(reverse=True)
    costs = [batch_cost([length], cost) for length in lengths]
    found = costliest(lengths, post_balance(lengths, num_bins=num_bins, cost=cost), cost)
    differencing = in_bins(partition_by_differencing(costs, num_bins=num_bins), num_bins)
    for bins in (partition_longest_first(costs, num_bins=num_bins), differencing):
        assert found <= max(batch_cost([lengths[item] for item in items], cost) for items in bins) * (1 + ROUNDING)


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


def post_balance_both(document):
    """Balance a list of lengths, and where its numbers are small an array of them."""
    lengths, cost = document["lengths"], LengthCost(CostForm(document["form"]), document["weight"])
    found = post_balance(lengths, num_bins=2, cost=cost)
    assert np.array_equal(found, post_balance(np.array(lengths), num_bins=2, cost=cost))
    return str(found.tolist())


LENGTHS_OF_ITEMS: Kinds = {
    "two bins": ({"lengths": [1, 2], "form": "linear", "weight": 0.0}, post_balance_both),
    "array": ({"lengths": [1, 2]}, lambda document: str(post_balance(np.array(document["lengths"]), num_bins=2).tolist())),
    "longest first": ({"costs": [], "num_bins": 2}, lambda document: str(partition_longest_first(**document))),
}
test_wrong_lengths_and_costs_are_named = golden_test("post_balance.txt", LENGTHS_OF_ITEMS)


SECONDS = st.one_of(st.integers(0, 9), st.floats(0, 10), st.floats(0, 1e300))


@st.composite
def pipelines(draw):
    num_stages, num_chunks, num_microbatches = (draw(st.integers(1, most)) for most in (4, 3, 12))
    row = st.lists(SECONDS, min_size=num_microbatches, max_size=num_microbatches)
    table = st.lists(row, min_size=num_stages * num_chunks, max_size=num_stages * num_chunks)
    return {"forward_seconds": draw(table), "backward_seconds": draw(table), "num_stages": num_stages}


def stragglers(num_stages, num_microbatches, seed):
    """One encoder stage whose time varies, LLM stages that vary less."""
    generator = np.random.default_rng(seed)
    forward = np.repeat(generator.lognormal(0, 0.2, (1, num_microbatches)), num_stages, axis=0)
    forward[0] = generator.lognormal(0, 0.8, num_microbatches)
    return {"forward_seconds": forward, "backward_seconds": 2 * forward, "num_stages": num_stages}


@settings(max_examples=60)
@given(pipeline=pipelines(), num_swaps=st.sampled_from([256, 0, 9]))
def test_the_kernel_equals_its_reference_and_never_ends_later(pipeline, num_swaps):
    order = reorder_microbatches(**pipeline, num_swaps=num_swaps)
    assert order == reorder_step_by_step(**pipeline, num_swaps=num_swaps)
    given_order = range(len(pipeline["forward_seconds"][0]))
    assert without_kernels(reorder_microbatches)(**pipeline) == tuple(given_order)
    given_seconds, seconds = pipeline_seconds(given_order, **pipeline), pipeline_seconds(order, **pipeline)
    assert seconds < given_seconds or order == tuple(given_order)


def test_small_pipelines_come_close_to_the_best_order():
    found, best = [], []
    for seed in range(6):
        pipeline = stragglers(3, 6, seed)
        found.append(pipeline_seconds(reorder_microbatches(**pipeline), **pipeline))
        best.append(min(pipeline_seconds(order, **pipeline) for order in permutations(range(6))))
    assert all(seconds >= least for seconds, least in zip(found, best, strict=True))
    assert np.mean(np.array(found) / best) < 1.02


@pytest.mark.parametrize(("num_stages", "num_chunks"), [(4, 1), (2, 2)])
def test_stragglers_cost_less_after_reordering(num_stages, num_chunks):
    given_seconds, reordered, improved = [], [], []
    for seed in range(10):
        pipeline = stragglers(num_stages * num_chunks, 16, seed) | {"num_stages": num_stages}
        given_seconds.append(pipeline_seconds(range(16), **pipeline))
        reordered.append(pipeline_seconds(reorder_microbatches(**pipeline, num_swaps=0), **pipeline))
        improved.append(pipeline_seconds(reorder_microbatches(**pipeline), **pipeline))
    assert sum(improved) < sum(reordered) < 0.99 * sum(given_seconds)


def test_intervals_are_filled_as_the_paper_lists_it():
    # Stage 0 alone varies. First the smallest (2), last the two next smallest (4, 0), descending.
    sizes = [2.0, 6.0, 1.0, 4.0, 1.5, 5.0, 3.0]
    forward = [[*sizes, 3.0], [1.0] * 8, [1.0] * 8]
    backward = [[2.0 * value for value in row] for row in forward]
    totals = [3 * size + 6 for size in sizes]
    order = fill_intervals(pipeline_steps(3, 1, 7), num_stages=3, forward=forward, backward=backward, totals=totals)
    assert order[0] == 2 and order[-2:] == [0, 4] and sorted(order) == list(range(7))
    # After F of 2 at stage 0 (1 s) its backward is there at 1 + 2 + 4 = 7 s: 6 s for two forwards, so 3 s is closest, then 3 s.
    assert order[1] == 6


def durations(num_virtual_stages, num_microbatches, seed):
    generator = np.random.default_rng(seed)
    shape = num_virtual_stages, num_microbatches
    return generator.integers(0, 9, shape).astype(float), generator.integers(0, 19, shape).astype(float)


def simulated_seconds(case, builder, forward, backward, order, first_stages):
    def seconds(action):
        table = forward if action.kind is ActionKind.FORWARD else backward
        return (
            0.0
            if action.kind is ActionKind.REDUCE_GRADIENTS
            else table[first_stages[action.unit] + action.stage, order[action.microbatch]]
        )

    schedule = insert_communication(BUILDERS[builder](case))
    return simulate_schedule(schedule, GivenCosts(seconds=seconds)).iteration_seconds


@pytest.mark.parametrize(
    ("num_stages", "num_chunks", "num_microbatches"), [(1, 1, 3), (3, 1, 2), (4, 1, 9), (2, 2, 5), (3, 2, 7)]
)
def test_one_unit_takes_what_the_simulator_says(num_stages, num_chunks, num_microbatches):
    groupings = {"llm": deal(num_microbatches, 1)}
    case = build_case(build_graph(), {"llm": (1, num_stages, 1)}, groupings, layouts={"llm": {"chunks": num_chunks}})
    for seed in range(5):
        forward, backward = durations(num_stages * num_chunks, num_microbatches, seed)
        order = np.random.default_rng(seed).permutation(num_microbatches).tolist()
        found = pipeline_seconds(order, forward_seconds=forward, backward_seconds=backward, num_stages=num_stages)
        builder = "1f1b" if num_chunks == 1 else "interleaved-1f1b"
        assert found == simulated_seconds(case, builder, forward, backward, order, {"llm": 0})
