"""Schedules, the order of a step's work: per lane an ordered list of slots."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from multimodal.values.action import Action, ActionKind, Place, SampleSubset, action_to_text
from multimodal.values.assignment import MicrobatchPlace
from multimodal.values.errors import ScheduleError
from multimodal.values.plan import Plan
from multimodal.values.step_graph import UNCUT, Cuts, StepGraph
from multimodal.values.step_work import Bytes, Integers, StepWork, step_work


class SlotMode(IntEnum):
    """The way a slot's work runs."""

    IN_LINE = 0
    """The lane runs it in its turn, and waits for it where it must."""
    FILLS_WAIT = 1
    """It runs while its *carrier*, the next computation in line, waits for what it needs; if it is left when the carrier can
    start, right after the carrier. It stands before its carrier, so that both orders must be (and are checked to be) allowed."""


class Slot(NamedTuple):
    """One piece of work in a lane."""

    action: Action
    mode: SlotMode = SlotMode.IN_LINE


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


@dataclass(frozen=True, eq=False)
class Schedule:
    """A step, and in which order every lane of `Plan.lanes` runs its work; as numbers of `step_work`, lane after lane."""

    step: StepGraph
    lane_starts: Integers
    """[num_lanes + 1] into `pieces` and `modes`."""
    pieces: Integers
    """[num_slots] numbers of the pieces of work."""
    modes: Bytes
    """[num_slots] `SlotMode`."""
    lowered: bool = False
    """True if messages are among the work: the lowered dialect; False: the compute dialect."""
    made: dict[str, object] = field(default_factory=dict, init=False, repr=False)
    """Results of this schedule alone, for those that make them to find again."""
    _lanes: dict[int, Lane] = field(default_factory=dict, init=False, repr=False)
    """Results of `lane`: a schedule from another process need not number the step's work again."""

    @classmethod
    def of_numbers(
        cls, step: StepGraph, lanes: Iterable[Integers], modes: Iterable[Bytes] | None = None, *, lowered: bool = False
    ) -> "Schedule":
        """Build a schedule of the pieces of each lane; modes: of each slot, all in line by default."""
        rows = list(lanes)
        starts = np.concatenate(([0], np.cumsum([len(row) for row in rows])))
        pieces = np.concatenate([np.zeros(0, np.int64), *rows])
        flat = np.zeros(len(pieces), np.uint8) if modes is None else np.concatenate([np.zeros(0, np.uint8), *modes])
        return cls(step, starts, pieces, flat, lowered)

    @classmethod
    def of_lanes(cls, step: StepGraph, lanes: Iterable[Lane], *, lowered: bool = False) -> "Schedule":
        """Build a schedule of lanes; how the step is cut is read from their actions.

        Raises ScheduleError where the lanes are not the plan's, for an action that the step lacks, and for one that stands in a
        lane that does not execute its stage, or twice in a lane. O(actions log).
        """
        rows = tuple(lanes)
        _check_ranks(rows, step.plan)
        _check_subsets(rows, step)
        step = step.with_cuts(read_cuts(chain.from_iterable(lane.actions for lane in rows)))
        numbers = step_work(step).numbers(lowered=lowered)
        pieces = [list(map(numbers.get, lane.actions)) for lane in rows]
        if any(None in lane for lane in pieces) or not _belong(step_work(step), pieces):
            raise _misplaced(rows, step, numbers, lowered=lowered)
        modes = [np.array([slot.mode for slot in lane.slots], np.uint8) for lane in rows]
        return cls.of_numbers(step, [np.array(lane, np.int64) for lane in pieces], modes, lowered=lowered)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        return self.lowered == other.lowered and self.lanes == other.lanes

    __hash__ = None  # type: ignore[assignment]

    @property
    def work(self) -> StepWork:
        """The pieces that the numbers stand for."""
        return step_work(self.step)

    @property
    def num_lanes(self) -> int:
        """Number of lanes."""
        return len(self.lane_starts) - 1

    def lane_pieces(self, lane: int) -> Integers:
        """Return the pieces of one lane in order."""
        return self.pieces[self.lane_starts[lane] : self.lane_starts[lane + 1]]

    def lane(self, index: int) -> Lane:
        """Return one lane as slots, made when first asked for. O(its slots)."""
        if index not in self._lanes:
            actions = map(self.work.action, self.lane_pieces(index).tolist())
            modes = map(_MODES.__getitem__, self.modes[self.lane_starts[index] : self.lane_starts[index + 1]].tolist())
            self._lanes[index] = Lane(self.step.plan.lanes[index], tuple(map(Slot, actions, modes)))
        return self._lanes[index]

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """All lanes as slots. O(slots)."""
        if len(self._lanes) < self.num_lanes:
            all_actions = self.work.actions if self.lowered else self.work.computed
            slots = list(
                map(Slot, map(all_actions.__getitem__, self.pieces.tolist()), map(_MODES.__getitem__, self.modes.tolist()))
            )
            for index, (first, last) in enumerate(pairwise(self.lane_starts.tolist())):
                self._lanes.setdefault(index, Lane(self.step.plan.lanes[index], tuple(slots[first:last])))
        return tuple(map(self._lanes.__getitem__, range(self.num_lanes)))

    @cached_property
    def lane_of_slot(self) -> Integers:
        """[num_slots] the lane of each slot."""
        return np.repeat(np.arange(self.num_lanes), np.diff(self.lane_starts))

    @property
    def has_fillers(self) -> bool:
        """True if any slot fills a wait."""
        return bool(self.modes.any())

    def with_lanes(self, lanes: Iterable[Lane]) -> "Schedule":
        """Return a schedule of the same step and dialect with other slots; how the step is cut is read from them."""
        return Schedule.of_lanes(self.step, lanes, lowered=self.lowered)

    def for_step(self, step: StepGraph) -> "Schedule":
        """Return the same schedule of a step of the same shape, such as the next global batch's."""
        return Schedule(self.step.with_assignment(step.assignment), self.lane_starts, self.pieces, self.modes, self.lowered)


