import re

import pytest

from multimodal.schedule.text import schedule_from_text
from multimodal.schedule.validate import validate_schedule
from multimodal.values.action import Place, SegmentRange
from multimodal.values.errors import ScheduleError
from multimodal.values.parts.cuts import Cuts, SegmentCut
from tests.unit.schedule.schedule_cases import small


def test_a_forward_ascends_and_a_backward_descends() -> None:
    cut = SegmentCut(10, (2, 7), (5, 7))
    assert cut.forwards == tuple(SegmentRange(*ends) for ends in ((0, 2), (2, 7), (7, 10)))
    assert cut.backwards == tuple(SegmentRange(*ends) for ends in ((7, 10), (5, 7), (0, 5)))
    assert SegmentCut(10).forwards == (None,)


@pytest.mark.parametrize("boundaries", [(0,), (10,), (3, 3), (5, 2)])
def test_a_cut_that_is_none_is_refused(boundaries: tuple[int, ...]) -> None:
    with pytest.raises(ScheduleError, match="expected whole numbers that ascend from 1 to 9"):
        SegmentCut(10, boundaries)


def test_a_place_is_cut_in_one_way_only() -> None:
    place = Place("vision", 0, 0, 0)
    with pytest.raises(ScheduleError, match=re.escape("vision/0/0/0: cut into segments and into input and weight gradient")):
        Cuts(split=frozenset({place}), segments={place: SegmentCut(21, (2,))})


VISION = "lane 0: F vision/0/0/0{0:2}; F vision/0/0/0{2:58}; F vision/0/0/1; B vision/0/0/0{9:58}; B vision/0/0/0{0:9}; "
REST = "B vision/0/0/1; RG vision/0/0\nlane 1: F llm/0/0/0; B llm/0/0/0; F llm/0/0/1; B llm/0/0/1; RG llm/0/0"


@pytest.mark.parametrize(
    ("now", "then", "message"),
    [
        ("F vision/0/0/0{0:2}; ", "", "F vision/0/0/0{2:58}: missing range: nothing runs F vision/0/0/0{0:2}; add it"),
        ("{2:58}", "{3:58}", "F vision/0/0/0{3:58}: missing range: nothing runs F vision/0/0/0{2:3}; add it"),
        ("{0:2}", "{0:4}", "F vision/0/0/0{2:58}: ranges overlap: F vision/0/0/0{2:4} runs in it and in the range before"),
        ("{2:58}", "{2:30}", "F vision/0/0/0{2:30}: missing range: nothing runs F vision/0/0/0{30:58}; add it"),
        ("{0:9}", "{3:9}", "B vision/0/0/0{3:9}: missing range: nothing runs B vision/0/0/0{0:3}; add it"),
        ("F vision/0/0/1", "F vision/0/0/0{0:2}; F vision/0/0/1", "F vision/0/0/0{0:2}: duplicate: it stands in lane 0"),
        ("F vision/0/0/1", "F vision/0/0/0; F vision/0/0/1", "F vision/0/0/0: unknown action"),
        ("RG vision/0/0", "RG vision/0/0{0:2}", "RG vision/0/0{0:2}: only forwards and backwards run in ranges of segments"),
        ("{9:58}; B vision/0/0/0{0:9}", "{0:9}; B vision/0/0/0{9:58}", "B vision/0/0/0{0:9}: wrong order"),
        ("58", "40", "F vision/0/0/0{2:40}: wrong number of segments: its ranges end at 40, but its stage has 58 segments"),
    ],
)
def test_ranges_that_do_not_make_up_the_whole_are_refused(now: str, then: str, message: str) -> None:
    text = VISION + REST
    validate_schedule(schedule_from_text(text, small()))
    broken = (VISION + REST).replace(now, then)
    with pytest.raises(ScheduleError, match=re.escape(message)):
        validate_schedule(schedule_from_text(broken, small()))
