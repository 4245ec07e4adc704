"""Microbatches reordered by a recursion over pipelines, which is held against the simulator."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal.balance.algorithms.reorder_microbatches import (
    fill_intervals,
    interval_to_fill,
    pipeline_seconds,
    pipeline_steps,
    reorder_microbatches,
)
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.passes.insert_communication import insert_communication
from multimodal.schedule.simulate import simulate_schedule
from multimodal.values.action import ActionKind
from tests.unit.schedule.schedule_cases import build_case, build_graph, deal
from tests.unit.schedule.uniform_costs import GivenCosts
from tests.unit.without_kernels import without_kernels

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
@given(pipeline=pipelines(), num_swaps=st.sampled_from([None, 0, 9]))
def test_the_kernel_equals_its_reference_and_never_ends_later(pipeline, num_swaps):
    order = reorder_microbatches(**pipeline, num_swaps=num_swaps)
    assert order == without_kernels(reorder_microbatches)(**pipeline, num_swaps=num_swaps)
    given_order = range(len(pipeline["forward_seconds"][0]))
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


def test_the_interval_is_the_wait_that_a_forward_fills():
    # Two stages, forward 1 s and backward 2 s on each: stage 0 ends F0 at 1 and could start B0 at 4.
    pipeline = {"steps": pipeline_steps(2, 1, 3), "num_stages": 2, "forward": [[1.0] * 4] * 2, "backward": [[2.0] * 4] * 2}
    assert interval_to_fill([0], **pipeline) == 3.0
    # Then F1 until 2, B0 from 4 to 6; stage 1 runs F1 until 5 and B1 until 7.
    assert interval_to_fill([0, 1], **pipeline) == 1.0
