from dataclasses import fields
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import multimodal.schedule.compile_schedule as module
from multimodal.schedule.compile_schedule import CompiledSchedule, compile_schedule
from multimodal.schedule.lane_components import connected_lanes
from multimodal.schedule.numbered_lanes import number_lanes
from multimodal.schedule.numbered_structure import number_structure
from multimodal.schedule.schedule_structure import build_structure
from multimodal.values.errors import ScheduleError
from multimodal.values.schedule import ActionKind, Lane, Schedule
from tests.unit.schedule.built_schedules import broken_schedules, built_schedules
from tests.unit.schedule.schedule_cases import Case
from tests.unit.schedule.uniform_costs import RandomCosts


def assert_alike(found: object, expected: object) -> None:
    """Compare two values of one dataclass field by field, arrays to the last bit."""
    assert type(found) is type(expected)
    for field in fields(expected):  # type: ignore[arg-type]
        one, other = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(one, tuple) and all(isinstance(each, np.ndarray) for each in one):
            assert [each.tolist() for each in one] == [each.tolist() for each in other], field.name
        elif isinstance(one, np.ndarray):
            assert one.dtype == other.dtype, field.name
            assert one.tobytes() == other.tobytes(), field.name
        else:
            assert one == other, field.name


def compile_both(case: Case, schedule: Schedule, *, lowered: bool) -> tuple[CompiledSchedule, CompiledSchedule]:
    given = {"graph": case.graph, "plan": case.plan, "assignment": case.assignment}
    costs = RandomCosts(seed=1)
    fast = compile_schedule(schedule, **given, costs=costs, lowered=lowered)
    with patch.object(module, "number_lanes", lambda *_, **__: None):
        return fast, compile_schedule(schedule, **given, costs=costs, lowered=lowered)


@settings(max_examples=150)
@given(built=built_schedules())
def test_structures_are_those_that_actions_one_by_one_give(built: tuple[Case, Schedule, bool]) -> None:
    (graph, plan, assignment), schedule, lowered = built
    given = {"graph": graph, "plan": plan, "assignment": assignment, "lowered": lowered}
    numbered = number_lanes(schedule, **given)
    assert numbered is not None
    for lanes in connected_lanes(graph=graph, plan=plan, assignment=assignment):
        own = [schedule.lanes[lane] for lane in lanes]
        found = number_structure(numbered, lanes, own)
        assert found is not None
        assert_alike(found, build_structure(own, **given))


@settings(max_examples=80)
@given(built=built_schedules())
def test_compiled_schedules_are_alike(built: tuple[Case, Schedule, bool]) -> None:
    case, schedule, lowered = built
    found, expected = compile_both(case, schedule, lowered=lowered)
    assert_alike(found.arrays, expected.arrays)
    for field in fields(expected):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        assert field.name == "arrays" or np.array_equal(one, other) if isinstance(one, np.ndarray) else True
    assert found.actions == expected.actions


@settings(max_examples=150)
@given(broken=broken_schedules())
def test_broken_schedules_compile_alike_or_are_refused_with_the_same_words(broken: tuple[Case, Schedule, bool]) -> None:
    case, schedule, lowered = broken
    try:
        found, expected = compile_both(case, schedule, lowered=lowered)
    except ScheduleError as refused:
        with patch.object(module, "number_lanes", lambda *_, **__: None), pytest.raises(ScheduleError) as also:
            compile_both(case, schedule, lowered=lowered)
        assert str(also.value) == str(refused)
        return
    assert_alike(found.arrays, expected.arrays)


@settings(max_examples=40)
@given(built=built_schedules(), data=st.data())
def test_a_schedule_without_a_kind_of_action_compiles_alike(built: tuple[Case, Schedule, bool], data: st.DataObject) -> None:
    case, schedule, lowered = built
    left_out = data.draw(st.sampled_from([ActionKind.REDUCE_GRADIENTS, ActionKind.WEIGHT_GRADIENT]))
    assume(not any(lane.fillers for lane in schedule.lanes))
    kept = [tuple(action for action in lane.actions if action.kind is not left_out) for lane in schedule.lanes]
    without = Schedule(tuple(Lane(lane.ranks, actions) for lane, actions in zip(schedule.lanes, kept, strict=True)))
    try:
        found, expected = compile_both(case, without, lowered=lowered)
    except ScheduleError as refused:
        assert "which the schedule lacks" in str(refused)
        return
    assert_alike(found.arrays, expected.arrays)
