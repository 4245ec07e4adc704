"""The recursion against the simulator of schedules, and intervals against the end of every step."""

import numpy as np
import pytest

from multimodal.balance.algorithms.reorder_microbatches import interval_to_fill, pipeline_seconds, pipeline_steps
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.passes.insert_communication import insert_communication
from multimodal.schedule.simulate import simulate_schedule
from multimodal.values.action import ActionKind
from tests.unit.schedule.schedule_cases import build_case, build_graph, deal
from tests.unit.schedule.uniform_costs import GivenCosts


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
