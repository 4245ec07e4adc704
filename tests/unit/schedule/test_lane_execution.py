from pathlib import Path

import pytest

from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.draw import draw_timeline
from multimodal.schedule.passes.insert_communication import insert_communication
from multimodal.schedule.simulate import timeline_of_unit_costs
from multimodal.schedule.text import schedule_from_text
from multimodal.values.action import action_to_text
from multimodal.values.errors import ScheduleError
from multimodal.values.shape import StepShape
from multimodal.values.timeline import Timeline
from tests.unit.schedule.schedule_cases import build_case, build_graph, deal


def one_sample() -> StepShape:
    return build_case(build_graph("vision"), {"vision": (1, 1, 1), "llm": (1, 1, 1)}, {"vision": deal(1, 1), "llm": deal(1, 1)})


def lowered_timeline(case: StepShape) -> Timeline:
    schedule = insert_communication(BUILDERS["1f1b"](case))
    return timeline_of_unit_costs(schedule)


def test_the_timeline_shows_computing_waiting_and_reducing() -> None:
    events = lowered_timeline(one_sample()).events
    assert [(action_to_text(action), lane, start, end) for action, lane, start, end in events] == [
        ("F vision/0/0/0", 0, 0, 1),
        ("RF llm/0/0/0<vision/0/0/0", 1, 0, 1),
        ("RB vision/0/0/0<llm/0/0/0", 0, 1, 4),
        ("F llm/0/0/0", 1, 1, 2),
        ("B llm/0/0/0", 1, 2, 4),
        ("B vision/0/0/0", 0, 4, 6),
        ("RG llm/0/0", 1, 4, 5),
        ("RG vision/0/0", 0, 6, 7),
    ]


def test_a_gradient_that_only_passes_through_costs_half() -> None:
    case = build_case(
        build_graph("vision", frozen=["llm"]), {"vision": (1, 1, 1), "llm": (1, 1, 1)}, {"vision": deal(1, 1), "llm": deal(1, 1)}
    )
    assert lowered_timeline(case).duration_seconds == 1 + 1 + 1 + 2 + 1


def test_a_schedule_that_cannot_finish_has_no_timeline() -> None:
    case = one_sample()
    vision, llm = "B vision/0/0/0; F vision/0/0/0; RG vision/0/0", "F llm/0/0/0; B llm/0/0/0; RG llm/0/0"
    schedule = schedule_from_text(f"lane 0: {vision}\nlane 1: {llm}", case)
    with pytest.raises(ScheduleError, match="cannot finish"):
        timeline_of_unit_costs(schedule)
    with pytest.raises(ScheduleError, match=r"(?s)cannot finish.*lane 0 \(ranks 0\):  > B vision/0/0/0 <"):
        insert_communication(schedule)


def test_a_timeline_is_drawn_as_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, timeline in {"full": lowered_timeline(one_sample()), "empty": Timeline(((0,),), ())}.items():
        draw_timeline(timeline, tmp_path / f"{name}.png", title=name)
        assert (tmp_path / f"{name}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
