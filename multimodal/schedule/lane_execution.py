"""Run a schedule in the strictest way, on a clock of unit costs: what stops here might stop a real run.

Unlike in the simulator, a lane waits in a collective for all others and runs fillers where they stand, so a schedule that
finishes here finishes however long its actions take. Passes measure and order actions by this clock.
"""

from collections.abc import Callable

import numpy as np

from multimodal.kernels import kernels
from multimodal.schedule.event_arrays import Floats
from multimodal.schedule.execution import Execution
from multimodal.schedule.lane_execution_reference import execute_lanes_reference
from multimodal.schedule.numbered_lanes import NumberedLanes, number_lanes
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Action, Schedule


def execute_lanes(
    schedule: Schedule,
    *,
    graph: ModelGraph,
    plan: Plan,
    assignment: Assignment,
    lowered: bool,
    duration: Callable[[Action], float] | None = None,
) -> Execution:
    """Run a schedule whose actions all belong to the step; works for both dialects.

    A computation starts when all its lanes have come to it and its dependencies are complete. A reduction also waits for the
    other replicas, and its lane for it. A send never blocks; a receive is only posted, and completes with its send. Lanes that
    wait for each other in a circle stop: see `Execution.stuck`. Durations are unit costs unless given; messages have none.

    Runs as a C++ kernel where that is built and every action stands in lanes of its stage, once in each; with the same result.
    O(actions + dependencies).
    """
    numbered = None
    if kernels is not None:
        numbered = number_lanes(schedule, graph=graph, plan=plan, assignment=assignment, lowered=lowered)
    if numbered is None or not numbered.is_regular:
        return execute_lanes_reference(
            schedule, graph=graph, plan=plan, assignment=assignment, lowered=lowered, duration=duration
        )
    return _execute(numbered, duration)


def _execute(lanes: NumberedLanes, duration: Callable[[Action], float] | None) -> Execution:
    table = lanes.table
    starts, needs = table.lowered_needs if lanes.lowered else (table.need_starts, table.needs)
    num_actions = len(starts) - 1
    stage_starts, stage_lanes = table.lane_rows
    collectives, member_starts, members = table.collective_rows
    actions, on_lanes, start_seconds, end_seconds, positions, is_done = kernels.execute_lanes(
        lane_starts=lanes.lane_starts,
        lane_actions=lanes.lane_actions,
        resources=table.resources[:num_actions],
        stages=table.stage_numbers[:num_actions],
        stage_starts=stage_starts,
        stage_lanes=stage_lanes,
        need_starts=starts,
        needs=needs,
        collectives=collectives[:num_actions],
        member_starts=member_starts,
        members=members,
        durations=_durations(lanes, num_actions, duration),
    )
    order = np.lexsort((end_seconds, on_lanes, start_seconds))
    return Execution(
        table.actions if lanes.lowered else table.computed,
        actions[order],
        on_lanes[order],
        start_seconds[order],
        end_seconds[order],
        tuple(positions.tolist()),
        np.flatnonzero(is_done),
    )


def _durations(lanes: NumberedLanes, num_actions: int, duration: Callable[[Action], float] | None) -> Floats:
    """Seconds of every action that stands in a lane; 0 for messages."""
    table = lanes.table
    seconds = np.zeros(num_actions)
    if duration is None:
        seconds[: table.num_computed] = table.unit_costs
        return seconds
    for number in np.unique(lanes.lane_actions[lanes.lane_actions < table.num_computed]).tolist():
        seconds[number] = duration(table.computed[number])
    return seconds
