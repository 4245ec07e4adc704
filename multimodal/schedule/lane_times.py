"""When every action of a schedule would start, and lanes rebuilt from such times: the tools of passes that move actions."""

from collections.abc import Callable, Mapping

from multimodal.schedule.lane_execution import execute_lanes
from multimodal.schedule.place_grid import show_places
from multimodal.values.assignment import Assignment
from multimodal.values.errors import ScheduleError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Action, Lane, Schedule
from multimodal.values.timeline import TimelineEvent


def lane_times(
    schedule: Schedule, *, graph: ModelGraph, plan: Plan, assignment: Assignment
) -> tuple[tuple[TimelineEvent, ...], ...]:
    """Per lane the events of a compute-dialect schedule under unit costs, in the order of its actions.

    Raises ScheduleError when the schedule cannot finish.
    """
    execution = execute_lanes(schedule, graph=graph, plan=plan, assignment=assignment, lowered=False)
    if stuck := execution.stuck(schedule):
        raise ScheduleError(
            "the schedule cannot finish, so nothing in it can be moved; validate it first\n" + show_places(schedule, marked=stuck)
        )
    events: list[dict[Action, TimelineEvent]] = [{} for _ in schedule.lanes]
    for event in execution.events:
        events[event.lane][event.action] = event
    return tuple(tuple(events[index][action] for action in lane.actions) for index, lane in enumerate(schedule.lanes))


def duration_of(
    schedule: Schedule,
    *,
    graph: ModelGraph,
    plan: Plan,
    assignment: Assignment,
    duration: Callable[[Action], float] | None = None,
) -> float | None:
    """Return how long a compute-dialect schedule takes under unit costs, or those given; None when it cannot finish."""
    execution = execute_lanes(schedule, graph=graph, plan=plan, assignment=assignment, lowered=False, duration=duration)
    if execution.stuck(schedule):
        return None
    return execution.duration_seconds


def sort_lanes(schedule: Schedule, key: Callable[[Action], float], added: Mapping[int, list[Action]] | None = None) -> Schedule:
    """Sort every lane by time, actions of one time as they stood; `added`: more actions per lane, after those of their time.

    schedule: without fillers, whose carriers would not be the same (see `keeps_earlier_passes`).
    When every action's time lies strictly after the times of all that it needs, the result cannot deadlock.
    """
    assert not any(lane.fillers for lane in schedule.lanes), "fillers would be lost"
    return Schedule(
        tuple(
            Lane(lane.ranks, tuple(sorted((*lane.actions, *(added or {}).get(index, ())), key=key)))
            for index, lane in enumerate(schedule.lanes)
        )
    )
