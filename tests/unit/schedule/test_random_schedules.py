from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings

import multimodal.schedule.link_actions as linking
from multimodal.schedule.builders import BUILDERS
from multimodal.values.action import ACTION_TABLE, ActionKind, Memory
from multimodal.values.errors import ScheduleError
from multimodal.values.shape import StepShape
from multimodal.values.work.step_work import step_work
from tests.unit.schedule.schedule_cases import builders_for, cases
from tests.unit.values.work.dependencies import dependencies


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
        message = rf"{builder} (needs .* found .* in the plan, or|runs encoders as one, .*;) choose "
        with pytest.raises(ScheduleError, match=message):
            BUILDERS[builder](case)
