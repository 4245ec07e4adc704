"""Lanes of a schedule as slots, and how errors show them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

from multimodal.values.action import Action, MessageKey, action_to_text
from multimodal.values.errors import ScheduleError

_SHOWN_SLOTS = 2
"""Actions that an error shows on either side of the action that it is about."""
NO_WAIT = -1
"""The `wait` of slots that are not inside a computation."""


class SlotMode(IntEnum):
    """The way a slot's work runs."""

    IN_LINE = 0
    """The lane runs it in turn, and waits for its needs if they are not met."""
    FILLS_WAIT = 1
    """It runs while its *carrier*, the next computation in line, waits for its needs; if it has not run when the carrier can
    start, it runs right after the carrier. It stands before its carrier; both orders must be allowed, and are checked to be."""
    INSIDE = 2
    """It stands before its *carrier*, the next computation in line, and runs inside it: while the carrier waits for the tensor
    parallel collective of number `Slot.wait`. Its needs are met when the carrier starts; others get its result at its end."""


class Slot(NamedTuple):
    """One piece of work in a lane."""

    action: Action
    mode: SlotMode = SlotMode.IN_LINE
    wait: int = NO_WAIT
    """The wait of its carrier in which it runs, if it runs inside: the carrier's waits are counted from 0, in order."""


class Entry(NamedTuple):
    """A slot as ranks execute it, with the messages that its work takes and gives; also those that stay on the same ranks."""

    action: Action
    mode: SlotMode = SlotMode.IN_LINE
    wait: int = NO_WAIT
    takes: tuple[MessageKey, ...] = ()
    """In the order of their sources; a send takes the message that it sends."""
    gives: tuple[MessageKey, ...] = ()
    """In the order of their targets; a receive gives the message that it receives."""


@dataclass(frozen=True)
class Lane:
    """The ordered work of one group of ranks."""

    ranks: tuple[int, ...]
    slots: tuple[Slot, ...]

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """The work of the slots."""
        return tuple(slot.action for slot in self.slots)

    @cached_property
    def fillers(self) -> frozenset[int]:
        """Positions of the slots that fill a wait."""
        return frozenset(position for position, slot in enumerate(self.slots) if slot.mode is SlotMode.FILLS_WAIT)

    def __str__(self) -> str:
        """Print the lane: `lane 0,1: {W llm/0/1/0} I llm/0/1/1; B vision/0/0/4#1; RG llm/0/1[1:9]`.

        Actions in braces fill the wait of the action after them; with `@2` they run inside it, during its wait number 2.
        """
        text, filled = f"lane {','.join(map(str, self.ranks))}:", False
        for position, slot in enumerate(self.slots):
            fills = slot.mode is not SlotMode.IN_LINE
            text += (" " if position == 0 else "; " if fills or not filled else "} ") + "{" * (fills and not filled)
            text += action_to_text(slot.action) + (f" @{slot.wait}" if slot.mode is SlotMode.INSIDE else "")
            filled = fills
        return text + "}" * filled


def lane_of(ranks: tuple[int, ...], actions: Iterable[Action]) -> Lane:
    """Build a lane of actions in line."""
    return Lane(ranks, tuple(map(Slot, actions)))


def slot_error(action: Action, problem: str, lanes: Sequence[Lane], marked: Mapping[int, int]) -> ScheduleError:
    """Return an error about an action that shows its surroundings in the lanes; marked: as in `show_slots`."""
    return ScheduleError(f"{action_to_text(action)}: {problem}\n{show_slots(lanes, marked=marked)}")


def show_slots(lanes: Sequence[Lane], *, marked: Mapping[int, int]) -> str:
    """Return one row per marked lane: the actions around the marked position, that action between > and <.

    marked: lane -> position in it; a position past the end marks the end.

        lane 0 (ranks 0):    ... | B vision/0/0/1 | > F vision/0/0/3 <
        lane 2 (ranks 2,3):  F llm/0/0/0 | > B llm/0/0/0 < | F llm/0/0/1 | ...
    """
    heads = {lane: f"lane {lane} (ranks {','.join(map(str, lanes[lane].ranks))}):" for lane in marked}
    width = max(map(len, heads.values()), default=0)
    return "\n".join(f"  {heads[lane]:<{width}}  {_show_row(lanes[lane].actions, marked[lane])}" for lane in sorted(marked))


def _show_row(actions: Sequence[Action], position: int) -> str:
    first, last = max(0, position - _SHOWN_SLOTS), position + _SHOWN_SLOTS + 1
    cells = [action_to_text(action) for action in actions[first:last]]
    if position < len(actions):
        cells[position - first] = f"> {cells[position - first]} <"
    else:
        cells.append("> end <")
    return " | ".join([*(["..."] if first > 0 else []), *cells, *(["..."] if last < len(actions) else [])])
