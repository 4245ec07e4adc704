"""Schedules, the order of a step's work: per lane an ordered list of slots."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

import numpy as np

from multimodal.values.action import Action
from multimodal.values.arrays.rows import Bytes, Integers, integers, row_numbers, row_starts
from multimodal.values.errors import ScheduleError
from multimodal.values.parts.lane import NO_WAIT, Entry, Lane, Slot, SlotMode, lane_of, show_slots, slot_error
from multimodal.values.shape import StepShape
from multimodal.values.work.read_cuts import read_cuts
from multimodal.values.work.step_work import StepWork, step_work

__all__ = ["NO_WAIT", "Entry", "Lane", "Schedule", "Slot", "SlotMode", "lane_of", "read_cuts", "show_slots", "slot_error"]

_MODES = tuple(SlotMode)


@dataclass(frozen=True, eq=False)
class Schedule:
    """A shape, and the order in which every lane of `Plan.lanes` runs its work: numbers of `step_work`, lane after lane.

    It holds nobody's samples: all steps of the shape can run it.
    """

    shape: StepShape
    lane_starts: Integers
    """[num_lanes + 1] into `pieces` and `modes`."""
    pieces: Integers
    """[num_slots] numbers of the pieces of work."""
    modes: Bytes
    """[num_slots] `SlotMode`."""
    waits: Integers
    """[num_slots] `Slot.wait`."""
    lowered: bool = False
    """True if messages are among the work: the lowered dialect; False: the compute dialect."""
    made: dict[str, object] = field(default_factory=dict, init=False, repr=False)
    """Values that were derived from this schedule alone, cached for the functions that derive them."""
    _lanes: dict[int, Lane] = field(default_factory=dict, init=False, repr=False)
    """Cached results of `lane`."""
    _entries: dict[int, tuple[Entry, ...]] = field(default_factory=dict, init=False, repr=False)
    """Cached results of `entries`: a schedule from another process need not number the step's work again."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle numbers in narrow types, constants and `made` not at all: a training process receives one schedule per step."""
        pieces = self.pieces.astype(np.int32) if self.pieces.max(initial=0) < 2**31 else self.pieces
        modes = self.modes if self.modes.any() else None
        waits = self.waits if (self.waits != NO_WAIT).any() else None
        return _unpickled, (self.shape, self.lane_starts, pieces, modes, waits, self.lowered, self._entries)

    @classmethod
    def in_line(cls, shape: StepShape, lane_starts: Integers, pieces: Integers) -> "Schedule":
        """Build a schedule in the compute dialect in which all work is in line."""
        return cls(shape, lane_starts, pieces, np.zeros(len(pieces), np.uint8), np.full(len(pieces), NO_WAIT))

    @classmethod
    def of_lanes(cls, shape: StepShape, lanes: Iterable[Lane], *, lowered: bool = False) -> "Schedule":
        """Build a schedule of lanes; the cuts of the shape are read from their actions.

        Raises ScheduleError where the lanes are not the plan's, for an action that the shape lacks, and for one that stands in a
        lane that does not execute its stage, or twice in a lane. O(actions log).
        """
        rows = tuple(lanes)
        if (ranks := tuple(lane.ranks for lane in rows)) != shape.plan.lanes:
            found, wanted = (" | ".join(",".join(map(str, lane)) for lane in lanes) for lanes in (ranks, shape.plan.lanes))
            raise ScheduleError(f"the schedule's lanes have ranks {found}, the plan's {wanted}; build it for this plan")
        shape = shape.with_cuts(read_cuts(chain.from_iterable(lane.actions for lane in rows), shape))
        numbers = step_work(shape).numbers(lowered=lowered)
        starts, slots = row_starts([len(lane.slots) for lane in rows]), [slot for lane in rows for slot in lane.slots]
        numbered = [numbers.get(slot.action, -1) for slot in slots]
        modes, waits = np.array([slot.mode for slot in slots], np.uint8), integers(slot.wait for slot in slots)
        schedule = cls(shape, starts, integers(numbered), modes, waits, lowered)
        if -1 in numbered or not schedule._is_in_place():
            raise _misplaced(rows, shape, numbers, lowered=lowered)
        return schedule

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        return self.lowered == other.lowered and self.lanes == other.lanes

    __hash__ = None  # type: ignore[assignment]

    @cached_property
    def work(self) -> StepWork:
        """The numbered pieces of the shape."""
        return step_work(self.shape)

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
            slots = slice(self.lane_starts[index], self.lane_starts[index + 1])
            actions = map(self.work.action, self.pieces[slots].tolist())
            self._lanes[index] = Lane(self.shape.plan.lanes[index], self._slots(actions, slots))
        return self._lanes[index]

    def entries(self, index: int) -> tuple[Entry, ...]:
        """Return one lane as ranks execute it, made when first asked for. O(its slots + needs)."""
        if index not in self._entries:
            messages = self.work.messages_of(self.lane_pieces(index))
            self._entries[index] = tuple(Entry(*slot, *own) for slot, own in zip(self.lane(index).slots, messages, strict=True))
        return self._entries[index]

    def spelled_out(self, index: int) -> "Schedule":
        """Return the same schedule with one lane as entries, which it is pickled with, whatever else was asked of this one."""
        found = replace(self)
        found._entries[index] = self.entries(index)
        return found

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """All lanes as slots. O(slots)."""
        if len(self._lanes) < self.num_lanes:
            all_actions = self.work.actions if self.lowered else self.work.computed
            slots = self._slots(map(all_actions.__getitem__, self.pieces.tolist()), slice(None))
            for index, (first, last) in enumerate(pairwise(self.lane_starts.tolist())):
                self._lanes.setdefault(index, Lane(self.shape.plan.lanes[index], slots[first:last]))
        return tuple(map(self._lanes.__getitem__, range(self.num_lanes)))

    def _slots(self, actions: Iterable[Action], places: slice) -> tuple[Slot, ...]:
        return tuple(map(Slot, actions, map(_MODES.__getitem__, self.modes[places].tolist()), self.waits[places].tolist()))

    @cached_property
    def lane_of_slot(self) -> Integers:
        """[num_slots] the lane of each slot."""
        return np.repeat(np.arange(self.num_lanes), np.diff(self.lane_starts))

    def _is_in_place(self) -> bool:
        """Return True if every piece stands in lanes of its stage only, and at most once in each."""
        starts, stage_lanes = self.work.lane_rows
        allowed = row_numbers(starts) * self.num_lanes + stage_lanes
        keys = np.sort(self.pieces * self.num_lanes + self.lane_of_slot)
        stages = self.work.stage_numbers if self.pieces.max(initial=0) >= self.work.num_computed else self.work.computed_stages
        is_allowed = np.isin(stages[self.pieces] * self.num_lanes + self.lane_of_slot, allowed).all()
        return bool(is_allowed and (keys[1:] != keys[:-1]).all())

    @property
    def has_fillers(self) -> bool:
        """True if any slot is not in line."""
        return bool(self.modes.any())

    @property
    def has_inside(self) -> bool:
        """True if anything runs inside a computation."""
        return bool((self.modes == SlotMode.INSIDE).any())

    def with_inserted(
        self, shape: StepShape, *, lanes: Integers, before: Integers, pieces: Integers, numbers: Integers | None = None
    ) -> "Schedule":
        """Return a schedule of a shape with more pieces, which stand in line in these lanes, before these slots. O(slots).

        numbers: [num_pieces before] the number in `shape` of each piece of this schedule's shape; None: the same.
        """
        order = np.insert(np.arange(len(self.pieces)), before, len(self.pieces) + np.arange(len(pieces)))
        return self.merged(shape, more=pieces, lanes=np.append(self.lane_of_slot, lanes), order=order, numbers=numbers)

    def merged(
        self,
        shape: StepShape,
        *,
        more: Integers,
        lanes: Integers,
        order: Integers,
        kept: Integers | None = None,
        numbers: Integers | None = None,
        lowered: bool = False,
    ) -> "Schedule":
        """Return a schedule of a shape with the kept slots (None: all), then more pieces in line, put into an order. O(slots).

        lanes: of the kept slots and of the pieces; numbers: as in `with_inserted`.
        """
        own, chosen = self.pieces if numbers is None else numbers[self.pieces], slice(None) if kept is None else kept
        starts, pieces = row_starts(np.bincount(lanes, minlength=self.num_lanes)), np.concatenate((own[chosen], more))
        modes = np.concatenate((self.modes[chosen], np.zeros(len(more), np.uint8)))
        waits = np.concatenate((self.waits[chosen], np.full(len(more), NO_WAIT)))
        return Schedule(shape, starts, pieces[order], modes[order], waits[order], lowered)

    def with_lanes(self, lanes: Iterable[Lane]) -> "Schedule":
        """Return a schedule of the same shape and dialect with other slots; the cuts of the shape are read from them."""
        return Schedule.of_lanes(self.shape, lanes, lowered=self.lowered)


