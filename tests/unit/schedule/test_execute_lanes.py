from unittest import mock

import numpy as np
from hypothesis import assume, given, settings

from multimodal.schedule import simulate_events
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.execute_lanes import Execution, execute_lanes
from multimodal.schedule.passes.insert_communication import insert_communication
from multimodal.values.action import Action, ActionKind
from multimodal.values.errors import ScheduleError
from multimodal.values.schedule import Lane, Schedule, lane_of
from multimodal.values.shape import StepShape
from tests.unit.schedule.built_schedules import broken_schedules
from tests.unit.schedule.schedule_cases import build_case, build_graph, deal, golden_cases


def assert_alike(schedule: Schedule, seconds: np.ndarray | None = None) -> None:
    """Run a schedule with the kernel and with its reference."""
    fast = execute_lanes(schedule, seconds=seconds)
    schedule.made.clear()
    with mock.patch.object(simulate_events, "kernels", None):
        slow = execute_lanes(schedule, seconds=seconds)
    assert (fast.events, fast.positions.tolist(), done(fast)) == (slow.events, slow.positions.tolist(), done(slow))


def done(execution: Execution) -> set[Action]:
    """All complete actions."""
    return {execution.schedule.work.actions[piece] for piece in np.flatnonzero(execution.is_done).tolist()}


@settings(max_examples=100)
@given(broken=broken_schedules())
def test_broken_schedules_stop_where_they_stop_in_the_reference(broken: tuple[StepShape, tuple[Lane, ...], bool]) -> None:
    case, lanes, lowered = broken
    try:
        schedule = Schedule.of_lanes(case, lanes, lowered=lowered)
    except ScheduleError:
        assume(False)
    assert_alike(schedule)


def test_a_send_before_its_producer_holds_up_its_lane_and_a_receive_does_not() -> None:
    case = build_case(build_graph("vision"), {"vision": (1, 1, 1), "llm": (1, 1, 1)}, {"vision": deal(1, 1), "llm": deal(1, 1)})
    schedule = insert_communication(BUILDERS["1f1b"](case))
    assert not execute_lanes(schedule).stuck
    vision, llm = schedule.lanes
    moved = schedule.with_lanes([lane_of(vision.ranks, (vision.actions[1], vision.actions[0], *vision.actions[2:])), llm])
    assert vision.actions[1].kind is ActionKind.SEND_FORWARD
    stopped = execute_lanes(moved)
    assert stopped.stuck == {0: 0, 1: 1}
    assert not done(stopped) & {vision.actions[0], vision.actions[1]}


def test_work_that_is_missing_from_one_of_its_lanes_never_runs() -> None:
    schedules = map(BUILDERS["1f1b"], golden_cases().values())
    schedule = next(each for each in schedules if not each.work.is_in_one_lane)
    whole = execute_lanes(schedule)
    wide = next(action for action in schedule.work.computed if len(schedule.shape.lanes_of(*action[1:4])) > 1)
    index = schedule.shape.lanes_of(*wide[1:4])[0]
    lanes = list(schedule.lanes)
    lanes[index] = lane_of(lanes[index].ranks, [action for action in lanes[index].actions if action != wide])
    assert wide in done(whole)
    assert wide not in done(execute_lanes(schedule.with_lanes(lanes)))
