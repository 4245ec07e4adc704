"""What another process takes of a schedule is the schedule, with the lane that was made for it."""

import pickle
from typing import Any

from multimodal.schedule.builders import BUILDERS
from tests.unit.schedule.schedule_cases import build_case, build_graph, deal


def test_a_schedule_that_others_have_read_travels_with_one_lane() -> None:
    schedule = BUILDERS["1f1b"](build_case(build_graph(), {"llm": (1, 3, 1)}, {"llm": deal(5, 1)}))
    assert len(schedule.lanes) == 3
    alone: Any = pickle.loads(pickle.dumps(schedule.spelled_out(1)))
    assert alone._lanes == {1: schedule.lane(1)} and alone == schedule
