"""The timeline of a schedule under unit costs: how its shape looks when every microbatch is alike."""

from multimodal.schedule.lane_execution import execute_lanes
from multimodal.values.assignment import Assignment
from multimodal.values.errors import ScheduleError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Schedule
from multimodal.values.timeline import Timeline


def timeline_of_unit_costs(
    schedule: Schedule, *, graph: ModelGraph, plan: Plan, assignment: Assignment, lowered: bool = False
) -> Timeline:
    """Run a valid schedule with forward 1 s, backward 2 s, reduction 1 s and immediate messages.

    In the lowered dialect the time that a lane stands still for a message is an event of its receive. Raises ScheduleError
    when the schedule cannot finish.
    """
    execution = execute_lanes(
        schedule,
        graph=graph,
        plan=plan,
        assignment=assignment,
        lowered=lowered,
    )
    if execution.stuck(schedule):
        raise ScheduleError("the schedule cannot finish, so it has no timeline; validate_schedule says which action is stuck")
    return Timeline(tuple(lane.ranks for lane in schedule.lanes), execution.events)
