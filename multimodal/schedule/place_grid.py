"""Show places of a schedule as a small text grid, for error messages."""

from collections.abc import Mapping

from multimodal.schedule.text import action_to_text
from multimodal.values.schedule import Schedule

_WINDOW = 2
"""Actions shown on either side of a marked one."""


def show_places(schedule: Schedule, *, marked: Mapping[int, int]) -> str:
    """Return one row per marked lane: the actions around the marked position, that action between > and <.

    `marked` maps lane indices to positions in the lane; a position past the end marks the end.

        lane 0 (ranks 0):    ... | B vision/0/0/1 | > F vision/0/0/3 <
        lane 2 (ranks 2,3):  F llm/0/0/0 | > B llm/0/0/0 < | F llm/0/0/1 | ...
    """
    heads = {lane: f"lane {lane} (ranks {','.join(map(str, schedule.lanes[lane].ranks))}):" for lane in marked}
    width = max(map(len, heads.values()), default=0)
    return "\n".join(f"  {heads[lane]:<{width}}  {_row(schedule, lane, marked[lane])}" for lane in sorted(marked))


def _row(schedule: Schedule, lane: int, position: int) -> str:
    actions = schedule.lanes[lane].actions
    first, last = max(0, position - _WINDOW), position + _WINDOW + 1
    cells = [action_to_text(action) for action in actions[first:last]]
    if position < len(actions):
        cells[position - first] = f"> {cells[position - first]} <"
    else:
        cells.append("> end <")
    return " | ".join([*(["..."] if first > 0 else []), *cells, *(["..."] if last < len(actions) else [])])
