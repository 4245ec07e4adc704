"""Shared by passes that move actions: the clock and the order of lanes, and a decorator that keeps what earlier passes did.

Earlier passes made fillers and reductions by layer.
"""

from collections.abc import Callable, Iterable, Mapping, Set
from functools import wraps

from multimodal.schedule.execute_lanes import execute_lanes
from multimodal.schedule.passes.fill import fill
from multimodal.schedule.passes.reduce_by_layer import cut_reductions, with_whole_reductions
from multimodal.schedule.simulate import timeline_of_unit_costs
from multimodal.values.action import Action, ActionKind, action_to_text
from multimodal.values.arrays.rows import Floats
from multimodal.values.errors import ScheduleError
from multimodal.values.schedule import Lane, Schedule, lane_of, show_slots
from multimodal.values.shape import StepShape
from multimodal.values.timeline import TimelineEvent

Pass = Callable[[Schedule], Schedule]
"""Rewrites a schedule of the compute dialect."""


def keeps_earlier_passes(*, never_longer: bool = False) -> Callable[[Pass], Pass]:
    """Return a decorator for a pass that knows neither fillers nor reductions by layer.

    The pass receives every filler in line, at its position, and every reduction whole. Afterwards the same reductions are cut
    again, and weight gradients before an action with a message become fillers again; others have no wait to fill and stay in
    line. If a reduction can no longer be cut, the original schedule is kept.

    never_longer: the pass promises not to make a schedule longer; if it nevertheless does, with fillers that run in waits or with
    cut reductions, the original schedule is kept, too. Raises ScheduleError for a filler that is no weight gradient.
    """

    def decorate(rewrite: Pass) -> Pass:
        @wraps(rewrite)
        def rewritten(schedule: Schedule) -> Schedule:
            cut = schedule.shape.cuts.reduced_by_layer
            _check_fillers(schedule)
            whole = (with_whole_reductions(lane, schedule.shape) for lane in schedule.lanes)
            moved = rewrite(schedule.with_lanes(lane_of(lane.ranks, lane.actions) for lane in whole))
            if cut:
                moved = cut_reductions(moved.with_lanes(_with_early_reductions(lane, cut) for lane in moved.lanes), cut)
                if moved.shape.cuts.reduced_by_layer != cut:
                    return schedule
            if schedule.has_fillers:
                moved = fill(moved, splits=False)
            elif not cut:
                return moved
            pairs = zip(schedule.lanes, moved.lanes, strict=True)
            moved = moved.with_lanes(old if old.actions == new.actions else new for old, new in pairs)
            return schedule if never_longer and _is_longer(moved, schedule) else moved

        return rewritten

    return decorate


def _check_fillers(schedule: Schedule) -> None:
    for index, lane in enumerate(schedule.lanes):
        for position in sorted({*lane.fillers, *lane.inside}):
            filler = lane.actions[position]
            if position in lane.inside or filler.kind is not ActionKind.WEIGHT_GRADIENT:
                raise ScheduleError(
                    f"lane {index}: {action_to_text(filler)} fills a wait, but passes that move actions know where to put weight "
                    "gradients between computations only; apply them before whatever let it fill one"
                )


def _with_early_reductions(lane: Lane, stages: Set[tuple[str, int]]) -> Lane:
    """Move the reductions of these stages right behind the last backward that they need."""
    actions = list(lane.actions)
    for reduction in [action for action in reversed(actions) if action.kind is ActionKind.REDUCE_GRADIENTS]:
        own = [at for at, action in enumerate(actions) if action.microbatch >= 0 and action[1:4] == reduction[1:4]]
        if (reduction.unit, reduction.stage) in stages and own:
            actions.remove(reduction)
            actions.insert(own[-1] + 1, reduction)
    return lane_of(lane.ranks, actions)


def _is_longer(after: Schedule, before: Schedule) -> bool:
    """Return True if the schedule takes longer under unit costs, with fillers in line or with fillers that run in waits."""
    if after == before:
        return False
    in_line = [duration_of(each) for each in (after, before)]
    if in_line[0] is None or (in_line[1] is not None and in_line[0] > in_line[1]):
        return True
    timelines = [timeline_of_unit_costs(each) for each in (after, before)]
    return timelines[0].duration_seconds > timelines[1].duration_seconds


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


def duration_of(schedule: Schedule, *, seconds: Floats | None = None) -> float | None:
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
