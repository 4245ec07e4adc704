"""Start times of a schedule's actions, and lanes rebuilt from such times, for passes that move actions."""

from collections.abc import Callable, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from multimodal.schedule.execute_lanes import execute_lanes
from multimodal.values.action import Action
from multimodal.values.errors import ScheduleError
from multimodal.values.schedule import Lane, Schedule, lane_of, show_slots
from multimodal.values.shape import StepShape
from multimodal.values.timeline import TimelineEvent


def lane_times(schedule: Schedule) -> tuple[tuple[TimelineEvent, ...], ...]:
    """Return per lane the events of a compute-dialect schedule under unit costs, in the order of its actions.

    Raises ScheduleError if the schedule cannot finish.
    """
    execution = execute_lanes(schedule)
    if stuck := execution.stuck:
        raise ScheduleError(
            "the schedule cannot finish, so nothing in it can be moved; validate it first\n"
            + show_slots(schedule.lanes, marked=stuck)
        )
    events: list[dict[Action, TimelineEvent]] = [{} for _ in schedule.lanes]
    for event in execution.events:
        events[event.lane][event.action] = event
    return tuple(tuple(events[index][action] for action in lane.actions) for index, lane in enumerate(schedule.lanes))


def duration_of(schedule: Schedule, *, seconds: NDArray[np.float64] | None = None) -> float | None:
    """Return the duration of a schedule under unit costs, or with the given seconds; None if it cannot finish."""
    execution = execute_lanes(schedule, seconds=seconds)
    return None if execution.stuck else execution.duration_seconds


def sort_lanes(
    lanes: Iterable[Lane], shape: StepShape, key: Callable[[Action], float], added: Mapping[int, list[Action]] | None = None
) -> Schedule:
    """Sort every lane by time; actions of equal time keep their order. added: more actions per lane, after those of their time.

    lanes: without fillers, whose carriers would change (see `keeps_earlier_passes`). If every action's time is strictly after the
    times of all its needs, the result cannot deadlock.
    """
    rows = tuple(lanes)
    assert not any(lane.fillers for lane in rows), "fillers would be lost"
    return Schedule.of_lanes(
        shape,
        (lane_of(lane.ranks, sorted((*lane.actions, *(added or {}).get(index, ())), key=key)) for index, lane in enumerate(rows)),
    )
