from collections.abc import Callable
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

import multimodal.schedule.validate as module
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.lane_execution_reference import execute_lanes_reference
from multimodal.schedule.numbered_lanes import number_lanes
from multimodal.schedule.passes.insert_communication import insert_communication
from multimodal.schedule.surely_valid import is_surely_valid
from multimodal.schedule.validate import validate_schedule
from multimodal.values.errors import ScheduleError
from multimodal.values.schedule import Lane, Schedule
from tests.unit.schedule.built_schedules import broken_schedules, built_schedules
from tests.unit.schedule.schedule_cases import Case, built_cases


def message_of(check: Callable[[], None]) -> str | None:
    try:
        check()
    except ScheduleError as problem:
        return str(problem)
    return None


def assert_told_alike(case: Case, schedule: Schedule, *, lowered: bool, forward_only: bool = False) -> str | None:
    """Validate with and without the numbers; returns the message."""

    def check() -> None:
        graph, plan, assignment = case
        validate_schedule(schedule, graph=graph, plan=plan, assignment=assignment, lowered=lowered, forward_only=forward_only)

    found = message_of(check)
    by_reference = patch.object(module, "execute_lanes", execute_lanes_reference)
    with patch.object(module, "number_lanes", lambda *_, **__: None), by_reference:
        assert message_of(check) == found
    return found


@settings(max_examples=120)
@given(built=built_schedules())
def test_what_builders_and_passes_make_is_surely_valid(built: tuple[Case, Schedule, bool]) -> None:
    case, schedule, lowered = built
    graph, plan, assignment = case
    numbered = number_lanes(schedule, graph=graph, plan=plan, assignment=assignment, lowered=lowered)
    assert numbered is not None
    assert is_surely_valid(numbered, forward_only=False)
    refused = assert_told_alike(case, schedule, lowered=lowered)
    assert refused is None or any(lane.fillers for lane in schedule.lanes)  # Passes in any order may need what others defer.


@settings(max_examples=60)
@given(built=built_cases(), lowered=st.booleans())
def test_forwards_alone_are_surely_valid(built: tuple[Case, str], lowered: bool) -> None:
    case, builder = built
    graph, plan, assignment = case
    given = {"graph": graph, "plan": plan, "assignment": assignment}
    schedule = BUILDERS[builder](*case, forward_only=True)
    schedule = insert_communication(schedule, **given) if lowered else schedule
    numbered = number_lanes(schedule, **given, lowered=lowered)
    assert numbered is not None and is_surely_valid(numbered, forward_only=True)
    assert assert_told_alike(case, schedule, lowered=lowered, forward_only=True) is None
    has_backwards = any(unit.role.value == "backbone" and not unit.freeze_module for unit in graph.units)
    if has_backwards:
        assert not is_surely_valid(numbered, forward_only=False)


@settings(max_examples=300)
@given(broken=broken_schedules())
def test_broken_schedules_are_refused_with_the_same_words(broken: tuple[Case, Schedule, bool]) -> None:
    case, schedule, lowered = broken
    assert_told_alike(case, schedule, lowered=lowered)


@settings(max_examples=60)
@given(built=built_schedules(), data=st.data())
def test_wrong_fillers_are_refused_with_the_same_words(built: tuple[Case, Schedule, bool], data: st.DataObject) -> None:
    case, schedule, lowered = built
    lanes = list(schedule.lanes)
    lane = data.draw(st.integers(0, len(lanes) - 1))
    positions = data.draw(st.sets(st.integers(0, max(0, len(lanes[lane].actions) - 1)), max_size=3))
    if lanes[lane].actions:
        lanes[lane] = Lane(lanes[lane].ranks, lanes[lane].actions, frozenset(positions))
    assert_told_alike(case, Schedule(tuple(lanes)), lowered=lowered)
