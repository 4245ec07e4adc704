"""DIP in rounds: what a lane keeps, and that every assignment has an order."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal.schedule.builders import BUILDERS, DIP_ROUNDS
from multimodal.schedule.builders.dip import build_dip
from multimodal.schedule.validate import validate_schedule
from multimodal.values.action import ActionKind
from multimodal.values.errors import ScheduleError
from multimodal.values.shape import StepShape
from tests.unit.schedule.schedule_cases import build_case, build_graph, cases, deal


def one_lane(num_samples: int) -> StepShape:
    groups = deal(num_samples, 1)
    return build_case(
        build_graph("vision"), {"vision": (1, 1, 1), "llm": (1, 1, 1)}, {"vision": groups, "llm": groups}, colocated=True
    )


def most_open(case: StepShape, num_rounds: int) -> int:
    """Encoder microbatches between forward and backward."""
    open_now = most = 0
    for action in build_dip(case, num_rounds=num_rounds).lanes[0].actions:
        if action.unit == "vision":
            open_now += {ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1}.get(action.kind, 0)
            most = max(most, open_now)
    return most


def test_an_encoder_keeps_one_rounds_microbatches() -> None:
    case = one_lane(8)
    assert [most_open(case, rounds) for rounds in (1, 2, 4, 8)] == [8, 4, 2, 1]
    assert most_open(one_lane(7), 2) == 4


def test_one_round_is_dip_and_names_say_how_many() -> None:
    case = one_lane(4)
    assert build_dip(case, num_rounds=1) == BUILDERS["dip"](case)
    for rounds in DIP_ROUNDS:
        assert BUILDERS[f"dip-{rounds}"](case) == build_dip(case, num_rounds=rounds)
    with pytest.raises(ScheduleError, match="num_rounds must be at least 1, found 0"):
        build_dip(case, num_rounds=0)


@settings(max_examples=150)
@given(case=cases(), num_rounds=st.integers(1, 6), forward_only=st.booleans())
def test_every_assignment_has_an_order(case: StepShape, num_rounds: int, forward_only: bool) -> None:
    schedule = build_dip(replace(case, forward_only=forward_only), num_rounds=num_rounds)
    validate_schedule(schedule)
    plain = BUILDERS["gpipe"](replace(case, forward_only=forward_only))
    assert [set(lane.actions) for lane in schedule.lanes] == [set(lane.actions) for lane in plain.lanes]
