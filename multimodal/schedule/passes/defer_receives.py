"""Defers an action that would wait for a message behind later actions that are ready."""

from collections.abc import Sequence

from multimodal.schedule.passes.move_actions import duration_of, keeps_earlier_passes, lane_times, sort_lanes
from multimodal.values.action import ACTION_TABLE, Action, Resource
from multimodal.values.schedule import Schedule
from multimodal.values.timeline import TimelineEvent


@keeps_earlier_passes(never_longer=True)
def defer_receives(schedule: Schedule) -> Schedule:
    """Let later actions of a lane run while it would wait for a message.

    Under unit costs: where a lane waits, the next action in its list that is ready when the wait begins and ends before the
    message arrives moves to the front, and so on until the gap is full. Only lanes of one stage move their actions (in several
    lanes at once, an order that suits one may stop another). The result may keep more activations, but never takes longer: if
    moving does not pay, the schedule stays as it is. O(actions x window + dependencies).
    """
    shape, work, times = schedule.shape, schedule.work, lane_times(schedule)
    ends = {event.action: event.end_seconds for lane in times for event in lane}
    starts = {event.action: event.start_seconds for lane in times for event in lane}
    for lane in times:
        if any(len(shape.lanes_of(*event.action[1:4])) > 1 for event in lane):
            continue
        ready = {
            event.action: max((ends[need] for need in work.needs_of(event.action, lowered=False)), default=0.0) for event in lane
        }
        starts |= _fill_gaps(lane, ready)
    moved = sort_lanes(schedule.lanes, shape, starts.__getitem__)
    before, after = duration_of(schedule), duration_of(moved)
    return moved if after is not None and before is not None and after <= before else schedule


_WINDOW = 32
"""Number of later actions that are considered for a gap."""


def _fill_gaps(events: Sequence[TimelineEvent], ready: dict[Action, float]) -> dict[Action, float]:
    """Return new start times for the actions that move into a gap of their lane."""
    moved: dict[Action, float] = {}
    free_at = 0.0
    for index, event in enumerate(events):
        if event.action in moved:
            continue
        for later in events[index + 1 : index + 1 + _WINDOW] if _is_computed(event) else ():
            length = later.end_seconds - later.start_seconds
            is_ready = _is_computed(later) and later.action not in moved and ready[later.action] <= free_at
            if is_ready and free_at + length <= event.start_seconds:
                moved[later.action] = free_at
                free_at += length
        free_at = event.end_seconds
    return moved


def _is_computed(event: TimelineEvent) -> bool:
    return ACTION_TABLE[event.action.kind].resource is Resource.COMPUTE
