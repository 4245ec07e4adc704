"""Lower a schedule: add the sends and receives that carry its dependencies between rank groups."""

import heapq
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from multimodal.kernels import kernels
from multimodal.schedule.execute_lanes import Execution, execute_lanes
from multimodal.values.action import Resource
from multimodal.values.arrays.rows import flat_rows, order_by
from multimodal.values.errors import ScheduleError
from multimodal.values.schedule import Schedule, show_slots
from multimodal.values.step_work import RESOURCE_NUMBERS, Bytes, Integers


def insert_communication(schedule: Schedule) -> Schedule:
    """Turn a compute-dialect schedule into the lowered dialect.

    A send stands right after its producer, a receive before its consumer. Between two lanes messages match by order (NCCL), and
    two units may group the same data differently, so a lane may need messages in another order than they are sent. All actions
    are therefore numbered by one execution of the schedule under unit costs, and before each consumer stand the receives it
    needs together with every earlier-numbered receive from the same lanes that is still pending. A receive only posts, so
    standing early costs memory at most, never time.

    Runs as a C++ kernel where that is built, with the same result.
    Raises ScheduleError when the schedule cannot finish. Complexity: O((actions + messages) log).
    """
    execution = execute_lanes(schedule)
    if stuck := execution.stuck:
        raise ScheduleError(
            "the schedule cannot finish, so no communication can be inserted; validate it first\n"
            + show_slots(schedule.lanes, marked=stuck)
        )
    work = schedule.work
    starts = np.full(work.num_computed, -1)
    order = _in_order_of_start(execution)
    starts[order] = np.arange(len(order))
    producers, consumers = work.message_ends
    messages = np.flatnonzero(starts[consumers] >= 0)
    messages = messages[order_by(starts[producers[messages]], starts[consumers[messages]])]
    source_starts, source_lanes = work.lanes_of(producers[messages])
    run = lower_lanes_reference if kernels is None else kernels.lower_lanes
    lane_starts, slots = run(
        lane_starts=schedule.lane_starts,
        lane_actions=schedule.pieces,
        producers=producers[messages],
        consumers=consumers[messages],
        source_starts=source_starts,
        source_lanes=source_lanes,
        num_actions=work.num_computed,
    )
    pieces, kinds = np.divmod(slots, 3)  # 3 a: computation a; 3 m + 1, 3 m + 2: message m
    is_message = kinds > 0
    pieces[is_message] = work.num_computed - 1 + kinds[is_message] + 2 * messages[pieces[is_message]]
    modes: Bytes = np.zeros(len(pieces), np.uint8)
    modes[~is_message] = schedule.modes
    return Schedule(schedule.step, lane_starts, pieces, modes, lowered=True)


def _in_order_of_start(execution: Execution) -> Integers:
    """Return the computations that ran, in the order in which they started, those of one time by their first lane."""
    work = execution.schedule.work
    starts = np.full(work.num_computed, -1)
    starts[execution.event_pieces] = execution.start_seconds  # whole numbers, under unit costs
    started = np.flatnonzero((starts >= 0) & (work.resources[: work.num_computed] == RESOURCE_NUMBERS[Resource.COMPUTE]))
    lane_starts, lanes = work.lane_rows
    first_lanes = np.minimum.reduceat(lanes, lane_starts[:-1])[work.computed_stages[started]]
    return started[order_by(starts[started], first_lanes)]


def lower_lanes_reference(
    *,
    lane_starts: Integers,
    lane_actions: Integers,
    producers: Integers,
    consumers: Integers,
    source_starts: Integers,
    source_lanes: Integers,
    num_actions: int,
) -> tuple[Integers, Integers]:
    """Do in Python what csrc/lower_lanes.h describes: computation a is 3 a, message m is sent by 3 m + 1, received by 3 m + 2.

    Returns the slots of each lane as rows.
    """
    sources = [source_lanes[first:last].tolist() for first, last in pairwise(source_starts.tolist())]
    sends: list[list[int]] = [[] for _ in range(num_actions)]
    receives: list[list[int]] = [[] for _ in range(num_actions)]
    for message, (producer, consumer) in enumerate(zip(producers.tolist(), consumers.tolist(), strict=True)):
        sends[producer].append(message)
        receives[consumer].append(message)
    lowered: list[list[int]] = []
    for first, last in pairwise(lane_starts.tolist()):
        actions = lane_actions[first:last].tolist()
        pending = _PendingReceives((message for action in actions for message in receives[action]), sources)
        lowered.append([])
        for action in actions:
            lowered[-1] += [3 * message + 2 for message in pending.take(receives[action])]
            lowered[-1] += [3 * action, *(3 * message + 1 for message in sends[action])]
    return flat_rows(lowered)


class _PendingReceives:
    """The receives that a lane has yet to post, as one queue per lane they come from."""

    def __init__(self, messages: Iterable[int], sources: list[list[int]]) -> None:
        self.sources = sources
        self.queues: dict[int, list[int]] = defaultdict(list)
        for message in messages:
            for lane in sources[message]:
                self.queues[lane].append(message)
        for queue in self.queues.values():
            heapq.heapify(queue)
        self.posted: set[int] = set()

    def take(self, needed: Iterable[int]) -> list[int]:
        """Post `needed` and, transitively, all that must be posted before; returns the messages in sending order."""
        taken: list[int] = []
        wanted = [message for message in needed if message not in self.posted]
        while wanted:
            last = wanted.pop()
            for lane in self.sources[last]:
                queue = self.queues[lane]
                while queue and queue[0] <= last:
                    message = heapq.heappop(queue)
                    if message not in self.posted:
                        self.posted.add(message)
                        taken.append(message)
                        wanted.append(message)
        return sorted(taken)
