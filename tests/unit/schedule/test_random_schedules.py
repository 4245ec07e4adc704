from collections import defaultdict
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import multimodal.schedule.link_actions as linking
import multimodal.schedule.list_schedule as listing
from multimodal.schedule.builders import BUILDERS, fed_encoders
from multimodal.schedule.passes.insert_communication import insert_communication
from multimodal.schedule.simulate import timeline_of_unit_costs
from multimodal.schedule.text import schedule_from_text, schedule_to_text
from multimodal.schedule.validate import validate_schedule
from multimodal.values.action import ACTION_TABLE, ActionKind, Memory
from multimodal.values.errors import ScheduleError
from multimodal.values.schedule import Schedule
from multimodal.values.shape import StepShape
from multimodal.values.work.step_work import step_work
from tests.unit.schedule.schedule_cases import builders_for, built_cases, cases
from tests.unit.values.work.dependencies import dependencies


@settings(max_examples=150)
@given(built=built_cases(), forward_only=st.booleans())
def test_any_builder_on_any_plan(built: tuple[StepShape, str], forward_only: bool) -> None:
    """Schedules are valid in both dialects and take equally long, print and parse, and are the same without the C++ kernels."""
    case, builder = built
    step = replace(case, forward_only=forward_only)
    compute = BUILDERS[builder](step)
    validate_schedule(compute)
    lowered = insert_communication(compute)
    validate_schedule(lowered)
    for schedule in (compute, lowered):
        assert schedule_from_text(schedule_to_text(schedule), step, lowered=schedule.lowered) == schedule
    durations = [timeline_of_unit_costs(schedule).duration_seconds for schedule in (compute, lowered)]
    assert durations[0] == durations[1] > 0, "messages take no time"
    assert_forwards_in_order(compute)
    assert listing.kernels is not None
    with patch.object(listing, "kernels", None), patch.object(linking, "kernels", None):
        assert BUILDERS[builder](step) == compute


def assert_forwards_in_order(schedule: Schedule) -> None:
    for lane in schedule.lanes:
        order = defaultdict(list)
        for action in lane.actions:
            if action.kind is ActionKind.FORWARD:
                order[action[1:4]].append(action.microbatch)
        assert all(microbatches == list(range(len(microbatches))) for microbatches in order.values())


@pytest.mark.parametrize("is_fast", [True, False])
def test_an_action_that_waits_for_none_that_is_scheduled_is_refused(is_fast: bool) -> None:
    columns = {"flags": np.zeros(1, np.uint8), "microbatches": np.zeros(1, np.int64)}
    pairs = dict.fromkeys(("before", "after"), np.zeros(0, np.int64))
    needs = {"need_starts": np.array([0, 0, 1]), "needs": np.array([0])}
    with (
        patch.object(linking, "kernels", linking.kernels if is_fast else None),
        pytest.raises(IndexError, match="not scheduled"),
    ):
        linking.link_actions(listed=np.array([1]), **needs, **columns, **pairs)


@settings(max_examples=40)
@given(case=cases())
def test_every_dependency_is_itself_expected(case: StepShape) -> None:
    for lowered in (False, True):
        expected = step_work(case).actions if lowered else step_work(case).computed
        assert len(set(expected)) == len(expected)
        assert {need for action in expected for need in dependencies(action, case, lowered=lowered)} <= set(expected)


@settings(max_examples=40)
@given(case=cases())
def test_gpipe_does_no_forward_after_a_backward(case: StepShape) -> None:
    for lane in BUILDERS["gpipe"](case).lanes:
        kinds = [action.kind for action in lane.actions if action.kind is not ActionKind.REDUCE_GRADIENTS]
        assert kinds == sorted(kinds, key=[ActionKind.FORWARD, ActionKind.BACKWARD].index)


@settings(max_examples=40)
@given(case=cases())
def test_1f1b_never_keeps_more_than_gpipe(case: StepShape) -> None:
    def peak(builder: str) -> list[int]:
        peaks = []
        for lane in BUILDERS[builder](case).lanes:
            kept, most = 0, 0
            for action in lane.actions:
                memory = ACTION_TABLE[action.kind].memory
                kept += (memory is Memory.ALLOCATES) - (memory is Memory.FREES)
                most = max(most, kept)
            peaks.append(most)
        return peaks

    assert all(ours <= theirs for ours, theirs in zip(peak("1f1b"), peak("gpipe"), strict=True))


@settings(max_examples=40)
@given(case=cases())
def test_a_builder_that_a_layout_does_not_allow_says_what_to_change(case: StepShape) -> None:
    for builder in set(BUILDERS) - set(builders_for(case)):
        refused = not BUILDERS[builder].takes_fed_encoders and fed_encoders(case.graph)
        layout = rf"{builder} needs .* found .* in the plan, or choose "
        message = f"{layout}|encoders that encoders feed.*; choose " if refused else layout
        with pytest.raises(ScheduleError, match=message):
            BUILDERS[builder](case)
