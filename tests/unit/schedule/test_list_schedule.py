import numpy as np
import pytest

import multimodal.schedule.list_schedule as listing
from multimodal.schedule.list_schedule import Policy, list_schedule
from multimodal.schedule.text import schedule_to_text
from multimodal.schedule.validate import validate_schedule
from tests.unit.schedule.schedule_cases import build_case, build_graph


def test_a_limit_that_would_deadlock_gives_way() -> None:
    """One LLM microbatch needs two encoder microbatches, of which only one may be in flight."""
    case = build_case(
        build_graph("vision"), {"vision": (1, 1, 1), "llm": (1, 1, 1)}, {"vision": [[[0], [1], [2]]], "llm": [[[0, 1], [2]]]}
    )
    schedule = list_schedule(case, Policy(forward_limits={("vision", 0, 0): 1}))
    validate_schedule(schedule)
    assert schedule_to_text(schedule).splitlines()[0] == (
        "lane 0: F vision/0/0/0; F vision/0/0/1; B vision/0/0/0; B vision/0/0/1; F vision/0/0/2; B vision/0/0/2; RG vision/0/0"
    )


def test_a_limit_holds_where_it_can() -> None:
    case = build_case(
        build_graph("vision"), {"vision": (1, 1, 1), "llm": (1, 1, 1)}, {"vision": [[[0], [1]]], "llm": [[[0], [1]]]}
    )
    schedule = list_schedule(case, Policy(forward_limits={("vision", 0, 0): 1}))
    assert schedule_to_text(schedule).splitlines()[0] == (
        "lane 0: F vision/0/0/0; B vision/0/0/0; F vision/0/0/1; B vision/0/0/1; RG vision/0/0"
    )


def test_a_backward_below_its_floor_waits_for_forwards_until_none_is_left() -> None:
    case = build_case(build_graph(), {"llm": (1, 1, 1)}, {"llm": [[[0], [1], [2]]]})
    schedule = list_schedule(case, Policy(forward_floors={("llm", 0, 0): 2}))
    assert schedule_to_text(schedule).splitlines()[0] == (
        "lane 0: F llm/0/0/0; F llm/0/0/1; B llm/0/0/0; F llm/0/0/2; B llm/0/0/1; B llm/0/0/2; RG llm/0/0"
    )


def test_a_floor_above_the_limit_gives_way() -> None:
    case = build_case(build_graph(), {"llm": (1, 1, 1)}, {"llm": [[[0], [1]]]})
    policy = Policy(forward_floors={("llm", 0, 0): 2}, forward_limits={("llm", 0, 0): 1})
    schedule = list_schedule(case, policy)
    assert schedule_to_text(schedule).splitlines()[0] == (
        "lane 0: F llm/0/0/0; B llm/0/0/0; F llm/0/0/1; B llm/0/0/1; RG llm/0/0"
    )


@pytest.mark.parametrize("is_fast", [True, False])
def test_an_action_that_waits_for_none_that_is_scheduled_is_refused(is_fast: bool) -> None:
    run = listing.kernels.link_actions if is_fast and listing.kernels else listing.link_actions
    needs, nothing = (np.array([0, 0, 1]), np.array([0])), np.zeros(0, np.int64)
    with pytest.raises(IndexError, match="not scheduled"):
        run(np.array([1]), *needs, np.zeros(1, np.uint8), np.zeros(1, np.int64), nothing, nothing)
