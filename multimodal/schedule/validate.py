"""The one validator of schedules: the executor can run every accepted schedule to its end."""

from functools import cached_property
from typing import cast

import numpy as np

from multimodal.cost.layers.registry import count_segments
from multimodal.cost.run_options import RunOptions
from multimodal.schedule.execute_lanes import Execution, execute_lanes
from multimodal.schedule.inside_slots import NO_CARRIER, carrier_slots
from multimodal.schedule.passes.insert_communication import MOMENTS
from multimodal.schedule.validate_inside import validate_inside
from multimodal.values.action import Action, ActionKind, action_to_text
from multimodal.values.arrays.rows import Integers, linked_groups, order_by, take_rows
from multimodal.values.errors import ScheduleError
from multimodal.values.schedule import Schedule, SlotMode, slot_error
from multimodal.values.work.step_work import COMPUTE, RECEIVE, SEND, StepWork


def validate_schedule(schedule: Schedule, *, options: RunOptions | None = None) -> None:
    """Check that a schedule does each piece of the step's work exactly once, in the right lanes, in an order that can finish.

    `Schedule.of_lanes` already checks that every action belongs to the step and to its lane, and occurs there once. Checked here
    in turn: no action is missing; ranges of segments end where their stages do; no lane has an action before one that it needs;
    fillers have a carrier that does not need them; work inside computations fits there (`validate_inside`); no lanes wait for
    each other in a circle (the schedule is executed symbolically), even if every message and collective holds up its lanes until
    all of its ends have reached it, as it may on GPUs.

    options: of the run, for work inside computations; None if unknown. Raises ScheduleError that names the action and shows its
    surroundings. O((actions + dependencies) log actions).
    """
    order = _SlotOrder(schedule)
    order.check_missing()
    order.check_segments()
    if not schedule.has_fillers and MOMENTS in schedule.made and _is_in_order(schedule, cast(Integers, schedule.made[MOMENTS])):
        return
    order.check_needs()
    if schedule.has_fillers:
        order.check_fillers()
    if schedule.has_inside:
        validate_inside(schedule, options=options)
    execution = execute_lanes(schedule)
    if execution.stuck:
        raise _deadlock(execution)
    if not schedule.lowered:
        return
    starts = np.zeros(schedule.work.num_computed, np.int64)
    starts[execution.event_pieces] = execution.start_seconds
    sent_at = 2 * starts[schedule.work.message_ends[0]] + 1  # by these moments lanes reach messages right after producers start
    if not _is_in_order(schedule, np.concatenate((2 * starts, np.repeat(sent_at, 2)))):
        order.check_messages()
        _check_rendezvous(schedule)


