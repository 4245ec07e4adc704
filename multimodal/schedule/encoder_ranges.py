"""Work that is cut to fill bubbles: encoders' in ranges of segments, and weight gradients split from whole backwards.

Ranges are cut finely to be placed piece by piece, then joined where pieces stay together.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np

from multimodal.cost.layers.registry import count_segments
from multimodal.cost.step_costs import StepCosts
from multimodal.schedule.inside_slots import NO_CARRIER
from multimodal.schedule.list_schedule import split_units
from multimodal.values.action import Place
from multimodal.values.arrays.rows import Integers, row_starts
from multimodal.values.parts.cuts import SegmentCut
from multimodal.values.schedule import Schedule, SlotMode
from multimodal.values.shape import StepShape
from multimodal.values.work.step_work import FORWARD, INPUT_GRADIENT, REDUCTION, WEIGHT_GRADIENT, StepWork, step_work


class Parts(NamedTuple):
    """Maps the forwards and backwards of an uncut step to the pieces of the step that is cut, into ranges or into gradients."""

    first: Integers
    """[pieces of the uncut step] its first piece in the cut step; -1: collectives."""
    counts: Integers
    """[pieces of the uncut step] the number of pieces it is cut into; these are numbered in the order in which they run."""

    @classmethod
    def of(cls, uncut: StepWork, work: StepWork) -> "Parts":
        """Build from the work of the uncut step and of the cut one."""
        first, counts = np.full(uncut.num_computed, -1), np.zeros(uncut.num_computed, np.int64)
        for name, old in uncut.pieces.units.items():
            new, has_backward = work.pieces.units[name], old.width > 0
            forward = old.forward[old.is_there]
            first[forward], counts[forward] = new.forward[old.is_there], new.num_forwards[old.is_there]
            first[old.backward[has_backward]] = new.backward[has_backward]
            counts[old.backward[has_backward]] = (new.num_backwards * new.width)[has_backward] // old.width[has_backward]
            is_split = old.width > 1
            first[old.backward[is_split] + 1], counts[old.backward[is_split] + 1] = new.backward[is_split] + 1, 1
        return cls(first, counts)

    def expand(self, pieces: Integers) -> Integers:
        """Return all pieces that the given pieces are cut into, in order."""
        counts = self.counts[pieces]
        return np.repeat(self.first[pieces] - row_starts(counts)[:-1], counts) + np.arange(int(counts.sum()))


def cut_finely(shape: StepShape, units: Collection[str], *, lanes: Collection[int]) -> StepShape:
    """Return the step with every forward and backward of these units in these lanes cut into single segments."""
    segments: dict[Place, SegmentCut] = {}
    for name in sorted(units):
        for replica, each in enumerate(shape.plan.units[name].replicas):
            for stage in each.virtual_stages if shape.plan.lanes_of_stage(name, replica, 0)[0] in lanes else ():
                key = name, replica, stage.index
                bounds = tuple(range(1, count_segments(shape.graph.unit(name), stage.layers)))
                cut = SegmentCut(len(bounds) + 1, bounds, bounds if shape.backward_need(*key).has_backward else ())
                if bounds:
                    segments |= {Place(*key, microbatch): cut for microbatch in range(shape.num_microbatches(name, replica))}
    return shape.with_cuts(replace(shape.cuts, segments=segments))


def count_fine_pieces(shape: StepShape, units: Collection[str]) -> dict[int, int]:
    """Return the number of pieces that `cut_finely` makes of these units' computations, by the first lane of their replicas."""
    counts: dict[int, int] = defaultdict(int)
    for name in units:
        for replica, each in enumerate(shape.plan.units[name].replicas):
            num_segments = sum(count_segments(shape.graph.unit(name), stage.layers) for stage in each.virtual_stages)
            counts[shape.plan.lanes_of_stage(name, replica, 0)[0]] += 2 * num_segments * shape.num_microbatches(name, replica)
    return counts


class PlacedParts(NamedTuple):
    """One lane's work in order, as columns."""

    pieces: Integers
    """Numbers of the pieces in the uncut step."""
    parts: Integers
    """The index of the part among those that the piece was cut into."""
    boundaries: Integers
    """The segment at which the part begins in a forward; for a backward's part, the segment at which it ends."""
    carriers: Integers
    """The piece of the uncut step inside which the part runs; -1: none."""
    waits: Integers
    """The index of that piece's wait."""


