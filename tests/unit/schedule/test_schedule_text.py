import pickle
from typing import Any

import pytest

from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.text import lanes_from_text, lanes_to_text
from multimodal.values.action import Action, ActionKind, Place, action_to_text
from multimodal.values.errors import ScheduleError
from multimodal.values.schedule import Lane
from tests.unit.schedule.schedule_cases import one_unit

TEXT = """\
lane 0,1: F vision/0/0/3; SF vision/0/0/3>llm/1/0/2; RB vision/0/0/3<llm/1/0/2; B vision/0/0/3; RG vision/0/0
lane 2: RF llm/1/0/2<vision/0/0/3; F llm/1/0/2; B llm/1/0/2; SB llm/1/0/2>vision/0/0/3
lane 3:
"""


def test_text_round_trips() -> None:
    lanes = lanes_from_text(TEXT)
    assert lanes_to_text(lanes) == TEXT
    assert lanes[0].ranks == (0, 1)
    assert lanes[0].actions[1] == Action(ActionKind.SEND_FORWARD, "vision", 0, 0, 3, Place("llm", 1, 0, 2))
    assert lanes[0].actions[-1] == Action(ActionKind.REDUCE_GRADIENTS, "vision", 0, 0)
    assert lanes[2] == Lane((3,), ())


def test_blank_lines_and_spacing_do_not_matter() -> None:
    loose, strict = "\nlane 0:F llm/0/0/0 ;   B llm/0/0/0\n\n", "lane 0: F llm/0/0/0; B llm/0/0/0"
    assert lanes_from_text(loose) == lanes_from_text(strict)
    assert lanes_from_text("") == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lane 0: F llm/0/0/0\nlan 1: F llm/0/0/1", "line 2, column 1: found 'lan 1'; expected 'lane'"),
        ("lane 0: F llm/0/0/0; F llm/0/0", "line 1, column 22: found 'F llm/0/0'; F .* has a microbatch"),
        ("lane 0: F llm/0/0/0;", "line 1, column 21: found ''; expected an action"),
        ("lane 0: F llm/0/0/x", "line 1, column 9: found 'F llm/0/0/x'; expected an action"),
        ("lane 0: Q llm/0/0/0", "line 1, column 9: found 'Q'; expected one of F, B, I, W, SF, RF, SB, RB, GP, RG"),
        ("lane 0: RG llm/0/0/0", "found 'RG llm/0/0/0'; RG .* has no microbatch"),
        ("lane 0: SF vision/0/0/0", "SF .* has a peer; add it"),
        ("lane 0: F vision/0/0/0>llm/0/0/0", "F .* has no peer; remove it"),
        ("lane 0: SF vision/0/0/0<llm/0/0/0", "expected '>' before the peer of SF, found '<'"),
    ],
)
def test_parse_errors_say_where_and_what(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        lanes_from_text(text)


def test_a_unit_name_that_would_not_parse_back_is_refused() -> None:
    with pytest.raises(ScheduleError, match="unit name 'my unit' cannot be written"):
        action_to_text(Action(ActionKind.FORWARD, "my unit", 0, 0, 0))


def test_a_schedule_that_others_have_read_travels_with_one_lane() -> None:
    schedule = BUILDERS["1f1b"](one_unit(3, 5))
    assert len(schedule.lanes) == 3
    alone: Any = pickle.loads(pickle.dumps(schedule.spelled_out(1)))
    assert alone._lanes == {1: schedule.lane(1)} and alone == schedule
