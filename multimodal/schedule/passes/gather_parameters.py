"""Lets a schedule gather the parameters that a sharded optimizer (ZeRO-1) has updated, stage by stage, before their use."""

from dataclasses import replace

import numpy as np

from multimodal.values.action import ActionKind
from multimodal.values.arrays.rows import row_numbers
from multimodal.values.schedule import Schedule
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
    work = step_work(shape)
    is_gather = work.kinds == KIND_NUMBERS[ActionKind.GATHER_PARAMETERS]
    gathers = np.flatnonzero(is_gather)
    if not len(gathers):
        return schedule
    starts, lanes = work.lanes_of(gathers)
    by_lane = np.argsort(lanes, kind="stable")
    lanes, pieces = lanes[by_lane], gathers[row_numbers(starts)[by_lane]]
    before = schedule.lane_starts[lanes]
    return schedule.with_inserted(shape, numbers=np.flatnonzero(~is_gather), lanes=lanes, before=before, pieces=pieces)
