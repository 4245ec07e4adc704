"""Splits weight gradients from whole backwards in a schedule, and finds the work that must wait for them."""

from collections.abc import Collection
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from multimodal.cost.step_costs import StepCosts
from multimodal.schedule.encoder_ranges import Parts
from multimodal.schedule.list_schedule import split_units
from multimodal.values.action import ActionKind
from multimodal.values.arrays.rows import Bools, Integers, row_starts
from multimodal.values.schedule import Schedule
from multimodal.values.shape import StepShape
from multimodal.values.work.step_work import KIND_NUMBERS, step_work


class Waits(NamedTuple):
    """Pairs of computations, [num_pairs] each: the first begins after the second has ended."""

    waiting: Integers
    awaited: Integers

    def joined(self, other: "Waits") -> "Waits":
        """Return the pairs of both."""
        return Waits(*(np.concatenate(column) for column in zip(self, other, strict=True)))


def split_in_line(schedule: Schedule, units: Collection[str]) -> Schedule:
    """Return the computations of a schedule with these units' backwards split; weight gradients follow their input gradients.

    schedule: of an uncut step, in the compute dialect, all in line. Collectives are left out.
    """
    split = split_units(schedule.shape, units)
    parts = Parts.of(schedule.work, step_work(split))
    kept = parts.first[schedule.pieces] >= 0
    pieces, lanes = schedule.pieces[kept], schedule.lane_of_slot[kept]
    num_in_lane = np.bincount(np.repeat(lanes, parts.counts[pieces]), minlength=schedule.num_lanes)
    return Schedule.in_line(split, row_starts(num_in_lane), parts.expand(pieces))


def reduced_units(shape: StepShape, costs: StepCosts) -> frozenset[str]:
    """Return the units whose reductions take time, which other computations can hide."""
    work = step_work(shape)
    reductions = np.flatnonzero(work.kinds == _REDUCTION)
    takes_time = costs.of_pieces(work, reductions).seconds > 0
    return frozenset(work.stages[stage][0] for stage in np.unique(work.computed_stages[reductions[takes_time]]).tolist())


def fills_of(schedule: Schedule, units: Collection[str], last: Waits) -> Bools:
    """Return [num_computed] True for these units' computations, and for all weight gradients except those that wait in `last`."""
    work = schedule.work
    is_unit = np.array([unit in units for unit, _, _ in work.stages], bool)
    found: Bools = is_unit[work.computed_stages] | (work.kinds == _WEIGHT_GRADIENT)
    found[last.waiting] = False
    return found


def weights_before_forwards(schedule: Schedule, unit: str | None = None, *, num_more: int = 0) -> Waits:
    """Return forwards, each with a weight gradient that must end before it begins, so that no more microbatches are kept.

    A lane begins its forward k after the weight gradient of its (k - n)-th backward (ZB-H1's limit). n is `num_more` above what
    the lane has in flight in this order, in all its stages together. unit: count its stages alone, and let n be the largest of
    all lanes of a replica. schedule: a result of `split_in_line`.
    """
    shape, work = schedule.shape, schedule.work
    is_split = np.zeros(len(work.stages), bool)
    is_split[work.computed_stages[work.kinds == _WEIGHT_GRADIENT]] = True
    groups = [(is_split, {lane}) for lane in range(schedule.num_lanes)]
    if unit is not None:
        groups = []
        for index, replica in enumerate(shape.plan.units[unit].replicas):
            is_own = np.array([stage[:2] == (unit, index) for stage in work.stages], bool)
            lanes = {lane for stage in range(len(replica.virtual_stages)) for lane in shape.lanes_of(unit, index, stage)}
            groups.append((is_own & is_split, lanes))
    found = [np.zeros((2, 0), np.int64)]
    for is_wanted, lanes in groups:
        orders = [_LaneOrder.of(schedule, lane, is_wanted) for lane in lanes]
        most = num_more + max(order.most_in_flight for order in orders)
        found += [order.with_limit(most) for order in orders]
    return Waits(*np.unique(np.concatenate(found, axis=1), axis=1))


class _LaneOrder(NamedTuple):
    """The forwards and input gradients of some stages in a lane, in the lane's order."""

    forwards: Integers
    input_gradients: Integers
    num_over: Integers
    """Number of input gradients before each forward."""

    @classmethod
    def of(cls, schedule: Schedule, lane: int, is_wanted: Bools) -> "_LaneOrder":
        """Read the order of a lane; is_wanted: [num_stages], True for the stages that count, whose backwards are in two."""
        pieces = schedule.lane_pieces(lane)
        pieces = pieces[is_wanted[schedule.work.computed_stages[pieces]]]
        kinds = schedule.work.kinds[pieces]
        num_over = np.cumsum(kinds == _INPUT_GRADIENT)[kinds == _FORWARD]
        return cls(pieces[kinds == _FORWARD], pieces[kinds == _INPUT_GRADIENT], num_over)

    @property
    def most_in_flight(self) -> int:
        """Return the largest number of microbatches whose forward has begun and whose input gradient has not ended."""
        return int((np.arange(1, len(self.forwards) + 1) - self.num_over).max(initial=0))

    def with_limit(self, most: int) -> Integers:
        """Return [2, num_pairs]: pairs that keep at most `most` microbatches in flight; most: at least `most_in_flight`."""
        num_pairs = max(0, len(self.forwards) - most)
        return np.stack((self.forwards[most:], self.input_gradients[:num_pairs] + 1))


def weights_before_last(schedule: Schedule, units: Collection[str]) -> Waits:
    """Return the last weight gradient of each of these units' stages, paired with each other weight gradient of the stage.

    If the others have ended by then, and the last one keeps its place in line, the stage's gradients are reduced while other
    stages still compute. schedule: a result of `split_in_line`.
    """
    work = schedule.work
    position = np.zeros(work.num_computed, np.int64)
    position[schedule.pieces] = np.arange(len(schedule.pieces))
    found = [np.zeros((2, 0), np.int64)]
    for name in units:
        grid = work.pieces.units[name]
        for first, end in pairwise(grid.counted.microbatch_starts.tolist()):
            for width, backwards in zip(grid.width[:, first:end], grid.backward[:, first:end], strict=True):
                if len(width) > 1 and (width > 1).all():
                    weights = backwards[np.argsort(position[backwards])] + 1
                    found.append(np.stack((np.full(len(weights) - 1, weights[-1]), weights[:-1])))
    return Waits(*np.concatenate(found, axis=1))


_FORWARD, _INPUT_GRADIENT, _WEIGHT_GRADIENT, _REDUCTION = (
    KIND_NUMBERS[kind]
    for kind in (ActionKind.FORWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT, ActionKind.REDUCE_GRADIENTS)
)
