import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal.schedule import lane_execution as module
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.lane_execution import execute_lanes
from multimodal.schedule.lane_execution_reference import execute_lanes_reference
from multimodal.schedule.numbered_lanes import number_lanes
from multimodal.values.schedule import Action, Schedule
from tests.unit.schedule.built_schedules import broken_schedules, built_schedules
from tests.unit.schedule.schedule_cases import Case, golden_cases


def assert_alike(case: Case, schedule: Schedule, *, lowered: bool, **options: object) -> None:
    graph, plan, assignment = case
    given = {"graph": graph, "plan": plan, "assignment": assignment, "lowered": lowered, **options}
    fast, reference = execute_lanes(schedule, **given), execute_lanes_reference(schedule, **given)
    assert fast.events == reference.events
    assert fast.positions == reference.positions
    assert fast.done == reference.done
    assert fast.stuck(schedule) == reference.stuck(schedule)
    assert fast.duration_seconds == reference.duration_seconds


@settings(max_examples=120)
@given(built=built_schedules(), has_times=st.booleans())
def test_the_kernel_equals_its_reference_on_every_builder_and_pass(built: tuple[Case, Schedule, bool], has_times: bool) -> None:
    case, schedule, lowered = built

    def duration(action: Action) -> float:
        return 0.1 * (len(action.unit) + 2 * action.stage + action.microbatch % 3)

    assert module.kernels is not None
    numbered = number_lanes(schedule, graph=case.graph, plan=case.plan, assignment=case.assignment, lowered=lowered)
    assert numbered is not None and numbered.is_regular
    assert_alike(case, schedule, lowered=lowered, duration=duration if has_times else None)


@settings(max_examples=150)
@given(broken=broken_schedules())
def test_broken_schedules_stop_where_they_stop_in_the_reference(broken: tuple[Case, Schedule, bool]) -> None:
    case, schedule, lowered = broken
    assert_alike(case, schedule, lowered=lowered)


def test_without_the_kernel_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, plan, assignment = case = golden_cases()["crossed_groupings"]
    schedule = BUILDERS["1f1b"](*case)
    given = {"graph": graph, "plan": plan, "assignment": assignment, "lowered": False}
    fast = execute_lanes(schedule, **given)
    monkeypatch.setattr(module, "kernels", None)
    monkeypatch.setattr(module, "_execute", None)
    assert execute_lanes(schedule, **given).events == fast.events
