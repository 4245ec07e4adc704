"""Weight gradients as work of their own in a schedule that has whole backwards, and what must wait for them."""

from collections.abc import Collection
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from multimodal.cost.step_costs import StepCosts
from multimodal.values.action import ActionKind
from multimodal.values.arrays.rows import Integers
from multimodal.values.schedule import Schedule
from multimodal.values.step_graph import StageSplit, StepGraph
from multimodal.values.step_work import KIND_NUMBERS, row_starts, step_work


class Waits(NamedTuple):
    """Pairs of computations, [num_pairs] each: one begins when the other is over."""

    waiting: Integers
    awaited: Integers

    def joined(self, other: "Waits") -> "Waits":
        """Return the pairs of both."""
        return Waits(*(np.concatenate(column) for column in zip(self, other, strict=True)))


def split_in_line(schedule: Schedule, units: Collection[str]) -> Schedule:
    """Return the computations of a schedule with these units' backwards in two, the weight gradient behind the input gradient.

    schedule: of an uncut step, in the compute dialect, all in line. Collectives are left out.
    """
    step, work = schedule.step, schedule.work
    counts = {
        stage: step.num_microbatches(*stage[:2])
        for stage in step.stages
        if stage[0] in units and step.backward_need(*stage).has_backward
    }
    split = step.with_cuts(replace(step.cuts, split=StageSplit({stage: count for stage, count in counts.items() if count > 0})))
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


def reduced_units(step: StepGraph, costs: StepCosts) -> frozenset[str]:
    """Return the units whose reductions take time, which can be hidden behind other computations."""
    work = step_work(step)
    reductions = np.flatnonzero(work.kinds == _REDUCTION)
    takes_time = costs.of_pieces(work, reductions).seconds > 0
    return frozenset(work.stages[stage][0] for stage in np.unique(work.computed_stages[reductions[takes_time]]).tolist())


def fills_of(schedule: Schedule, units: Collection[str], last: Waits) -> NDArray[np.bool_]:
    """Return [num_computed] True for these units' computations, and for all weight gradients but those that wait in `last`."""
    work = schedule.work
    is_unit = np.array([unit in units for unit, _, _ in work.stages], bool)
    found: NDArray[np.bool_] = is_unit[work.computed_stages] | (work.kinds == _WEIGHT_GRADIENT)
    found[last.waiting] = False
    return found


def weights_before_forwards(schedule: Schedule, unit: str) -> Waits:
    """Return a unit's forwards, and for each a weight gradient that must be over before it begins, so that not more is kept.

    Where the order has at most n microbatches in flight in any stage of a replica, a stage begins its forward k when the weight
    gradient of its (k - n)-th backward is over (ZB-H1's limit). schedule: as `split_in_line` returns it.
    """
    work, position = schedule.work, _positions(schedule)
    grid = work.pieces.units[unit]
    found = [np.zeros((2, 0), np.int64)]
    for first, end in pairwise(grid.placed.microbatch_starts.tolist()):
        is_split = (grid.width[:, first:end] > 1).any(axis=1)
        forwards, backwards = grid.forward[is_split, first:end], grid.backward[is_split, first:end]
        if forwards.size:
            found.append(_with_limit(_in_order(forwards, position), _in_order(backwards, position), position))
    return Waits(*np.concatenate(found, axis=1))


def weights_before_forwards_of_lanes(schedule: Schedule, num_more: int) -> Waits:
    """Return the same for lanes: where one has at most n microbatches in flight, those of all its stages together.

    It begins its forward k when the weight gradient of its (k - n - num_more)-th backward is over. schedule: as `split_in_line`
    returns it.
    """
    work, position = schedule.work, _positions(schedule)
    trains = np.zeros(len(work.stages), bool)
    trains[work.computed_stages[work.kinds == _WEIGHT_GRADIENT]] = True
    found = [np.zeros((2, 0), np.int64)]
    for lane in range(schedule.num_lanes):
        pieces = schedule.lane_pieces(lane)
        pieces = pieces[trains[work.computed_stages[pieces]]]
        forwards, backwards = (pieces[work.kinds[pieces] == kind] for kind in (_FORWARD, _INPUT_GRADIENT))
        if len(forwards) == len(backwards) > 0:
            found.append(_with_limit(forwards[None], backwards[None], position, num_more))
    return Waits(*np.concatenate(found, axis=1))


def weights_before_last(schedule: Schedule, units: Collection[str]) -> Waits:
    """Return the last weight gradient of each of these units' stages, once for each of the stage's others.

    If these are over by then, and the last one keeps its place in line, the stage's gradients are reduced while other stages
    still compute. schedule: as `split_in_line` returns it.
    """
    work, position = schedule.work, _positions(schedule)
    found = [np.zeros((2, 0), np.int64)]
    for name in units:
        grid = work.pieces.units[name]
        for first, end in pairwise(grid.placed.microbatch_starts.tolist()):
            for width, backwards in zip(grid.width[:, first:end], grid.backward[:, first:end], strict=True):
                if len(width) > 1 and (width > 1).all():
                    weights = backwards[np.argsort(position[backwards])] + 1
                    found.append(np.stack((np.full(len(weights) - 1, weights[-1]), weights[:-1])))
    return Waits(*np.concatenate(found, axis=1))


def _positions(schedule: Schedule) -> Integers:
    position = np.zeros(schedule.work.num_computed, np.int64)
    position[schedule.pieces] = np.arange(len(schedule.pieces))
    return position


def _in_order(pieces: Integers, position: Integers) -> Integers:
    found: Integers = np.take_along_axis(pieces, np.argsort(position[pieces]), axis=1)
    return found


def _with_limit(forwards: Integers, backwards: Integers, position: Integers, num_more: int = 0) -> Integers:
    """Return the pairs of rows of stages or lanes; forwards, backwards: [num_rows, num_microbatches] pieces in their order."""
    count = forwards.shape[1]
    num_over = [np.searchsorted(*row) for row in zip(position[backwards], position[forwards], strict=True)]
    most = min(count, int((np.arange(1, count + 1) - num_over).max()) + num_more)
    return np.stack((forwards[:, most:].ravel(), backwards[:, : count - most].ravel() + 1))


_FORWARD, _INPUT_GRADIENT, _WEIGHT_GRADIENT, _REDUCTION = (
    KIND_NUMBERS[kind]
    for kind in (ActionKind.FORWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT, ActionKind.REDUCE_GRADIENTS)
)
