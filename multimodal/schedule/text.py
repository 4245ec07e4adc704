"""The text form of a schedule: one line per lane, actions separated by semicolons.

    lane 0,1: F vision/0/0/3; SF vision/0/0/3>llm/1/0/2; B vision/0/0/3
    lane 2: RF llm/1/0/2<vision/0/0/3; F llm/1/0/2; B llm/1/0/2; RG llm/1/0

A place is unit/replica/stage/microbatch; `>` leads to the peer that a send feeds, `<` to the peer that a receive drains.
"""

import re

from multimodal.values.errors import ScheduleError
from multimodal.values.schedule import ACTION_TABLE, Action, ActionKind, Lane, Place, Resource, Schedule

_UNIT = r"[^\s/<>;:,]+"
_UNIT_PATTERN = re.compile(_UNIT)
_LANE_PATTERN = re.compile(r"lane (\d+(?:,\d+)*):")
_ACTION_PATTERN = re.compile(rf"([A-Z]+) ({_UNIT})/(\d+)/(\d+)(?:/(\d+))?(?:([<>])({_UNIT})/(\d+)/(\d+)/(\d+))?")
_ARROW = {Resource.SEND: ">", Resource.RECEIVE: "<"}


def schedule_to_text(schedule: Schedule) -> str:
    """Print a schedule; raises ScheduleError for an action that its kind's row in the action table does not allow."""
    return "".join(f"{_lane_to_text(lane)}\n" for lane in schedule.lanes)


def _lane_to_text(lane: Lane) -> str:
    actions = "; ".join(map(action_to_text, lane.actions))
    return f"lane {','.join(map(str, lane.ranks))}:{' ' if actions else ''}{actions}"


def action_to_text(action: Action) -> str:
    """Print one action, such as `SF vision/0/0/3>llm/1/0/2`."""
    _check_action(action)
    row = ACTION_TABLE[action.kind]
    place: tuple[object, ...] = action.place if row.has_microbatch else action.place[:3]
    peer = f"{_ARROW[row.resource]}{'/'.join(map(str, action.peer))}" if action.peer else ""
    return f"{action.kind.value} {'/'.join(map(str, place))}{peer}"


def schedule_from_text(text: str) -> Schedule:
    """Parse what `schedule_to_text` printed (blank lines are skipped); raises ScheduleError with line, column and token."""
    lines = enumerate(text.splitlines(), start=1)
    return Schedule(tuple(_lane_from_text(line, line_number) for line_number, line in lines if line.strip()))


def _lane_from_text(line: str, line_number: int) -> Lane:
    head = _LANE_PATTERN.match(line)
    if head is None:
        raise _parse_error(line_number, 1, line.partition(":")[0], "expected 'lane', its ranks and a colon, as in 'lane 0,1:'")
    actions, column = [], head.end()
    for token in line[head.end() :].split(";") if line[head.end() :].strip() else ():
        start = column + len(token) - len(token.lstrip())
        actions.append(_action_from_text(token.strip(), line_number, start + 1))
        column += len(token) + 1
    return Lane(tuple(map(int, head[1].split(","))), tuple(actions))


def _action_from_text(token: str, line_number: int, column: int) -> Action:
    found = _ACTION_PATTERN.fullmatch(token)
    if found is None:
        expected = "expected an action such as 'F llm/0/1/2', 'RG llm/0/1' or 'SF vision/0/0/3>llm/1/0/2'"
        raise _parse_error(line_number, column, token, expected)
    kind, unit, replica, stage, microbatch, arrow, *peer = found.groups()
    if kind not in list(ActionKind):
        raise _parse_error(line_number, column, kind, f"expected one of {', '.join(ActionKind)}")
    action = Action(
        ActionKind(kind),
        unit,
        int(replica),
        int(stage),
        int(microbatch) if microbatch else -1,
        Place(peer[0], *map(int, peer[1:])) if arrow else None,
    )
    try:
        _check_action(action)
    except ScheduleError as problem:
        raise _parse_error(line_number, column, token, str(problem)) from None
    if arrow and arrow != (wanted := _ARROW[ACTION_TABLE[action.kind].resource]):
        raise _parse_error(line_number, column, token, f"expected '{wanted}' before the peer of {kind}, found '{arrow}'")
    return action


def _check_action(action: Action) -> None:
    """Raise ScheduleError where an action has, or lacks, a field against its kind's row."""
    row = ACTION_TABLE[action.kind]
    for what, has, wanted in (
        ("microbatch", action.microbatch >= 0, row.has_microbatch),
        ("peer", action.peer is not None, row.has_peer),
    ):
        if has != wanted:
            expected = f"{action.kind.value} ({row.meaning}) has {'a' if wanted else 'no'} {what}"
            raise ScheduleError(f"{expected}; {'add' if wanted else 'remove'} it in {tuple(action)[1:5]}")
    for unit in (action.unit, *([action.peer.unit] if action.peer else [])):
        if not _UNIT_PATTERN.fullmatch(unit):
            raise ScheduleError(f"unit name {unit!r} cannot be written in a schedule; leave out blanks and any of / < > ; : ,")


def _parse_error(line_number: int, column: int, token: str, expected: str) -> ScheduleError:
    return ScheduleError(f"schedule text, line {line_number}, column {column}: found {token!r}; {expected}")
