import re
from collections.abc import Hashable, Sequence
from itertools import groupby

import pytest
from hypothesis import given, settings

from multimodal.schedule.validate import validate_schedule
from multimodal.values.action import Action, Place, Resource, SegmentRange
from multimodal.values.errors import ScheduleError
from multimodal.values.parts.cuts import Cuts, SegmentCut
from multimodal.values.schedule import Lane, Schedule, lane_of
from multimodal.values.shape import StepShape
from multimodal.values.work.step_work import step_work
from tests.unit.schedule.built_schedules import broken_schedules
from tests.unit.schedule.schedule_cases import reduced_together, small
from tests.unit.schedule.schedule_text import lanes_from_text
from tests.unit.values.work.dependencies import dependencies


def check(case: StepShape, lanes: Sequence[Lane] | str, *, lowered: bool = False) -> None:
    lanes = lanes_from_text(lanes) if isinstance(lanes, str) else lanes
    validate_schedule(Schedule.of_lanes(case, lanes, lowered=lowered))


VISION = "lane 0: F vision/0/0/0; F vision/0/0/1; B vision/0/0/0; B vision/0/0/1; RG vision/0/0"
LLM = "lane 1: F llm/0/0/0; B llm/0/0/0; F llm/0/0/1; B llm/0/0/1; RG llm/0/0"


def test_the_message_shows_the_place_in_a_grid():
    vision = VISION.replace("F vision/0/0/1; B vision/0/0/0", "B vision/0/0/0; F vision/0/0/1")
    llm = "lane 1: F llm/0/0/0; F llm/0/0/1; B llm/0/0/0; B llm/0/0/1; RG llm/0/0"
    with pytest.raises(ScheduleError) as refused:
        check(small(), f"{vision}\n{llm}")
    assert str(refused.value).splitlines()[1:] == [
        "  lane 0 (ranks 0):  F vision/0/0/0 | > B vision/0/0/0 < | F vision/0/0/1 | B vision/0/0/1 | ...",
        "  lane 1 (ranks 1):  F llm/0/0/0 | > F llm/0/0/1 < | B llm/0/0/0 | B llm/0/0/1 | ...",
    ]


def is_valid(step: StepShape, lanes: Sequence[Lane], *, lowered: bool) -> bool:
    """What the validator says, found action by action from `dependencies` alone; for lanes without fillers."""
    try:
        step = Schedule.of_lanes(step, lanes, lowered=lowered).shape
    except ScheduleError:
        return False
    expected = step_work(step).actions if lowered else step_work(step).computed
    owners = {action: set(step.plan.lanes_of_stage(*action[1:4])) for action in expected}
    if any(set(each.actions) != {action for action in expected if lane in owners[action]} for lane, each in enumerate(lanes)):
        return False
    for lane in lanes:
        at = {action: position for position, action in enumerate(lane.actions)}
        later = [
            need
            for action in lane.actions
            if action.kind.resource is not Resource.RECEIVE
            for need in dependencies(action, step, lowered=lowered)
            if at.get(need, -1) > at[action]
        ]
        if later:
            return False
    return _meet(step, lanes, lowered=lowered)


def _meet(step: StepShape, lanes: Sequence[Lane], *, lowered: bool) -> bool:
    """True if the lanes come to their ends doing one thing at a time, once all of its ends are there and its needs are done."""
    rows = [
        [(what, set(actions)) for what, actions in groupby(lane.actions, key=lambda each: _together(each, step))]
        for lane in lanes
    ]
    done: set[Action] = set()
    if any(len({what for what, _ in row}) < len(row) for row in rows):
        return False  # the ends of a message on one lane, with other work between them
    while any(rows):
        heads: dict[Hashable, set[Action]] = {}
        for what, actions in (row[0] for row in rows if row):
            heads.setdefault(what, set()).update(actions)
        awaited = {what for row in rows for what, _ in row[1:]}
        ready = {
            what
            for what, actions in heads.items()
            if what not in awaited
            and done | actions >= {n for each in actions for n in dependencies(each, step, lowered=lowered)}
        }
        if not ready:
            return False
        done.update(*(heads[what] for what in ready))
        rows = [row[1:] if row and row[0][0] in ready else row for row in rows]
    return True


def _together(action: Action, step: StepShape) -> Hashable:
    """What the actions have in common that take place at one moment."""
    resource = action.kind.resource
    if resource is Resource.COLLECTIVE:
        return min(reduced_together(action, step), key=lambda each: each.replica)
    if resource is Resource.COMPUTE:
        return action
    ends = (action.place, action.peer) if resource is Resource.SEND else (action.peer, action.place)
    return action.kind.value[-1], ends, action.covers


ACTION = r"[A-Z]+ \w+/\d+/\d+\S*: "
SHOWN = re.compile(r"^  lane \d+ \(ranks [\d,]+\):  .*> .* <", re.MULTILINE)


@settings(max_examples=300)
@given(broken=broken_schedules())
def test_the_validator_agrees_with_one_that_asks_for_every_action(broken):
    case, lanes, lowered = broken
    in_line = tuple(lane_of(lane.ranks, lane.actions) for lane in lanes)
    expected = is_valid(case, in_line, lowered=lowered)
    try:
        check(case, in_line, lowered=lowered)
    except ScheduleError as refused:
        assert not expected
        assert re.match(ACTION, str(refused)), "it names an action"
        assert re.search(SHOWN, str(refused)) or "unknown action" in str(refused), "and shows its place"
    else:
        assert expected


def test_a_forward_ascends_and_a_backward_descends():
    cut = SegmentCut(10, (2, 7), (5, 7))
    assert cut.forwards == tuple(SegmentRange(*ends) for ends in ((0, 2), (2, 7), (7, 10)))
    assert cut.backwards == tuple(SegmentRange(*ends) for ends in ((7, 10), (5, 7), (0, 5)))
    assert SegmentCut(10).forwards == (None,)


def test_a_place_is_cut_in_one_way_only():
    place = Place("vision", 0, 0, 0)
    with pytest.raises(ScheduleError, match=re.escape("vision/0/0/0: cut into segments and into input and weight gradient")):
        Cuts(split=frozenset({place}), segments={place: SegmentCut(21, (2,))})
