"""The text form of a schedule (`Lane.__str__`): one line per lane, actions separated by semicolons, and its parser.

lane 0,1: F vision/0/0/3; SF vision/0/0/3>llm/1/0/2; B vision/0/0/3
lane 2: RF llm/1/0/2<vision/0/0/3; F llm/1/0/2; B llm/1/0/2; RG llm/1/0

lane 3: I llm/0/1/0; {W llm/0/1/0} I llm/0/1/1; B vision/0/0/4#1; RG llm/0/1[1:9]
lane 4,5: {F vision/0/0/7{0:3} @2; F vision/0/0/7{3:5} @4} F llm/0/0/3
"""

import re

from multimodal.values.action import Action, ActionKind, LayerRange, Place, SampleSubset, SegmentRange
from multimodal.values.schedule import NO_WAIT, Lane, Schedule, Slot, SlotMode
from multimodal.values.shape import StepShape

_ACTION = re.compile(
    r"([A-Z]+) ([^/\s]+)/(\d+)/(\d+)(?:/(\d+))?(#\d+|\[\d+:\d+\]|\{\d+:\d+\})?"
    r"(?:[<>]([^/\s]+)/(\d+)/(\d+)/(\d+))?(?: @(\d+))?"
)
_BRACES_AND_ACTIONS = re.compile(r"[{}]|(?:[^{};]|\{\d+:\d+\})+")
"""A brace around fillers, or an action; braces around numbers belong to an action."""
_COVERAGES = {"#": SampleSubset, "[": LayerRange, "{": SegmentRange}


def schedule_to_text(schedule: Schedule) -> str:
    return "".join(f"{lane}\n" for lane in schedule.lanes)


def schedule_from_text(text: str, shape: StepShape, *, lowered: bool = False) -> Schedule:
    """Parse the text of a schedule; raises ScheduleError for actions that the step lacks."""
    return Schedule.of_lanes(shape, lanes_from_text(text), lowered=lowered)


def lanes_from_text(text: str) -> tuple[Lane, ...]:
    """Parse the lanes of a schedule of any step."""
    return tuple(_lane_from_text(*line.removeprefix("lane ").split(":", 1)) for line in text.splitlines() if line.strip())


def _lane_from_text(ranks: str, text: str) -> Lane:
    slots: list[Slot] = []
    is_filling = False
    for piece in filter(None, map(str.strip, _BRACES_AND_ACTIONS.findall(text))):
        if piece in ("{", "}"):
            is_filling = piece == "{"
        else:
            slots.append(_slot_from_text(piece, is_filling=is_filling))
    return Lane(tuple(map(int, ranks.split(","))), tuple(slots))


def _slot_from_text(text: str, *, is_filling: bool) -> Slot:
    match = _ACTION.fullmatch(text)
    assert match is not None, text
    kind, unit, replica, stage, microbatch, covers, *peer, wait = match.groups()
    action = Action(
        ActionKind(kind),
        unit,
        int(replica),
        int(stage),
        int(microbatch) if microbatch else -1,
        Place(peer[0], *map(int, peer[1:])) if peer[0] else None,
        _COVERAGES[covers[0]](*map(int, re.findall(r"\d+", covers))) if covers else None,
    )
    mode = SlotMode.INSIDE if wait else SlotMode.FILLS_WAIT if is_filling else SlotMode.IN_LINE
    return Slot(action, mode, int(wait) if wait else NO_WAIT)