_MODES = tuple(SlotMode)
_SHOWN_SLOTS = 2
"""Actions that an error shows on either side of the one it is about."""


def lane_of(ranks: tuple[int, ...], actions: Iterable[Action], fillers: Iterable[int] = ()) -> Lane:
    """Build a lane of actions; fillers: the positions of those that fill a wait."""
    filling = frozenset(fillers)
    return Lane(ranks, tuple(Slot(action, _MODES[position in filling]) for position, action in enumerate(actions)))


def read_cuts(actions: Iterable[Action]) -> Cuts:
    """Read how a step is cut from the actions of its schedule. O(actions)."""
    split: set[Place] = set()
    num_subsets: dict[MicrobatchPlace, int] = {}
    gathers, by_layer = False, set()
    for action in actions:
        kind = action.kind
        if kind is ActionKind.INPUT_GRADIENT or kind is ActionKind.WEIGHT_GRADIENT:
            split.add(action.place)
        elif kind is ActionKind.GATHER_PARAMETERS:
            gathers = True
        if isinstance(action.covers, SampleSubset):
            microbatch = MicrobatchPlace(action.unit, action.replica, action.microbatch)
            num_subsets[microbatch] = max(num_subsets.get(microbatch, 0), action.covers.index + 1)
        elif action.covers is not None:
            by_layer.add((action.unit, action.stage))
    cuts = Cuts(frozenset(split), num_subsets, gathers, frozenset(by_layer))
    return UNCUT if cuts == UNCUT else cuts


def slot_error(action: Action, problem: str, lanes: Sequence[Lane], marked: Mapping[int, int]) -> ScheduleError:
    """Return an error about an action that shows where it stands; marked: as in `show_slots`."""
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


def _check_ranks(lanes: Sequence[Lane], plan: Plan) -> None:
    ranks = tuple(lane.ranks for lane in lanes)
    if ranks != plan.lanes:
        raise ScheduleError(
            f"the schedule's lanes have ranks {_show_ranks(ranks)}, the plan's {_show_ranks(plan.lanes)}; build it for this plan"
        )


def _show_ranks(lanes: tuple[tuple[int, ...], ...]) -> str:
    return " | ".join(",".join(map(str, ranks)) for ranks in lanes)


def _belong(work: StepWork, lanes: Sequence[Sequence[int | None]]) -> bool:
    """Return True if every piece stands in lanes of its stage only, and at most once in each."""
    pieces = np.array(list(chain.from_iterable(lanes)), np.int64)
    lane_of_slot = np.repeat(np.arange(len(lanes)), list(map(len, lanes)))
    starts, stage_lanes = work.lane_rows
    allowed = np.repeat(np.arange(len(starts) - 1), np.diff(starts)) * len(lanes) + stage_lanes
    keys = np.sort(pieces * len(lanes) + lane_of_slot)
    stages = work.stage_numbers if len(pieces) and pieces.max() >= work.num_computed else work.computed_stages
    return bool(np.isin(stages[pieces] * len(lanes) + lane_of_slot, allowed).all() and (keys[1:] != keys[:-1]).all())


def _misplaced(lanes: Sequence[Lane], step: StepGraph, numbers: Mapping[Action, int], *, lowered: bool) -> ScheduleError:
    """Return an error about the first action that does not belong where it stands."""
    for index, lane in enumerate(lanes):
        first: dict[Action, int] = {}
        for position, action in enumerate(lane.actions):
            problem = ""
            if action not in numbers:
                dialect = "lowered" if lowered else "compute"
                problem = f"unknown action: no such action belongs to this step in the {dialect} dialect; remove it"
            elif index not in (wanted := step.lanes_of(*action[1:4])):
                where = ", ".join(map(str, wanted))
                problem = f"wrong lane: it stands in lane {index} but belongs to lane {where}; move it there"
            elif action in first:
                problem = f"duplicate: it stands in lane {index} at positions {first[action]} and {position}; keep one"
            if problem:
                return slot_error(action, problem, lanes, {index: position})
            first[action] = position
    raise AssertionError("every action belongs where it stands")


def _check_subsets(lanes: Sequence[Lane], step: StepGraph) -> None:
    """Check that sample subsets are those that the assignment's routes make, all of them, in an encoder."""
    entries = [
        (index, position, action)
        for index, lane in enumerate(lanes)
        for position, action in enumerate(lane.actions)
        if isinstance(action.covers, SampleSubset)
    ]
    found = read_cuts(action for _, _, action in entries).num_subsets
    encoders = {unit.name for unit in step.graph.encoders}
    for index, position, action in entries:
        microbatch = MicrobatchPlace(action.unit, action.replica, action.microbatch)
        is_known = action.unit in encoders and microbatch in step.microbatch_set
        count = len(step.consumers(microbatch)) if is_known else 0
        if action.subset >= count:
            problem = (
                f"unknown subset: its microbatch has {count} sample subsets (one per consumer, encoders only); "
                "number them from 0, or leave the subset out"
            )
            raise slot_error(action, problem, lanes, {index: position})
        if found[microbatch] < count:
            problem = (
                f"missing subset: its microbatch has {count} sample subsets (one per consumer) but the schedule runs "
                f"the backwards of {found[microbatch]}; add the others"
            )
            raise slot_error(action, problem, lanes, {index: position})
