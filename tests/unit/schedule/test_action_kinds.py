"""Every consumer of the action table knows every kind."""

import pytest

from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.passes.gather_parameters import gather_parameters
from multimodal.schedule.passes.insert_communication import insert_communication
from multimodal.schedule.text import lanes_from_text, schedule_from_text, schedule_to_text
from multimodal.schedule.unit_cost import unit_cost
from multimodal.schedule.validate import validate_schedule
from multimodal.values.action import ACTION_TABLE, Action, ActionKind, Place, Resource, action_to_text
from multimodal.values.errors import ScheduleError
from multimodal.values.parts.cuts import Cuts
from multimodal.values.schedule import lane_of
from multimodal.values.work.step_work import step_work
from tests.unit.schedule.schedule_cases import golden_cases
from tests.unit.values.work.dependencies import dependencies

CASE = golden_cases()["encoder_dp2_llm_pp2"]
STEP = CASE.with_cuts(Cuts(split=frozenset({Place("llm", 0, 1, 0)}), gathers_parameters=True))


def example(kind: ActionKind) -> Action:
    return next(action for action in step_work(STEP).actions if action.kind is kind)


def test_every_kind_has_a_row() -> None:
    assert set(ACTION_TABLE) == set(ActionKind)


@pytest.mark.parametrize("kind", ActionKind)
def test_text_handles_every_kind(kind: ActionKind) -> None:
    action = example(kind)
    assert lanes_from_text(f"lane 0: {action_to_text(action)}")[0].actions == (action,)


@pytest.mark.parametrize("kind", ActionKind)
def test_dependencies_and_cost_handle_every_kind(kind: ActionKind) -> None:
    action = example(kind)
    needed = set(dependencies(action, STEP, lowered=True))
    assert (needed and needed <= set(step_work(STEP).actions)) or kind is ActionKind.GATHER_PARAMETERS
    is_message = ACTION_TABLE[kind].resource in (Resource.SEND, Resource.RECEIVE)
    assert (unit_cost(action, STEP) == 0) == is_message


@pytest.mark.parametrize("kind", ActionKind)
def test_the_validator_misses_every_kind(kind: ActionKind) -> None:
    built = schedule_to_text(BUILDERS["1f1b"](CASE))
    compute = schedule_from_text(built.replace("B llm/0/1/0", "I llm/0/1/0; W llm/0/1/0"), CASE)
    compute = gather_parameters(compute)
    full = insert_communication(compute)
    dropped = example(kind)
    lanes = [lane_of(lane.ranks, [action for action in lane.actions if action != dropped]) for lane in full.lanes]
    with pytest.raises(ScheduleError, match=f"^{action_to_text(dropped)}: missing"):
        validate_schedule(full.with_lanes(lanes))
