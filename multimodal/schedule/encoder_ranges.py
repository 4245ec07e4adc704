"""Encoder work in ranges of segments: cut finely to be placed piece by piece, then joined where pieces stay together."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np

from multimodal.cost.layers.registry import count_segments
from multimodal.schedule.inside_slots import NO_CARRIER
from multimodal.values.action import ActionKind, Place
from multimodal.values.arrays.rows import Bools, Integers, row_starts
from multimodal.values.parts.cuts import SegmentCut
from multimodal.values.schedule import Schedule, SlotMode
from multimodal.values.shape import StepShape
from multimodal.values.work.step_work import KIND_NUMBERS, StepWork, step_work

_FORWARD = KIND_NUMBERS[ActionKind.FORWARD]


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
            for stage in each.virtual_stages if shape.lanes_of(name, replica, 0)[0] in lanes else ():
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
            counts[shape.lanes_of(name, replica, 0)[0]] += 2 * num_segments * shape.num_microbatches(name, replica)
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
    begins[keys[_is_first(all_parts, np.cumsum(list(map(len, (lane.pieces for lane in lanes)))))]] = True
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


def _is_first(parts: PlacedParts, ends: Integers) -> Bools:
    """Return which parts do not continue the part before them; ends: the ends of lanes."""
    is_first = np.ones(len(parts.pieces), bool)
    is_first[1:] = parts.pieces[1:] != parts.pieces[:-1]
    for column in (parts.carriers, parts.waits):
        is_first[1:] |= column[1:] != column[:-1]
    is_first[ends[ends < len(is_first)]] = True
    return is_first


def _segment_cuts(work: StepWork, pieces: Integers, boundaries: Integers) -> dict[Place, SegmentCut]:
    """Return the cuts of places from the boundaries of their forwards and backwards, which may be repeated."""
    size = int(boundaries.max(initial=0)) + 1
    keys = np.sort(pieces * size + boundaries)
    keys = keys[np.diff(keys, prepend=-1) > 0]
    pieces, starts = np.unique(keys // size, return_index=True)
    halves = [tuple(row.tolist()) for row in np.split(keys % size, starts[1:])] if len(pieces) else []
    columns = work.computed_stages[pieces], work.microbatches[pieces], work.kinds[pieces] == _FORWARD
    found: dict[Place, dict[bool, tuple[int, ...]]] = defaultdict(dict)
    for stage, microbatch, is_forward, at in zip(*(column.tolist() for column in columns), halves, strict=True):
        unit, replica, index = work.stages[stage]
        found[Place(unit, replica, index, microbatch)][is_forward] = at
    stages = {place[:3] for place in found}
    counts = {key: count_segments(work.graph.unit(key[0]), work.plan.virtual_stage(*key).layers) for key in stages}
    shared = cache(SegmentCut)
    return {place: shared(counts[place[:3]], each.get(True, ()), each.get(False, ())) for place, each in found.items()}
