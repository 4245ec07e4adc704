"""Decide where fillers run, before the step does: nobody asks a device whether a message has come."""

from collections.abc import Iterator

import numpy as np

from multimodal.cost.step_costs import StepCosts
from multimodal.schedule.compile_schedule import CompiledSchedule, compile_schedule
from multimodal.schedule.simulate_events import EventTimes, simulate_events
from multimodal.values.action import Resource
from multimodal.values.schedule import Schedule, SlotMode
from multimodal.values.step_work import RESOURCE_NUMBERS, Integers

_COMPUTE, _SEND = RESOURCE_NUMBERS[Resource.COMPUTE], RESOURCE_NUMBERS[Resource.SEND]


def settle_fillers(schedule: Schedule, costs: StepCosts) -> Schedule:
    """Return a valid lowered schedule with every filler in line, where it runs in a simulation at these costs.

    That is before its carrier, while this would wait, or behind the carrier and the sends of what it gives. Both orders are
    valid, and only weight gradients fill, which nobody waits for; so even lanes that go by other costs fit together.
    O(actions + dependencies).
    """
    if not (schedule.modes == SlotMode.FILLS_WAIT).any():
        return schedule
    compiled = compile_schedule(schedule).with_costs(costs)
    is_late = _late_fillers(compiled, simulate_events(compiled.arrays))
    order = np.concatenate(
        [np.array(list(_in_line(schedule, is_late, lane)), np.int64) for lane in range(schedule.num_lanes)] or [np.zeros(0, int)]
    )
    modes = np.where(schedule.modes == SlotMode.FILLS_WAIT, SlotMode.IN_LINE, schedule.modes).astype(np.uint8)
    return Schedule(
        schedule.step, schedule.lane_starts, schedule.pieces[order], modes[order], schedule.waits[order], schedule.lowered
    )


def _late_fillers(compiled: CompiledSchedule, times: EventTimes) -> "np.typing.NDArray[np.bool_]":
    """[num_slots]: True for fillers that start when their carrier has ended."""
    schedule = compiled.schedule
    starts, ends = (np.full(len(schedule.pieces), np.nan) for _ in range(2))
    starts[compiled.slots] = times.start_seconds[compiled.arrays.lane_nodes]
    ends[compiled.slots] = times.end_seconds[compiled.arrays.lane_nodes]
    carriers = _carriers(schedule)
    late = np.zeros(len(schedule.pieces), np.bool_)
    fillers = np.flatnonzero((schedule.modes == SlotMode.FILLS_WAIT) & (carriers >= 0))
    late[fillers] = starts[fillers] >= ends[carriers[fillers]]
    return late


def _carriers(schedule: Schedule) -> Integers:
    """[num_slots]: the slot of the next computation in line, -1 where the lane has none."""
    resources = schedule.work.resources[schedule.pieces]
    own = np.where((resources == _COMPUTE) & (schedule.modes == SlotMode.IN_LINE), np.arange(len(resources)), len(resources))
    following = np.minimum.accumulate(own[::-1])[::-1]
    lanes = np.append(schedule.lane_of_slot, -1)
    return np.where(lanes[following] == schedule.lane_of_slot, following, -1)


def _in_line(schedule: Schedule, is_late: "np.typing.NDArray[np.bool_]", lane: int) -> Iterator[int]:
    """Yield the slots of a lane in their new order."""
    resources, late = schedule.work.resources[schedule.pieces], []
    has_run = False
    for slot in range(int(schedule.lane_starts[lane]), int(schedule.lane_starts[lane + 1])):
        if is_late[slot]:
            late.append(slot)
            continue
        if has_run and resources[slot] != _SEND:
            yield from late
            late, has_run = [], False
        yield slot
        has_run |= bool(late) and resources[slot] == _COMPUTE and schedule.modes[slot] == SlotMode.IN_LINE
    yield from late
