import json

import pytest

from multimodal.schedule.chrome_trace import write_chrome_trace
from multimodal.values.action import Action, ActionKind, Place
from multimodal.values.errors import DataError
from multimodal.values.timeline import Timeline, TimelineEvent
from tools.trace import IDLE, Share, compare_timelines, main

FORWARDS = [Action(ActionKind.FORWARD, "llm", 0, stage, 0) for stage in (0, 1)]
RECEIVE = Action(ActionKind.RECEIVE_FORWARD, "llm", 0, 1, 0, Place("llm", 0, 0, 0))


def timeline_of(first, second):
    events = (
        TimelineEvent(FORWARDS[0], 0, 0.0, first),
        TimelineEvent(RECEIVE, 1, 0.0, first),
        TimelineEvent(FORWARDS[1], 1, first, first + second),
    )
    return Timeline(((0,), (1, 2)), events)


@pytest.fixture
def files(tmp_path):
    write_chrome_trace(timeline_of(1.0, 2.0), tmp_path / "a.json")
    write_chrome_trace(timeline_of(1.5, 2.0), tmp_path / "b.json.gz")
    return str(tmp_path / "a.json"), str(tmp_path / "b.json.gz")


def test_time_is_told_by_kind_and_lane():
    difference = compare_timelines(timeline_of(1.0, 2.0), timeline_of(1.5, 2.0))
    assert (difference.first_seconds, difference.second_seconds) == (3.0, 3.5)
    assert difference.by_kind == (Share("F", -1, 3.0, 3.5), Share("RF", -1, 1.0, 1.5), Share(IDLE, -1, 3.0, 3.5))
    assert difference.by_lane == (
        Share("F", 0, 1.0, 1.5),
        Share(IDLE, 0, 2.0, 2.0),
        Share("F", 1, 2.0, 2.0),
        Share("RF", 1, 1.0, 1.5),
        Share(IDLE, 1, 1.0, 1.5),
    )


def test_timelines_of_other_lanes_are_refused():
    with pytest.raises(DataError, match="2 lanes on 3 ranks against 1 lanes on 1 ranks"):
        compare_timelines(timeline_of(1.0, 2.0), Timeline(((0,),), ()))


def test_diff_reads_timelines_and_traces(files, tmp_path, capsys):
    assert main(["diff", *files, "--picture", str(tmp_path / "both.png")]) == 0
    assert "A takes 3 s, B 3.5 s: +16.7%" in capsys.readouterr().out
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    assert main(["diff", *files, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["by_kind"][1]
    assert found == {"kind": "RF", "lane": -1, "first_seconds": 1.0, "second_seconds": 1.5}
