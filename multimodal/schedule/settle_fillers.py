"""Decides where fillers run before the step starts, so that no rank has to ask a device if a message has arrived."""

from collections.abc import Iterator
from itertools import chain

import numpy as np

from multimodal.cost.step_costs import StepCosts
from multimodal.schedule.compile_schedule import CompiledSchedule, compile_schedule
from multimodal.schedule.inside_slots import NO_CARRIER, carrier_slots
from multimodal.schedule.simulate_events import EventTimes, simulate_events
from multimodal.values.action import Resource
from multimodal.values.arrays.rows import Bools, Integers
from multimodal.values.schedule import Schedule, SlotMode
from multimodal.values.work.step_work import RESOURCE_NUMBERS

_COMPUTE = RESOURCE_NUMBERS[Resource.COMPUTE]


def settle_fillers(schedule: Schedule, costs: StepCosts) -> Schedule:
    """Return a valid lowered schedule with every filler in line, at its place in a simulation with these costs.

    That place is before its carrier, while the carrier would wait, or right behind the carrier. Both orders are valid, and only
    weight gradients fill, for which no lane waits; so lanes that use other costs still fit together.
    O(actions + dependencies).
    """
    if not (schedule.modes == SlotMode.FILLS_WAIT).any():
        return schedule
    compiled = compile_schedule(schedule).with_costs(costs)
    is_late, places = _late_fillers(compiled, simulate_events(compiled.arrays))
    lanes = (list(_in_line(schedule, is_late, places, lane)) for lane in range(schedule.num_lanes))
    order = np.array(list(chain.from_iterable(lanes)), np.int64)
    modes = np.where(schedule.modes == SlotMode.FILLS_WAIT, SlotMode.IN_LINE, schedule.modes).astype(np.uint8)
    return Schedule(
        schedule.shape, schedule.lane_starts, schedule.pieces[order], modes[order], schedule.waits[order], schedule.lowered
    )


def _late_fillers(compiled: CompiledSchedule, times: EventTimes) -> tuple[Bools, Integers]:
    """Return [num_slots]: True for fillers that start when their carrier has ended; and the slot that runs in place of each slot.

    Fillers of one carrier run in the order of their starts: fillers with unmet needs are passed over.
    """
    schedule = compiled.schedule
    starts, ends = (np.full(len(schedule.pieces), np.nan) for _ in range(2))
    starts[compiled.slots] = times.start_seconds[compiled.arrays.lane_nodes]
    ends[compiled.slots] = times.end_seconds[compiled.arrays.lane_nodes]
    fillers = np.flatnonzero(schedule.modes == SlotMode.FILLS_WAIT)
    carriers = carrier_slots(schedule, fillers)
    fillers, carriers = fillers[carriers != NO_CARRIER], carriers[carriers != NO_CARRIER]
    late, places = np.zeros(len(schedule.pieces), np.bool_), np.arange(len(schedule.pieces))
    late[fillers] = starts[fillers] >= ends[carriers]
    places[fillers[np.argsort(carriers, kind="stable")]] = fillers[np.lexsort((starts[fillers], carriers))]
    return late, places


def _in_line(schedule: Schedule, is_late: Bools, places: Integers, lane: int) -> Iterator[int]:
    """Yield the slots of a lane in their new order."""
    resources, late = schedule.work.resources[schedule.pieces], []
    has_run = False
    for slot in places[schedule.lane_starts[lane] : schedule.lane_starts[lane + 1]].tolist():
        if is_late[slot]:
            late.append(slot)
            continue
        if has_run:
            yield from late
            late, has_run = [], False
        yield slot
        has_run |= bool(late) and resources[slot] == _COMPUTE and schedule.modes[slot] == SlotMode.IN_LINE
    yield from late
