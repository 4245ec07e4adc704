"""Lower a schedule: add the sends and receives that carry its dependencies between rank groups."""

import numpy as np

from multimodal.kernels import kernels
from multimodal.schedule.execution import Execution
from multimodal.schedule.lane_execution import execute_lanes
from multimodal.schedule.numbered_lanes import NumberedLanes, keep_numbers, number_lanes
from multimodal.schedule.passes.lower_lanes_reference import lower_lanes_reference
from multimodal.schedule.place_grid import show_places
from multimodal.values.assignment import Assignment
from multimodal.values.errors import ScheduleError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import ACTION_TABLE, Lane, Resource, Schedule


def insert_communication(schedule: Schedule, *, graph: ModelGraph, plan: Plan, assignment: Assignment) -> Schedule:
    """Turn a compute-dialect schedule into the lowered dialect.

    A send stands right after its producer, a receive before its consumer. Between two lanes messages match by order (NCCL), and
    two units may group the same data differently, so a lane may need messages in another order than they are sent. All actions
    are therefore numbered by one execution of the schedule under unit costs, and before each consumer stand the receives it
    needs together with every earlier-numbered receive from the same lanes that is still pending. A receive only posts, so
    standing early costs memory at most, never time. `forward_only` schedules need no flag.

    Runs as a C++ kernel where that is built, with the same result.
    Raises ScheduleError when the schedule cannot finish. Complexity: O((actions + messages) log).
    """
    execution = execute_lanes(schedule, graph=graph, plan=plan, assignment=assignment, lowered=False)
    if stuck := execution.stuck(schedule):
        raise ScheduleError(
            "the schedule cannot finish, so no communication can be inserted; validate it first\n"
            + show_places(schedule, marked=stuck)
        )
    numbered = None
    if kernels is not None:
        numbered = number_lanes(schedule, graph=graph, plan=plan, assignment=assignment, lowered=False)
    if numbered is not None and numbered.is_regular and numbered.table.has_distinct_messages:
        return _lower(schedule, numbered, execution)
    started = [execution.actions[number] for number in _in_order_of_start(execution)]
    numbers = {action: number for number, action in enumerate(started)}
    return lower_lanes_reference(schedule, numbers, graph=graph, plan=plan, assignment=assignment)


def _in_order_of_start(execution: Execution) -> list[int]:
    """The computations that ran, by number."""
    started, first = np.unique(execution.event_actions, return_index=True)
    ordered = started[np.argsort(first)].tolist()
    return [number for number in ordered if ACTION_TABLE[execution.actions[number].kind].resource is Resource.COMPUTE]


def _lower(schedule: Schedule, numbered: NumberedLanes, execution: Execution) -> Schedule:
    table = numbered.table
    starts = np.full(table.num_computed, -1)
    order = _in_order_of_start(execution)
    starts[order] = np.arange(len(order))
    producers, consumers = table.message_ends
    found = np.flatnonzero(starts[consumers] >= 0)
    found = found[np.lexsort((starts[consumers[found]], starts[producers[found]]))]
    source_starts, source_lanes = table.lanes_of_actions(producers[found])
    rows = kernels.lower_lanes(
        lane_starts=numbered.lane_starts,
        lane_actions=numbered.lane_actions,
        producers=producers[found],
        consumers=consumers[found],
        source_starts=source_starts,
        source_lanes=source_lanes,
        num_actions=table.num_computed,
    )
    numbers, fillers = [], []
    for lane, row in zip(schedule.lanes, rows, strict=True):
        indices, kinds = np.divmod(np.array(row, np.int64), 3)  # 3 a: computation a; 3 m + 1, 3 m + 2: message m
        carried = kinds > 0
        indices[carried] = table.num_computed - 1 + kinds[carried] + 2 * found[indices[carried]]
        numbers.append(indices)
        positions = np.flatnonzero(~carried)
        fillers.append(frozenset(int(positions[position]) for position in lane.fillers))
    actions = (tuple(map(table.actions.__getitem__, lane.tolist())) for lane in numbers)
    ranks = (lane.ranks for lane in schedule.lanes)
    lowered = Schedule(tuple(map(Lane, ranks, actions, fillers)))
    keep_numbers(lowered, table, numbers)
    return lowered
