"""Lowers a schedule: adds the sends and receives that carry its dependencies between rank groups."""

import numpy as np

from multimodal.schedule.execute_lanes import execute_lanes
from multimodal.values.arrays.rows import order_by, row_numbers
from multimodal.values.errors import ScheduleError
from multimodal.values.schedule import NO_WAIT, Schedule, show_slots


def insert_communication(schedule: Schedule) -> Schedule:
    """Turn a compute-dialect schedule into the lowered dialect.

    On GPUs a message takes place when both ends have reached it, and until then holds up all work queued behind it (NCCL buffers
    nothing). So both ends of a message are placed at one moment: in an execution of the schedule under unit costs, right after
    its producer starts, and after everything else that starts at that time. A send comes right after its producer, or after the
    computation inside which its producer runs; a receive comes before the first action of its lane that starts later: early
    enough that no sender waits for it. So computations, collectives and messages have one order for all lanes, in which each
    could be finished before the next begins: lanes cannot wait for each other in a circle, however few streams and hardware
    queues carry the work, and messages between two lanes match by order.

    Raises ScheduleError if the schedule cannot finish. O(actions + messages).
    """
    execution = execute_lanes(schedule)
    if stuck := execution.stuck:
        raise ScheduleError(
            "the schedule cannot finish, so no communication can be inserted; validate it first\n"
            + show_slots(schedule.lanes, marked=stuck)
        )
    work = schedule.work
    starts = np.full(work.num_computed, -1, np.int64)
    starts[execution.event_pieces] = execution.start_seconds  # whole numbers, under unit costs
    producers, consumers = work.message_ends
    messages = np.flatnonzero(starts[consumers] >= 0)
    messages = messages[order_by(producers[messages], starts[consumers[messages]])]
    sends = work.num_computed + 2 * messages
    ends = np.column_stack((sends, sends + 1)).ravel()
    end_starts, end_lanes = work.lanes_of(ends)
    ends = ends[row_numbers(end_starts)]
    moments = 2 * starts[schedule.pieces], 1 + 2 * starts[producers[(ends - work.num_computed) // 2]]
    order = order_by(np.concatenate((schedule.lane_of_slot, end_lanes)), np.concatenate(moments))
    return Schedule(
        schedule.shape,
        schedule.lane_starts + np.searchsorted(np.sort(end_lanes), np.arange(schedule.num_lanes + 1)),
        np.concatenate((schedule.pieces, ends))[order],
        np.concatenate((schedule.modes, np.zeros(len(ends), np.uint8)))[order],
        np.concatenate((schedule.waits, np.full(len(ends), NO_WAIT)))[order],
        lowered=True,
    )
