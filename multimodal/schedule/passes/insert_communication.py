"""Lowers a schedule: adds the sends and receives that carry its dependencies between rank groups."""

import numpy as np

from multimodal.cost.step_costs import StepCosts
from multimodal.schedule.align_replicas import check_expert_groups
from multimodal.schedule.execute_lanes import execute_lanes
from multimodal.values.arrays.rows import Integers, order_by, row_numbers
from multimodal.values.errors import ScheduleError
from multimodal.values.schedule import Schedule, show_slots
from multimodal.values.work.step_work import COMPUTE

MOMENTS = "moments"
"""`Schedule.made`: [num_pieces] a moment of each piece, in the order of which all lanes come to what they do together."""


def insert_communication(schedule: Schedule, costs: StepCosts | None = None) -> Schedule:
    """Turn a compute-dialect schedule into the lowered dialect.

    On GPUs a message takes place when both ends have reached it, and until then holds up all work queued behind it (NCCL buffers
    nothing). So both ends of a message are placed at one moment of an execution of the schedule. Under unit costs that is right
    after its producer starts, and after everything else that starts at that time. With `costs`, which are to be trusted more, it
    is as late as no sender has to wait for it: before the last action of the receiving lane that starts before the producer ends.
    A send comes right after its producer, or after the computation inside which its producer runs; a receive comes before the
    first action of its lane that starts later. So computations, collectives and messages have one order for all lanes, in which
    each could be finished before the next begins: lanes cannot wait for each other in a circle, however few streams and hardware
    queues carry the work and however long it really takes, and messages between two lanes match by order.

    Raises ScheduleError if the schedule cannot finish. O(actions + messages), with costs O((actions + messages) log actions).
    """
    seconds = None
    if costs is not None:  # whole nanoseconds, which add up without rounding; collectives run beside their lanes
        computed = np.flatnonzero(schedule.work.resources[: schedule.work.num_computed] == COMPUTE)
        seconds = np.ones(schedule.work.num_computed)
        seconds[computed] += np.rint(costs.of_pieces(schedule.work, computed).seconds * 1e9)
    execution = execute_lanes(schedule, seconds=seconds)
    if stuck := execution.stuck:
        if costs is not None:
            check_expert_groups(insert_communication(schedule))
        raise ScheduleError(
            "the schedule cannot finish, so no communication can be inserted; validate it first\n"
            + show_slots(schedule.lanes, marked=stuck)
        )
    work = schedule.work
    starts, stops = (np.full(work.num_computed, -1, np.int64) for _ in range(2))
    times, starts[execution.event_pieces] = np.unique(execution.start_seconds, return_inverse=True)  # in small whole numbers
    last_starts = np.roll(starts[execution.event_pieces], -1)  # most events end as the next one of their lane starts
    others = np.flatnonzero(times[last_starts] != execution.end_seconds)
    last_starts[others] = np.searchsorted(times, execution.end_seconds[others], side="right") - 1
    stops[execution.event_pieces] = last_starts
    producers, consumers = work.message_ends
    messages = np.flatnonzero(starts[consumers] >= 0)
    at = 1 + 2 * starts[producers]
    if costs is not None:
        at[messages] = _latest(schedule, messages, starts=starts, stops=stops)
    lowered = with_messages(schedule, messages, starts=starts, at=at)[0]
    lowered.made[MOMENTS] = np.concatenate((2 * starts, np.repeat(at, 2)))
    return lowered


def with_messages(schedule: Schedule, messages: Integers, *, starts: Integers, at: Integers) -> tuple[Schedule, Integers]:
    """Return a schedule with these messages, and the moments of its slots.

    starts: half of the moment of each computation and collective; at: the moment of each message.
    """
    work, (producers, consumers) = schedule.work, schedule.work.message_ends
    messages = messages[order_by(producers[messages], starts[consumers[messages]])]
    sends = work.num_computed + 2 * messages
    ends = np.column_stack((sends, sends + 1)).ravel()
    end_starts, end_lanes = work.lanes_of(ends)
    ends = ends[row_numbers(end_starts)]
    moments = 2 * starts[schedule.pieces], at[(ends - work.num_computed) // 2]
    lanes = np.concatenate((schedule.lane_of_slot, end_lanes))
    order = order_by(lanes, np.concatenate(moments))
    lowered = schedule.merged(schedule.shape, more=ends, lanes=lanes, order=order, lowered=True)
    return lowered, np.concatenate(moments)[order]


def _latest(schedule: Schedule, messages: Integers, *, starts: Integers, stops: Integers) -> Integers:
    """Return the latest moments of messages: odd numbers, between the doubled starts of two actions of every receiving lane."""
    work, (producers, consumers) = schedule.work, (ends[messages] for ends in schedule.work.message_ends)
    span = 1 + int(stops.max(initial=0))
    slots = schedule.lane_of_slot * span + starts[schedule.pieces]
    rows, lanes = work.lanes_of(consumers)
    until = np.repeat(stops[producers], np.diff(rows))
    before = np.searchsorted(slots, lanes * span + until, side="right") - 1
    found = np.where(before >= schedule.lane_starts[lanes], slots[before] - lanes * span, 0)
    return np.maximum(1 + 2 * starts[producers], 2 * np.minimum.reduceat(found, rows[:-1]) - 1)
