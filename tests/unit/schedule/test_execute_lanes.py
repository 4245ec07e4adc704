import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from multimodal.schedule import execute_lanes as module
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.execute_lanes import execute_lanes, lane_arrays
from multimodal.schedule.execute_lanes_reference import execute_lanes_reference
from multimodal.values.errors import ScheduleError
from multimodal.values.schedule import Lane, Schedule
from multimodal.values.shape import StepShape
from tests.unit.schedule.built_schedules import broken_schedules, built_schedules
from tests.unit.schedule.schedule_cases import golden_cases


def assert_alike(schedule: Schedule, seconds: np.ndarray | None = None) -> None:
    assert module.kernels is not None
    arrays = lane_arrays(schedule, seconds=seconds)
    *columns, positions, is_done = module.kernels.execute_lanes(**arrays)
    *expected, expected_positions, expected_done = execute_lanes_reference(**arrays)
    events = sorted(zip(*(column.tolist() for column in columns), strict=True))
    assert events == sorted(zip(*(column.tolist() for column in expected), strict=True))
    assert list(positions) == expected_positions.tolist()
    assert [bool(each) for each in is_done] == [bool(each) for each in expected_done]


@settings(max_examples=120)
@given(built=built_schedules(), has_times=st.booleans())
def test_the_kernel_equals_its_reference_on_every_builder_and_pass(
    built: tuple[StepShape, Schedule, bool], has_times: bool
) -> None:
    _, schedule, _ = built
    times = [0.1 * (len(action.unit) + 2 * action.stage + action.microbatch % 3) for action in schedule.work.computed]
    assert_alike(schedule, np.array(times) if has_times else None)


@settings(max_examples=150)
@given(broken=broken_schedules())
def test_broken_schedules_stop_where_they_stop_in_the_reference(broken: tuple[StepShape, tuple[Lane, ...], bool]) -> None:
    case, lanes, lowered = broken
    try:
        schedule = Schedule.of_lanes(case, lanes, lowered=lowered)
    except ScheduleError:
        assume(False)
    assert_alike(schedule)


def test_without_the_kernel_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = BUILDERS["1f1b"](golden_cases()["crossed_groupings"])
    fast = execute_lanes(schedule)
    monkeypatch.setattr(module, "kernels", None)
    assert execute_lanes(schedule).events == fast.events
