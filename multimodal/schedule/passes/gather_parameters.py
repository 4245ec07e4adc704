"""Let a schedule gather the parameters that a sharded optimizer (ZeRO-1) has updated, stage by stage, before their first use."""

from multimodal.schedule.expected_actions import collective_actions
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Action, ActionKind, Lane, Schedule
from multimodal.values.schedule_form import ScheduleForm


def gather_parameters(schedule: Schedule, *, graph: ModelGraph, plan: Plan, assignment: Assignment) -> Schedule:
    """Put the gathers of every trained stage at the start of its lanes.

    They stand in one order everywhere (upstream units first, then early stages), so that the lanes of different replicas never
    wait for each other in a circle. A gather only starts there; a stage's first forward waits for it, so the first stage's shows
    as a bubble (Optimus, Table 1) and the others hide behind computations. O(actions).
    """
    if any(action.kind is ActionKind.GATHER_PARAMETERS for lane in schedule.lanes for action in lane.actions):
        return schedule
    everything = collective_actions(graph, plan, form=ScheduleForm(gathers_parameters=True))
    gathers: list[list[Action]] = [[] for _ in plan.lanes]
    for action in everything:
        if action.kind is ActionKind.GATHER_PARAMETERS:
            for lane in plan.lanes_of_stage(action.unit, action.replica, action.stage):
                gathers[lane].append(action)
    return Schedule(
        tuple(
            Lane(lane.ranks, (*first, *lane.actions), frozenset(position + len(first) for position in lane.fillers))
            for lane, first in zip(schedule.lanes, gathers, strict=True)
        )
    )
