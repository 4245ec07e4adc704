"""What another process takes of a schedule is the schedule, with the lane that was made for it."""

import pickle
from typing import Any

import numpy as np

from multimodal.schedule.builders import BUILDERS
from multimodal.values.schedule import NO_WAIT, Schedule, SlotMode
from tests.unit.schedule.schedule_cases import build_case, build_graph, deal

NUMBERS = ("lane_starts", "pieces", "modes", "waits")


def assert_comes_back(schedule: Schedule) -> None:
    schedule.lane(1)
    found: Any = pickle.loads(pickle.dumps(schedule))
    for name in NUMBERS:
        before, after = getattr(schedule, name), getattr(found, name)
        assert np.array_equal(before, after) and before.dtype == after.dtype, name
    assert found.lowered == schedule.lowered and found._lanes == schedule._lanes != {}
    assert found == schedule


def test_a_schedule_in_line_and_one_with_fillers() -> None:
    case = build_case(build_graph(), {"llm": (1, 3, 1)}, {"llm": deal(5, 1)})
    schedule = BUILDERS["1f1b"](case)
    assert (schedule.waits == NO_WAIT).all() and not schedule.modes.any()
    assert_comes_back(schedule)
    modes, waits = schedule.modes.copy(), schedule.waits.copy()
    modes[1], waits[1] = SlotMode.INSIDE, 3
    assert_comes_back(Schedule(schedule.shape, schedule.lane_starts, schedule.pieces, modes, waits))


def test_a_schedule_that_others_have_read_travels_with_one_lane() -> None:
    schedule = BUILDERS["1f1b"](build_case(build_graph(), {"llm": (1, 3, 1)}, {"llm": deal(5, 1)}))
    assert len(schedule.lanes) == 3
    alone: Any = pickle.loads(pickle.dumps(schedule.spelled_out(1)))
    assert alone._lanes == {1: schedule.lane(1)} and alone == schedule