def join_parts(shape: StepShape, lanes: Sequence[PlacedParts]) -> Schedule:
    """Build the schedule of such lanes: parts of one piece that stand together, in line or in one wait, form one range.

    They must stand together in all of their lanes: ranks that run a piece together must have the same ranges.
    """
    work = step_work(shape)
    all_parts = PlacedParts(*map(np.concatenate, zip(*lanes, strict=True)))
    sizes = np.zeros(work.num_computed, np.int64)
    np.maximum.at(sizes, all_parts.pieces, all_parts.parts + 1)
    starts = row_starts(sizes)
    keys = starts[all_parts.pieces] + all_parts.parts
    begins = np.zeros(int(starts[-1]), bool)
    is_first = np.ones(len(keys), bool)  # of parts that do not continue the part before them
    columns = (all_parts.pieces, all_parts.carriers, all_parts.waits)
    is_first[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    ends = np.cumsum([len(lane.pieces) for lane in lanes])
    is_first[ends[ends < len(is_first)]] = True
    begins[keys[is_first]] = True
    kept = PlacedParts(*(column[begins[keys]] for column in all_parts))
    is_later = kept.parts > 0
    cuts = _segment_cuts(work, kept.pieces[is_later], kept.boundaries[is_later])
    cut = shape.with_cuts(replace(shape.cuts, segments=cuts)) if cuts else shape
    before = np.append(0, np.cumsum(begins))
    pieces = Parts.of(work, step_work(cut)).first[kept.pieces] + (before[keys] - before[starts[all_parts.pieces]])[begins[keys]]
    modes = np.where(kept.carriers == NO_CARRIER, SlotMode.IN_LINE, SlotMode.INSIDE).astype(np.uint8)
    lane_of_part = np.repeat(np.arange(len(lanes)), [len(lane.pieces) for lane in lanes])
    counts = np.bincount(lane_of_part[begins[keys]], minlength=len(lanes))
    return Schedule(cut, row_starts(counts), pieces, modes, kept.waits)


def _segment_cuts(work: StepWork, pieces: Integers, boundaries: Integers) -> dict[Place, SegmentCut]:
    """Return the cuts of places from the boundaries of their forwards and backwards, which may be repeated."""
    size = int(boundaries.max(initial=0)) + 1
    keys = np.sort(pieces * size + boundaries)
    keys = keys[np.diff(keys, prepend=-1) > 0]
    pieces, starts = np.unique(keys // size, return_index=True)
    halves = [tuple(row.tolist()) for row in np.split(keys % size, starts[1:])] if len(pieces) else []
    columns = work.computed_stages[pieces], work.microbatches[pieces], work.kinds[pieces] == FORWARD
    found: dict[Place, dict[bool, tuple[int, ...]]] = defaultdict(dict)
    for stage, microbatch, is_forward, at in zip(*(column.tolist() for column in columns), halves, strict=True):
        unit, replica, index = work.stages[stage]
        found[Place(unit, replica, index, microbatch)][is_forward] = at
    stages = {place[:3] for place in found}
    counts = {key: count_segments(work.graph.unit(key[0]), work.plan.virtual_stage(*key).layers) for key in stages}
    shared = cache(SegmentCut)
    return {place: shared(counts[place[:3]], each.get(True, ()), each.get(False, ())) for place, each in found.items()}


class Waits(NamedTuple):
    """Pairs of computations, [num_pairs] each: the first begins after the second has ended."""

    waiting: Integers
    awaited: Integers


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
    reductions = np.flatnonzero(work.kinds == REDUCTION)
    takes_time = costs.of_pieces(work, reductions).seconds > 0
    return frozenset(work.stages[stage][0] for stage in np.unique(work.computed_stages[reductions[takes_time]]).tolist())


def weights_before_forwards(schedule: Schedule, unit: str | None = None, *, num_more: int = 0) -> Waits:
    """Return forwards, each with a weight gradient that must end before it begins, so that no more microbatches are kept.

    A lane begins its forward k after the weight gradient of its (k - n)-th backward (ZB-H1's limit). n is `num_more` above what
    the lane has in flight in this order, in all its stages together. unit: count its stages alone, and let n be the largest of
    all lanes of a replica. schedule: a result of `split_in_line`.
    """
    work = schedule.work
    is_counted, group_of_stage = np.zeros(len(work.stages), bool), None
    is_counted[work.computed_stages[work.kinds == WEIGHT_GRADIENT]] = True
    if unit is not None:
        is_counted &= np.array([name == unit for name, _, _ in work.stages], bool)
        group_of_stage = work.pieces.replica_of_stage
    slots = np.flatnonzero(is_counted[work.computed_stages[schedule.pieces]])
    lanes, kinds = schedule.lane_of_slot[slots], work.kinds[schedule.pieces[slots]]
    is_forward, is_gradient = kinds == FORWARD, kinds == INPUT_GRADIENT
    forwards, gradients = schedule.pieces[slots[is_forward]], schedule.pieces[slots[is_gradient]]
    first_forwards, first_gradients = (
        row_starts(np.bincount(lanes[each], minlength=schedule.num_lanes)) for each in (is_forward, is_gradient)
    )
    lanes = lanes[is_forward]
    index = np.arange(len(forwards)) - first_forwards[lanes]  # of each forward in its lane
    num_over = np.cumsum(is_gradient)[is_forward] - first_gradients[lanes]  # before it
    groups = lanes if group_of_stage is None else group_of_stage[work.computed_stages[forwards]]
    most = np.zeros(int(groups.max(initial=-1)) + 1, np.int64)
    np.maximum.at(most, groups, index + 1 - num_over)
    at = index - (most[groups] + num_more)
    awaited = gradients[(first_gradients[lanes] + at)[at >= 0]] + 1
    return Waits(*np.divmod(np.unique(forwards[at >= 0] * work.num_computed + awaited), work.num_computed))


def weights_before_last(schedule: Schedule, units: Collection[str]) -> Waits:
    """Return the last weight gradient of each of these units' stages, paired with each other weight gradient of the stage.

    If the others have ended by then, and the last one keeps its place in line, the stage's gradients are reduced while other
    stages still compute. schedule: a result of `split_in_line`.
    """
    work = schedule.work
    position = np.zeros(work.num_computed, np.int64)
    position[schedule.pieces] = np.arange(len(schedule.pieces))
    is_unit = np.array([unit in units for unit, _, _ in work.stages], bool)
    weights = np.flatnonzero((work.kinds == WEIGHT_GRADIENT) & is_unit[work.computed_stages])
    weights = weights[np.lexsort((position[weights - 1], work.computed_stages[weights]))]
    is_last = np.diff(work.computed_stages[weights], append=-1) != 0
    last = weights[is_last][np.cumsum(is_last) - is_last]
    return Waits(last[~is_last], weights[~is_last])