def _unpickled(
    shape: StepShape,
    lane_starts: Integers,
    pieces: Integers,
    modes: Bytes | None,
    waits: Integers | None,
    lowered: bool,
    entries: dict[int, tuple[Entry, ...]],
) -> Schedule:
    plain = Schedule.in_line(shape, lane_starts, pieces.astype(np.int64, copy=False))
    own = plain.modes if modes is None else modes, plain.waits if waits is None else waits
    found = Schedule(shape, lane_starts, plain.pieces, *own, lowered)
    found._entries.update(entries)
    return found


def _misplaced(lanes: Sequence[Lane], shape: StepShape, numbers: Mapping[Action, int], *, lowered: bool) -> ScheduleError:
    """Return an error about the first action that stands in a wrong place."""
    for index, lane in enumerate(lanes):
        first: dict[Action, int] = {}
        for position, action in enumerate(lane.actions):
            problem = ""
            if action not in numbers:
                dialect = "lowered" if lowered else "compute"
                fix = "remove it" if action.covers is None else "let the parts of a place cover all of it once"
                problem = f"unknown action: no such action belongs to this step in the {dialect} dialect; {fix}"
            elif index not in (wanted := shape.plan.lanes_of_stage(*action[1:4])):
                where = ", ".join(map(str, wanted))
                problem = f"wrong lane: it stands in lane {index} but belongs to lane {where}; move it there"
            elif action in first:
                problem = f"duplicate: it stands in lane {index} at positions {first[action]} and {position}; keep one"
            if problem:
                return slot_error(action, problem, lanes, {index: position})
            first[action] = position
    raise AssertionError("every action belongs where it stands")
