"""Weight gradients as work of their own in a schedule that has whole backwards, and how many microbatches may wait for theirs."""

from collections.abc import Collection
from dataclasses import replace
from itertools import pairwise

import numpy as np

from multimodal.values.arrays.rows import Integers
from multimodal.values.schedule import Schedule
from multimodal.values.step_graph import StageSplit
from multimodal.values.step_work import row_starts, step_work


def split_in_line(schedule: Schedule, units: Collection[str]) -> Schedule:
    """Return the computations of a schedule with these units' backwards in two, the weight gradient behind the input gradient.

    schedule: of an uncut step, in the compute dialect, all in line. Collectives are left out.
    """
    step, work = schedule.step, schedule.work
    counts = {
        stage: step.num_microbatches(*stage[:2])
        for stage in step.stages
        if stage[0] in units and step.backward_need(*stage).has_backward and step.num_microbatches(*stage[:2])
    }
    split = step.with_cuts(replace(step.cuts, split=StageSplit(counts)))
    first, num_parts = np.full((2, work.num_computed), -1)
    for name, old in work.pieces.units.items():
        new = step_work(split).pieces.units[name]
        first[old.forward[old.is_there]], num_parts[old.forward[old.is_there]] = new.forward[old.is_there], 1
        is_there = old.width > 0
        first[old.backward[is_there]], num_parts[old.backward[is_there]] = new.backward[is_there], new.width[is_there]
    kept = first[schedule.pieces] >= 0
    pieces, lanes = schedule.pieces[kept], schedule.lane_of_slot[kept]
    sizes = num_parts[pieces]
    halves = np.repeat(first[pieces] - row_starts(sizes)[:-1], sizes) + np.arange(int(sizes.sum()))
    num_in_lane = np.bincount(np.repeat(lanes, sizes), minlength=schedule.num_lanes)
    return Schedule.in_line(split, row_starts(num_in_lane), halves)


def weights_before_forwards(schedule: Schedule, unit: str) -> tuple[Integers, Integers]:
    """Return a unit's forwards, and for each a weight gradient that must be over before it begins, so that not more is kept.

    Where the order has at most n microbatches in flight in any stage of a replica, a stage begins its forward k when the weight
    gradient of its (k - n)-th backward is over (ZB-H1's limit). schedule: as `split_in_line` returns it.
    """
    work = schedule.work
    position = np.zeros(work.num_computed, np.int64)
    position[schedule.pieces] = np.arange(len(schedule.pieces))
    found = [np.zeros((2, 0), np.int64)]
    grid = work.pieces.units[unit]
    for first, end in pairwise(grid.placed.microbatch_starts.tolist()):
        is_split = (grid.width[:, first:end] > 1).any(axis=1)
        forwards, backwards = grid.forward[is_split, first:end], grid.backward[is_split, first:end]
        if forwards.size:
            found.append(_with_limit(forwards, backwards, position))
    forwards, weights = np.concatenate(found, axis=1)
    return forwards, weights


def _with_limit(forwards: Integers, backwards: Integers, position: Integers) -> Integers:
    """Return the pairs of one replica; forwards, backwards: [num_stages, num_microbatches] pieces."""
    forwards, backwards = (np.take_along_axis(each, np.argsort(position[each]), axis=1) for each in (forwards, backwards))
    count = forwards.shape[1]
    num_over = [np.searchsorted(*row) for row in zip(position[backwards], position[forwards], strict=True)]
    most = int((np.arange(1, count + 1) - num_over).max())
    return np.stack((forwards[:, most:].ravel(), backwards[:, : count - most].ravel() + 1))
