"""Compares two timelines: seconds by kind of action and by lane."""

from collections import defaultdict
from dataclasses import dataclass

from multimodal.values.action import ACTION_TABLE, ActionKind, Resource
from multimodal.values.errors import DataError
from multimodal.values.timeline import Timeline

IDLE = "idle"
"""Time in which a lane computes nothing, whether or not it waits for a message."""


@dataclass(frozen=True, slots=True)
class Share:
    """Seconds that one kind of action takes in one lane (or in all) in both timelines."""

    kind: str
    lane: int
    """-1: all lanes."""
    first_seconds: float
    second_seconds: float


@dataclass(frozen=True, slots=True)
class TimelineDifference:
    """Two timelines of the same lanes."""

    first_seconds: float
    second_seconds: float
    by_kind: tuple[Share, ...]
    """Over all lanes, without kinds that neither timeline has."""
    by_lane: tuple[Share, ...]
    """Per lane and kind, lane by lane."""


def compare_timelines(first: Timeline, second: Timeline) -> TimelineDifference:
    """Sum up both timelines by kind and lane. A lane's idle time is the whole step's duration less its computations.

    Raises DataError if their lanes differ. O(events).
    """
    if first.lanes != second.lanes:
        raise DataError(
            f"the timelines have different lanes ({_describe(first)} against {_describe(second)}); compare steps of the same plan"
        )
    sums = _sum(first), _sum(second)
    kinds = [*map(str, ActionKind), IDLE]
    by_lane = tuple(
        Share(kind, lane, *(found.get((lane, kind), 0.0) for found in sums))
        for lane in range(len(first.lanes))
        for kind in kinds
        if any((lane, kind) in found for found in sums)
    )
    by_kind = tuple(
        Share(kind, -1, sum(share.first_seconds for share in shares), sum(share.second_seconds for share in shares))
        for kind in kinds
        if (shares := [share for share in by_lane if share.kind == kind])
    )
    return TimelineDifference(first.duration_seconds, second.duration_seconds, by_kind, by_lane)


def _sum(timeline: Timeline) -> dict[tuple[int, str], float]:
    sums: dict[tuple[int, str], float] = defaultdict(float)
    computing: dict[int, float] = defaultdict(float)
    for event in timeline.events:
        seconds = event.end_seconds - event.start_seconds
        sums[event.lane, str(event.action.kind)] += seconds
        if ACTION_TABLE[event.action.kind].resource is Resource.COMPUTE:
            computing[event.lane] += seconds
    for lane in range(len(timeline.lanes)):
        sums[lane, IDLE] = timeline.duration_seconds - computing[lane]
    return sums


def _describe(timeline: Timeline) -> str:
    return f"{len(timeline.lanes)} lanes on {sum(map(len, timeline.lanes))} ranks"