class _SlotOrder:
    """The position of every piece in every lane."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.work = schedule, schedule.work
        self.slot_of_piece = np.full(self.work.num_pieces(lowered=schedule.lowered), -1)
        self.slot_of_piece[schedule.pieces] = np.arange(len(schedule.pieces))

    def slots_of(self, pieces: Integers, lanes: Integers) -> Integers:
        """Return the slot of each piece in a lane; -1 if it is not there."""
        if not len(self.schedule.pieces):
            return np.full(len(pieces), -1)
        if self.work.is_in_one_lane:
            slots = self.slot_of_piece[pieces]
            return np.where((slots >= 0) & (self.schedule.lane_of_slot[slots] == lanes), slots, -1)
        by_key, ascending = self._keys_of_slots
        keys = pieces * self.schedule.num_lanes + lanes
        places = np.minimum(np.searchsorted(ascending, keys), len(ascending) - 1)
        return np.where(ascending[places] == keys, by_key[places], -1)

    @cached_property
    def _keys_of_slots(self) -> tuple[Integers, Integers]:
        """The sorted keys of all slots, and the slots in that order."""
        keys = self.schedule.pieces * self.schedule.num_lanes + self.schedule.lane_of_slot
        by_key = np.argsort(keys, kind="stable")
        return by_key, keys[by_key]

    def check_missing(self) -> None:
        pieces = np.arange(self.work.num_pieces(lowered=self.schedule.lowered))
        starts, lanes = self.work.lanes_of(pieces)
        pieces = np.repeat(pieces, np.diff(starts))
        missing = np.flatnonzero(self.slots_of(pieces, lanes) < 0)
        if len(missing):
            piece, lane = int(pieces[missing[0]]), int(lanes[missing[0]])
            problem = f"missing: lane {lane} must do it and does not; add it there"
            raise self._error(piece, problem, {lane: int(self.schedule.lane_starts[lane + 1])})

    def check_segments(self) -> None:
        """Check that places cut into ranges of segments have as many segments as their stages' layers."""
        shape, counts = self.schedule.shape, dict[tuple[str, int, int], int]()
        for place, cut in shape.cuts.segments.items():
            stage = place[:3]
            if stage not in counts:
                counts[stage] = count_segments(shape.graph.unit(place.unit), shape.plan.virtual_stage(*stage).layers)
            if cut.num_segments != counts[stage]:
                piece = self.work.computed_numbers[Action(ActionKind.FORWARD, *place, covers=cut.forwards[-1])]
                problem = (
                    f"its ranges end at {cut.num_segments}, but its stage has {counts[stage]} segments; let them cover these"
                )
                slot = int(np.flatnonzero(self.schedule.pieces == piece)[0])
                lane = int(self.schedule.lane_of_slot[slot])
                raise self._error(piece, f"wrong number of segments: {problem}", {lane: slot})

    def check_needs(self) -> None:
        """Check that an action's needs never come after it in the same lane; a receive's may, since it only posts."""
        schedule = self.schedule
        slots = np.flatnonzero(self.work.resources[schedule.pieces] != RECEIVE)
        starts, needed = take_rows(*self.work.needs_in(lowered=schedule.lowered), schedule.pieces[slots])
        slots = np.repeat(slots, np.diff(starts))
        wrong = np.flatnonzero(self.slots_of(needed, schedule.lane_of_slot[slots]) > slots)
        if len(wrong):
            first = wrong[np.argmin(schedule.pieces[slots[wrong]])]
            lane, slot = int(schedule.lane_of_slot[slots[first]]), int(slots[first])
            need = action_to_text(self.work.actions[int(needed[first])])
            problem = f"wrong order: in lane {lane} it stands before {need}, which it needs; swap them"
            raise self._error(int(schedule.pieces[slot]), problem, {lane: slot})

    def check_fillers(self) -> None:
        """Check that every filler is a computation before a carrier that does not need it."""
        schedule, work = self.schedule, self.work
        need_starts, needs = work.needs_in(lowered=schedule.lowered)
        fillers = np.flatnonzero(schedule.modes == SlotMode.FILLS_WAIT)
        for slot, carrier in zip(fillers.tolist(), carrier_slots(schedule, fillers).tolist(), strict=True):
            marked, piece = {int(schedule.lane_of_slot[slot]): slot}, int(schedule.pieces[slot])
            if work.resources[piece] != COMPUTE:
                raise self._error(piece, "not a filler: only computations fill; run it by itself", marked)
            if carrier == NO_CARRIER:
                raise self._error(piece, "no carrier: a computation must follow it in its lane", marked)
            behind = slice(slot + 1, carrier + 1)
            for other in schedule.pieces[behind][schedule.modes[behind] != SlotMode.FILLS_WAIT].tolist():
                if piece in needs[need_starts[other] : need_starts[other + 1]]:
                    texts = (action_to_text(work.actions[each]) for each in (schedule.pieces[carrier], other))
                    raise self._error(piece, "it fills {} but {} needs it; run it by itself".format(*texts), marked)

    def check_messages(self) -> None:
        """Check that every lane posts its receives from every other lane in the order of that lane's sends."""
        (sent_pairs, sends), (received_pairs, receives) = (self._by_pair(resource) for resource in (SEND, RECEIVE))
        messages = [(self.schedule.pieces[slots] - self.work.num_computed) // 2 for slots in (sends, receives)]
        wrong = np.flatnonzero((sent_pairs != received_pairs) | (messages[0] != messages[1]))
        if not len(wrong):
            return
        send, receive = int(sends[wrong[0]]), int(receives[wrong[0]])
        source, target = (int(self.schedule.lane_of_slot[slot]) for slot in (send, receive))
        text = action_to_text(self.work.action(int(self.schedule.pieces[send])))
        problem = (
            f"wrong message order: lane {target} receives it when lane {source} sends {text}; "
            "messages between two lanes match by order, so post receives in the order of the sends"
        )
        marked = {target: receive} if source == target else {source: send, target: receive}
        raise self._error(int(self.schedule.pieces[receive]), problem, marked)

    def _by_pair(self, resource: int) -> tuple[Integers, Integers]:
        """Return the pair of lanes and the slot of each end of a message, in the order of pairs, then slots."""
        schedule, work = self.schedule, self.work
        slots = np.flatnonzero(work.resources[schedule.pieces] == resource)
        producers, consumers = work.message_ends
        others = consumers if resource == SEND else producers
        starts, other_lanes = work.lanes_of(others[(schedule.pieces[slots] - work.num_computed) // 2])
        slots = np.repeat(slots, np.diff(starts))
        lanes = schedule.lane_of_slot[slots], other_lanes
        source, target = lanes if resource == SEND else lanes[::-1]
        pairs = source * schedule.num_lanes + target
        in_order = order_by(source, target)
        return pairs[in_order], slots[in_order]

    def _error(self, piece: int, problem: str, slots: dict[int, int]) -> ScheduleError:
        marked = {lane: slot - int(self.schedule.lane_starts[lane]) for lane, slot in slots.items()}
        return slot_error(self.work.action(piece), problem, self.schedule.lanes, marked)


def _deadlock(execution: Execution) -> ScheduleError:
    schedule, work, stuck = execution.schedule, execution.schedule.work, execution.stuck
    need_starts, needs = work.needs_in(lowered=schedule.lowered)
    lane = min(stuck)
    piece = int(schedule.lane_pieces(lane)[stuck[lane]])
    needed = needs[need_starts[piece] : need_starts[piece + 1]].tolist()
    sources = [int(needs[need_starts[need]]) if work.resources[need] == RECEIVE else need for need in needed]
    unmet = [work.actions[source] for source in sources if not execution.is_done[source]]
    awaited = ", ".join(map(action_to_text, unmet[:3])) or "the other lanes that do it together"
    problem = f"deadlock: lane {lane} waits in it for {awaited}; each of these lanes waits for another, so reorder one of them"
    return slot_error(work.actions[piece], problem, schedule.lanes, stuck)


def _is_in_order(schedule: Schedule, moments: Integers) -> bool:
    """Return True if every lane does its work in the order of these moments, which has every need before its owner.

    moments: [num_pieces], even ones of computations and collectives, odd ones of messages. What lanes do together has one moment,
    and messages of one moment one order. That is one order for all lanes, so nothing waits in a circle; other such orders exist.
    O(slots + needs).
    """
    work = schedule.work
    of_collectives, starts, members = work.collective_rows
    together = np.append(moments[members], 0)[starts[:-1]][of_collectives[members]]
    of_messages, (producers, consumers) = moments[work.num_computed :: 2], work.message_ends
    is_late = (moments[members] != together).any() or (moments[work.needs] >= moments[work.need_owners]).any()
    if is_late or (of_messages <= moments[producers]).any() or (of_messages >= moments[consumers]).any():
        return False
    own = moments[schedule.pieces]
    is_next = np.diff(schedule.lane_of_slot) == 0
    if (is_next & (own[1:] < own[:-1])).any():
        return False
    tied = np.flatnonzero(is_next & (own[1:] == own[:-1]))
    if (schedule.pieces[tied] < work.num_computed).any():  # computations of one moment, as of work inside another's waits
        return False
    turns = (_turns(schedule.pieces[tied + later], work, moments) for later in (0, 1))
    is_later, is_equal = np.zeros(len(tied), bool), np.ones(len(tied), bool)
    for before, after in zip(*turns, strict=True):
        is_later |= is_equal & (after > before)
        is_equal &= after == before
    return bool((is_later | is_equal).all())


def _turns(messages: Integers, work: StepWork, moments: Integers) -> tuple[Integers, ...]:
    """Return what orders messages of one moment, the most significant first; messages: pieces, sends or receives."""
    numbers = (messages - work.num_computed) // 2
    producers, consumers = (ends[numbers] for ends in work.message_ends)
    return producers, moments[consumers], numbers


def _check_rendezvous(schedule: Schedule) -> None:
    """Check that all lanes reach the work that they do together in one order. O(slots)."""
    work, lanes = schedule.work, schedule.lane_of_slot
    collectives = work.collective_rows[0][: work.num_computed]
    of_piece = np.where(collectives < 0, np.arange(work.num_computed), work.num_pieces(lowered=True) + collectives)
    together = np.concatenate((of_piece, work.num_computed + np.arange(2 * work.num_messages) // 2))[schedule.pieces]
    is_next = (np.diff(lanes) == 0) & (np.diff(together) != 0)
    size = int(together.max(initial=0)) + 1
    circles = linked_groups((together[:-1][is_next], together[1:][is_next]), size, is_directed=True)
    is_circular = np.bincount(circles)[circles] > 1
    if not is_circular.any():
        return
    first = int(np.flatnonzero(is_circular[together] & (work.resources[schedule.pieces] == RECEIVE))[0])
    inside = np.flatnonzero(circles[together] == circles[together[first]])
    stuck = {int(lanes[slot]): int(slot - schedule.lane_starts[lanes[slot]]) for slot in inside[::-1]}
    problem = (
        f"deadlock: lanes {', '.join(map(str, sorted(stuck)))} come to messages in orders that contradict each other, and on "
        "GPUs a message holds up what is queued behind it until both ends have come to it; put every receive before the first "
        "action of its lane that starts after the one that sends"
    )
    raise slot_error(work.actions[int(schedule.pieces[first])], problem, schedule.lanes, stuck)
