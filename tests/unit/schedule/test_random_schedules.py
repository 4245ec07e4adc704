import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import multimodal.schedule.list_schedule as listing
from multimodal.schedule.builders import BUILDERS
from multimodal.values.action import ActionKind
from multimodal.values.errors import ScheduleError
from multimodal.values.shape import StepShape
from multimodal.values.work.step_work import step_work
from tests.unit.schedule.schedule_cases import builders_for, cases
from tests.unit.schedule.test_closed_forms import peaks
from tests.unit.values.work.dependencies import dependencies


@pytest.mark.parametrize("is_fast", [True, False])
def test_an_action_that_waits_for_none_that_is_scheduled_is_refused(is_fast: bool) -> None:
    run = listing.kernels.link_actions if is_fast and listing.kernels else listing.link_actions
    needs, nothing = (np.array([0, 0, 1]), np.array([0])), np.zeros(0, np.int64)
    with pytest.raises(IndexError, match="not scheduled"):
        run(np.array([1]), *needs, np.zeros(1, np.uint8), np.zeros(1, np.int64), nothing, nothing)


@settings(max_examples=40)
@given(case=cases())
def test_every_dependency_is_itself_expected(case: StepShape) -> None:
    for lowered in (False, True):
        expected = step_work(case).actions if lowered else step_work(case).computed
        assert len(set(expected)) == len(expected)
        assert {need for action in expected for need in dependencies(action, case, lowered=lowered)} <= set(expected)


@settings(max_examples=40)
@given(case=cases(), builder=st.sampled_from(("gpipe", "breadth-first")))
def test_no_forward_follows_a_backward(case: StepShape, builder: str) -> None:
    for lane in BUILDERS[builder](case).lanes:
        kinds = [action.kind for action in lane.actions if action.kind is not ActionKind.REDUCE_GRADIENTS]
        assert kinds == sorted(kinds, key=[ActionKind.FORWARD, ActionKind.BACKWARD].index)


@settings(max_examples=40)
@given(case=cases())
def test_1f1b_never_keeps_more_than_gpipe(case: StepShape) -> None:
    assert all(ours <= theirs for ours, theirs in zip(peaks(case, "1f1b"), peaks(case, "gpipe"), strict=True))


@settings(max_examples=40)
@given(case=cases())
def test_a_builder_that_a_layout_does_not_allow_says_what_to_change(case: StepShape) -> None:
    for builder in set(BUILDERS) - set(builders_for(case)):
        message = rf"{builder} (needs .* found .* in the plan, or|runs encoders as one, .*;) choose "
        with pytest.raises(ScheduleError, match=message):
            BUILDERS[builder](case)
