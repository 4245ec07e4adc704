"""The text form of a schedule (`Lane.__str__`): one line per lane, actions separated by semicolons, and its parser.

lane 0,1: F vision/0/0/3; SF vision/0/0/3>llm/1/0/2; B vision/0/0/3
lane 2: RF llm/1/0/2<vision/0/0/3; F llm/1/0/2; B llm/1/0/2; RG llm/1/0

lane 3: I llm/0/1/0; {W llm/0/1/0} I llm/0/1/1; B vision/0/0/4#1; RG llm/0/1[1:9]
lane 4,5: {F vision/0/0/7{0:3} @2; F vision/0/0/7{3:5} @4} F llm/0/0/3
"""

import re

from multimodal.values.action import (
    ACTION_TABLE,
    ARROWS,
    UNIT_NAME,
    Action,
    ActionKind,
    Coverage,
    LayerRange,
    Place,
    SampleSubset,
    SegmentRange,
    check_action,
)
from multimodal.values.errors import ScheduleError
from multimodal.values.schedule import NO_WAIT, Lane, Schedule, Slot, SlotMode
from multimodal.values.shape import StepShape

_LANE_PATTERN = re.compile(r"lane (\d+(?:,\d+)*):")
_ACTION_PATTERN = re.compile(
    rf"([A-Z]+) ({UNIT_NAME})/(\d+)/(\d+)(?:/(\d+))?(#\d+|\[\d+:\d+\]|\{{\d+:\d+\}})?"
    rf"(?:([<>])({UNIT_NAME})/(\d+)/(\d+)/(\d+))?(?: @(\d+))?"
)
_BRACES = re.compile(r"[{}]|(?:[^{}]|\{\d+:\d+\})+")
"""A brace around fillers, or the text between two braces; braces around numbers belong to an action."""


def schedule_to_text(schedule: Schedule) -> str:
    return "".join(f"{lane}\n" for lane in schedule.lanes)


def schedule_from_text(text: str, shape: StepShape, *, lowered: bool = False) -> Schedule:
    """Parse the text of a schedule; raises ScheduleError with line, column and token, also for actions that the step lacks."""
    return Schedule.of_lanes(shape, lanes_from_text(text), lowered=lowered)


def lanes_from_text(text: str) -> tuple[Lane, ...]:
    """Parse the lanes of a schedule of any step; raises ScheduleError with line, column and token."""
    lines = enumerate(text.splitlines(), start=1)
    return tuple(_lane_from_text(line, line_number) for line_number, line in lines if line.strip())


def _lane_from_text(line: str, line_number: int) -> Lane:
    head = _LANE_PATTERN.match(line)
    if head is None:
        raise _parse_error(line_number, 1, line.partition(":")[0], "expected 'lane', its ranks and a colon, as in 'lane 0,1:'")
    slots: list[Slot] = []
    is_filling = False
    pieces = list(_BRACES.finditer(line[head.end() :]))
    for index, piece in enumerate(pieces):
        column = head.end() + piece.start()
        if piece[0] in "{}":
            if (piece[0] == "{") == is_filling:
                expected = "expected braces in pairs, as in '{W llm/0/1/0} F llm/0/1/3'"
                raise _parse_error(line_number, column + 1, piece[0], expected)
            is_filling = piece[0] == "{"
            continue
        opens_next = index + 1 < len(pieces) and pieces[index + 1][0] == "{"
        text = piece[0].rstrip().removesuffix(";") if opens_next else piece[0]
        for token in text.split(";") if text.strip() else ():
            start = column + len(token) - len(token.lstrip())
            slots.append(_slot_from_text(token.strip(), line_number, start + 1, is_filling=is_filling))
            column += len(token) + 1
    if is_filling:
        raise _parse_error(line_number, len(line), "end of line", "expected '}' before it")
    return Lane(tuple(map(int, head[1].split(","))), tuple(slots))


def _slot_from_text(token: str, line_number: int, column: int, *, is_filling: bool) -> Slot:
    match = _ACTION_PATTERN.fullmatch(token)
    if match is None:
        expected = "expected an action such as 'F llm/0/1/2', 'RG llm/0/1' or 'SF vision/0/0/3>llm/1/0/2'"
        raise _parse_error(line_number, column, token, expected)
    kind, unit, replica, stage, microbatch, covers, arrow, *peer, wait = match.groups()
    if kind not in list(ActionKind):
        raise _parse_error(line_number, column, kind, f"expected one of {', '.join(ActionKind)}")
    action = Action(
        ActionKind(kind),
        unit,
        int(replica),
        int(stage),
        int(microbatch) if microbatch else -1,
        Place(peer[0], *map(int, peer[1:])) if arrow else None,
        _coverage(covers),
    )
    try:
        check_action(action)
    except ScheduleError as problem:
        raise _parse_error(line_number, column, token, str(problem)) from None
    if arrow and arrow != (wanted := ARROWS[ACTION_TABLE[action.kind].resource]):
        raise _parse_error(line_number, column, token, f"expected '{wanted}' before the peer of {kind}, found '{arrow}'")
    if wait and not is_filling:
        expected = "expected braces around what runs inside the action after it, as in '{F vision/0/0/3 @0} F llm/0/0/1'"
        raise _parse_error(line_number, column, token, expected)
    mode = SlotMode.INSIDE if wait else SlotMode.FILLS_WAIT if is_filling else SlotMode.IN_LINE
    return Slot(action, mode, int(wait) if wait else NO_WAIT)


def _coverage(text: str | None) -> Coverage:
    if not text:
        return None
    numbers = [int(number) for number in re.findall(r"\d+", text)]
    if text[0] == "#":
        return SampleSubset(*numbers)
    return (LayerRange if text[0] == "[" else SegmentRange)(*numbers)


def _parse_error(line_number: int, column: int, token: str, expected: str) -> ScheduleError:
    return ScheduleError(f"schedule text, line {line_number}, column {column}: found {token!r}; {expected}")
