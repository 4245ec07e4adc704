"""Lets a schedule gather the parameters that a sharded optimizer (ZeRO-1) has updated, stage by stage, before their use."""

from dataclasses import replace

import numpy as np

from multimodal.values.action import ActionKind
from multimodal.values.schedule import Lane, Schedule, Slot
from multimodal.values.work.step_work import KIND_NUMBERS, step_work


def gather_parameters(schedule: Schedule) -> Schedule:
    """Put the gathers of every trained stage at the start of its lanes.

    Gathers are in one order everywhere (upstream units first, then early stages), so that the lanes of different replicas never
    wait for each other in a circle. A lane only starts a gather at its slot, and a stage's first forward waits for it: the first
    stage's gather shows as a bubble (Optimus, Table 1), and the others hide behind computations. O(actions).
    """
    if schedule.shape.cuts.gathers_parameters:
        return schedule
    shape = schedule.shape.with_cuts(replace(schedule.shape.cuts, gathers_parameters=True))
    work, gathers = step_work(shape), list[list[Slot]]([] for _ in schedule.lanes)
    for action in map(work.action, np.flatnonzero(work.kinds == KIND_NUMBERS[ActionKind.GATHER_PARAMETERS]).tolist()):
        for lane in shape.lanes_of(*action[1:4]):
            gathers[lane].append(Slot(action))
    pairs = zip(schedule.lanes, gathers, strict=True)
    return schedule.with_lanes(Lane(lane.ranks, (*first, *lane.slots)) for lane, first in pairs)
