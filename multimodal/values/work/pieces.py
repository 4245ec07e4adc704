"""The pieces of a step's work as grids of numbers: stage by microbatch of every unit."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TypeVar

import numpy as np

from multimodal.values.action import Action, ActionKind, Coverage, Place
from multimodal.values.arrays.microbatches import MicrobatchCounts, MicrobatchPlace
from multimodal.values.arrays.rows import Bools, Bytes, Integers, row_starts
from multimodal.values.backward_need import BackwardNeed
from multimodal.values.parts.cuts import Cuts, StageKey, StageSplit
from multimodal.values.shape import StepShape

KINDS = tuple(ActionKind)
"""The kind of action for each kind number."""
KIND_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}
FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = (KIND_NUMBERS[ActionKind(letter)] for letter in "FBIW")
GATHER, REDUCTION = KIND_NUMBERS[ActionKind.GATHER_PARAMETERS], KIND_NUMBERS[ActionKind.REDUCE_GRADIENTS]
_WHOLE = -1
AnyPlace = TypeVar("AnyPlace", Place, MicrobatchPlace)


@dataclass(frozen=True, eq=False)
class UnitPieces:
    """The pieces of one unit; microbatches are numbered replica after replica, stages are virtual."""

    unit: str
    counted: MicrobatchCounts
    first_piece: int
    first_stage: int
    """The number of stage 0 of replica 0; the next number is that of stage 0 of replica 1."""
    has_backward: Bools
    """[num_stages, num_replicas]"""
    trains: Bools
    """[num_stages, num_replicas] True where gradients of weights are computed."""
    num_stages: Integers
    """[num_replicas] stages; the grids have as many rows as the replica with most of them."""
    num_subsets: Integers
    """[num_microbatches] sample subsets that backwards are cut into; 0: not cut."""
    is_split: Bools
    """[num_stages, num_microbatches] True where input and weight gradients are pieces of their own."""
    num_forwards: Integers
    """[num_stages, num_microbatches] ranges of segments that a forward runs in; 1: it runs as one."""
    num_backwards: Integers
    """The same for the backward."""
    is_cut: bool
    """True if any forward or backward runs in ranges of segments."""
    num_gathers: int
    num_reductions: Integers
    """[num_stages, num_replicas] pieces that the reduction of a stage is cut into."""
    is_by_layer: Bools
    """[num_stages, num_replicas] True where all pieces of the reduction but the last one start with the last backward."""

    @cached_property
    def is_there(self) -> Bools:
        """[num_stages, num_microbatches] True where the microbatch's replica has the stage."""
        return np.arange(len(self.has_backward))[:, None] <= self.last_stages

    @cached_property
    def last_stages(self) -> Integers:
        """[num_microbatches] the last stage that each microbatch passes through."""
        return self.num_stages[self.counted.replica_of_microbatch] - 1

    @cached_property
    def outputs(self) -> Integers:
        """[num_microbatches] the piece that completes the unit's output."""
        return self.last_forward[self.last_stages, np.arange(self.counted.num_microbatches)]

    @cached_property
    def width(self) -> Integers:
        """[num_stages, num_microbatches] pieces of the backward of one subset or range of segments."""
        replicas = self.counted.replica_of_microbatch
        return self.has_backward[:, replicas] * (1 + (self.is_split & self.trains[:, replicas]).astype(np.int64))

    @cached_property
    def _of_backwards(self) -> Integers:
        """[num_stages, num_microbatches] pieces of the whole backward."""
        return self.width * np.maximum(self.num_backwards, self.num_subsets)

    @cached_property
    def sizes(self) -> Integers:
        """[num_stages, num_replicas] pieces."""
        of_collectives = self.trains * (self.num_gathers + self.num_reductions)
        return self._forwards_of_replica + self._of_replica(self._of_backwards) + of_collectives

    @cached_property
    def _forwards_of_replica(self) -> Integers:
        """[num_stages, num_replicas] pieces of forwards."""
        if self.is_cut:
            return self._of_replica(self.num_forwards * self.is_there)
        return self.counted.counts * (np.arange(len(self.has_backward))[:, None] < self.num_stages)

    def _of_replica(self, sizes: Integers) -> Integers:
        """Add up [num_stages, num_microbatches] pieces: [num_stages, num_replicas]."""
        before = np.zeros((len(sizes), self.counted.num_microbatches + 1), np.int64)
        np.cumsum(sizes, axis=1, out=before[:, 1:])
        starts = self.counted.microbatch_starts
        return before[:, starts[1:]] - before[:, starts[:-1]]

    def _before(self, sizes: Integers) -> Integers:
        """[num_stages, num_microbatches] pieces of the microbatches before each one in its replica."""
        before = np.cumsum(sizes, axis=1) - sizes
        return before - before[:, self.counted.microbatch_starts[self.counted.replica_of_microbatch]]

    @cached_property
    def _first(self) -> Integers:
        """[num_stages, num_replicas] the first piece of each stage."""
        return self.first_piece + row_starts(self.sizes.ravel())[:-1].reshape(self.sizes.shape)

    @cached_property
    def forward(self) -> Integers:
        """[num_stages, num_microbatches] the number of a forward's first piece; the others follow it."""
        before = self._before(self.num_forwards) if self.is_cut else self.counted.index_in_replica
        return self._first[:, self.counted.replica_of_microbatch] + before

    @cached_property
    def last_forward(self) -> Integers:
        """[num_stages, num_microbatches] the number of a forward's last piece."""
        return self.forward + self.num_forwards - 1 if self.is_cut else self.forward

    @cached_property
    def backward(self) -> Integers:
        """[num_stages, num_microbatches] the number of the first piece of a backward, where there is one."""
        first = (self._first + self._forwards_of_replica)[:, self.counted.replica_of_microbatch]
        return first + self._before(self._of_backwards)

    @cached_property
    def input_gradient(self) -> Integers:
        """[num_stages, num_microbatches] the piece of a backward that yields the input gradient; of subsets, the first one's."""
        return self.backward + self.num_backwards - 1 if self.is_cut else self.backward

    @cached_property
    def collective(self) -> Integers:
        """[num_stages, num_replicas] the number of the first collective, where there is one."""
        return self._first + self.sizes - self.trains * (self.num_gathers + self.num_reductions)

    @property
    def num_pieces(self) -> int:
        """Number of pieces."""
        return int(self.sizes.sum())

    @cached_property
    def gradients(self) -> "Gradients":
        """Every backward or input gradient, stage by stage, microbatch by microbatch, then subset by subset or range by range."""
        stages, microbatches = np.nonzero(self.width)
        parts: Integers = np.full(len(stages), _WHOLE)
        widths, pieces = self.width[stages, microbatches], self.backward[stages, microbatches]
        num_ranges = self.num_backwards[stages, microbatches]
        if self.num_subsets.any() or self.is_cut:
            counts = np.maximum(num_ranges, self.num_subsets[microbatches])
            is_cut = (num_ranges > 1) | (self.num_subsets[microbatches] > 0)
            index = np.arange(int(counts.sum())) - np.repeat(row_starts(counts)[:-1], counts)
            stages, microbatches, widths, pieces, num_ranges = (
                np.repeat(each, counts) for each in (stages, microbatches, widths, pieces, num_ranges)
            )
            parts, pieces = np.where(np.repeat(is_cut, counts), index, _WHOLE), pieces + index * widths
        return Gradients(stages, microbatches, parts, pieces, pieces + (widths > 1), num_ranges)


@dataclass(frozen=True, eq=False)
class Gradients:
    """Backwards or input gradients of a unit."""

    stages: Integers
    microbatches: Integers
    parts: Integers
    """Sample subsets, or ranges of segments in the order in which they run; -1: the whole microbatch."""
    pieces: Integers
    last_pieces: Integers
    """The pieces that complete weight gradients: the weight gradient where there is one, else the gradient itself."""
    num_ranges: Integers
    """Number of ranges of segments that the whole backward runs in; 1 where it is not cut into ranges."""

    @property
    def is_first(self) -> Bools:
        """False for ranges of segments that run after another range of the same backward, True for all others."""
        return (self.num_ranges == 1) | (self.parts == 0)

    @property
    def is_last(self) -> Bools:
        """False for ranges of segments that run before another range of the same backward, True for all others."""
        return (self.num_ranges == 1) | (self.parts == self.num_ranges - 1)

    def where(self, chosen: Bools) -> "Gradients":
        """Return some of them."""
        return Gradients(*(getattr(self, column.name)[chosen] for column in fields(self)))


class Pieces:
    """The numbered pieces of a shape: columns of all, and the grids of each unit."""

    def __init__(self, shape: StepShape) -> None:
        self.cuts, self.plan = shape.cuts, shape.plan
        self._reductions = shape.reductions
        self.units: dict[str, UnitPieces] = {}
        first_piece, first_stage = 0, 0
        for unit in shape.graph.unit_names:
            self.units[unit] = _unit_pieces(shape, unit, first_piece, first_stage)
            first_piece += self.units[unit].num_pieces
            first_stage += self.units[unit].has_backward.size
        grids = self.units.values()
        self.num_pieces, self.num_stages = first_piece, first_stage
        sizes = [unit.sizes.ravel() for unit in grids]
        self.stages: Integers = np.repeat(np.arange(first_stage), np.concatenate(sizes))
        """[num_pieces]"""
        self.replica_of_stage: Integers = np.concatenate([np.tile(np.arange(u.sizes.shape[1]), len(u.sizes)) for u in grids])
        self.index_of_stage: Integers = np.concatenate([np.repeat(np.arange(len(u.sizes)), u.sizes.shape[1]) for u in grids])
        """[num_stages] virtual stage."""
        self.kinds: Bytes = np.full(first_piece, WEIGHT_GRADIENT, np.uint8)
        self.microbatches: Integers = np.full(first_piece, -1)
        self.parts: Integers = np.full(first_piece, _WHOLE)
        """[num_pieces] sample subsets of backwards, ranges of segments in the order in which they run, parts of reductions."""
        for each in grids:
            self._fill(each)

    def _fill(self, unit: UnitPieces) -> None:
        index = unit.counted.index_in_replica
        forward = unit.forward[unit.is_there]
        self.kinds[forward] = FORWARD
        self.microbatches[forward] = np.broadcast_to(index, unit.forward.shape)[unit.is_there]
        for stage, microbatch in np.argwhere((unit.num_forwards > 1) & unit.is_there).tolist() if unit.is_cut else ():
            ranges = slice(int(unit.forward[stage, microbatch]), int(unit.last_forward[stage, microbatch]) + 1)
            self.kinds[ranges] = FORWARD
            self.microbatches[ranges] = index[microbatch]
            self.parts[ranges] = np.arange(ranges.stop - ranges.start)
        found = unit.gradients
        self.kinds[found.pieces] = np.where(unit.is_split[found.stages, found.microbatches], INPUT_GRADIENT, BACKWARD)
        for pieces in (found.pieces, found.last_pieces):
            self.microbatches[pieces] = index[found.microbatches]
            self.parts[pieces] = found.parts
        for stage in np.flatnonzero(unit.trains.any(axis=1)).tolist():
            first, counts = (grid[stage][unit.trains[stage]] for grid in (unit.collective, unit.num_reductions))
            self.kinds[first] = GATHER
            for part in range(int(counts.max())):
                pieces = first[counts > part] + unit.num_gathers + part
                self.kinds[pieces] = REDUCTION
                self.parts[pieces] = part

    @cached_property
    def is_range(self) -> Bools:
        """[num_pieces] True for ranges of segments."""
        found: Bools = (self.kinds == FORWARD) & (self.parts >= 0)
        for unit in self.units.values():
            found[unit.gradients.pieces[unit.gradients.num_ranges > 1]] = True
        return found

    @cached_property
    def segment_bounds(self) -> tuple[Integers, Integers]:
        """[num_pieces] the first segment of each range of segments, and the one behind its last; -1 for other pieces."""
        bounds = np.full((2, self.num_pieces), -1)
        for (name, replica, stage, microbatch), cut in self.cuts.segments.items():
            unit = self.units[name]
            column = stage, int(unit.counted.microbatch_starts[replica]) + microbatch
            for first, boundaries, step in ((unit.forward, cut.forward, 1), (unit.backward, cut.backward, -1)):
                if boundaries and (step > 0 or unit.width[column]):
                    edges = [0, *boundaries, cut.num_segments]
                    pieces = slice(int(first[column]), int(first[column]) + len(boundaries) + 1)
                    bounds[:, pieces] = np.array((edges[:-1], edges[1:]))[:, ::step]
        return bounds[0], bounds[1]

    @cached_property
    def numbers_in_unit(self) -> Integers:
        """[num_pieces] the number of each piece's microbatch within its unit; meaningless for collectives."""
        before = [np.tile(unit.counted.microbatch_starts[:-1], len(unit.sizes)) for unit in self.units.values()]
        return np.concatenate(before)[self.stages] + self.microbatches

    def of_microbatches(self, values: Mapping[str, Integers]) -> Integers:
        """[num_pieces] the value of each piece's microbatch; values: unit -> [num_microbatches]; meaningless for collectives."""
        first = row_starts([len(values[unit]) for unit in self.units])[:-1]
        numbers = np.where(self.microbatches < 0, 0, self.numbers_in_unit + first[self.unit_of_stage[self.stages]])
        return np.concatenate([*map(values.__getitem__, self.units), np.zeros(1, np.int64)])[numbers]

    def find(self, unit: str, *, kinds: Integers, replicas: Integers, stages: Integers, microbatches: Integers) -> Integers:
        """Return the pieces of whole microbatches, in the given order; -1 where there is none."""
        grid = self.units[unit]
        numbers = microbatches + grid.counted.microbatch_starts[replicas]
        place = np.ravel_multi_index((stages, numbers), grid.width.shape)
        columns = grid.forward, grid.backward, grid.width, grid.is_split, grid.num_forwards, grid.num_backwards
        forward, backward, width, is_split, num_forwards, num_backwards = (column.take(place) for column in columns)
        is_forward, is_weight = kinds == FORWARD, kinds == WEIGHT_GRADIENT
        is_half = np.where(is_weight, width > 1, is_split == (kinds == INPUT_GRADIENT))
        is_whole = (grid.num_subsets[numbers] == 0) & (num_backwards == 1)
        is_there = np.where(is_forward, num_forwards == 1, (width > 0) & is_whole & is_half)
        pieces = np.where(is_forward, forward, backward + is_weight)
        return np.where(is_there, pieces, -1)

    @cached_property
    def stage_keys(self) -> tuple[StageKey, ...]:
        """The stage of each stage number."""
        return tuple(
            (unit, replica, stage)
            for unit, pieces in self.units.items()
            for stage in range(pieces.sizes.shape[0])
            for replica in range(pieces.sizes.shape[1])
        )

    @cached_property
    def unit_of_stage(self) -> Integers:
        """[num_stages] the unit, by its place in the graph."""
        return np.repeat(np.arange(len(self.units)), [unit.sizes.size for unit in self.units.values()])

    def action(self, piece: int) -> Action:
        """Return one piece."""
        kind, stage, microbatch, part = (
            int(column[piece]) for column in (self.kinds, self.stages, self.microbatches, self.parts)
        )
        return Action(KINDS[kind], *self.stage_keys[stage], microbatch, None, self._coverage(kind, stage, microbatch, part))

    def actions(self) -> tuple[Action, ...]:
        """Return all pieces. O(pieces)."""
        new, keys = tuple.__new__, self.stage_keys
        columns = (each.tolist() for each in (self.kinds, self.stages, self.microbatches, self.parts))
        return tuple(
            new(Action, (KINDS[kind], *keys[stage], index, None, None if part < 0 else self._coverage(kind, stage, index, part)))
            for kind, stage, index, part in zip(*columns, strict=True)
        )

    def _coverage(self, kind: int, stage: int, microbatch: int, part: int) -> Coverage:
        if part < 0:
            return None
        if kind == REDUCTION:
            return self._reductions(*self.stage_keys[stage])[part]
        place = Place(*self.stage_keys[stage], microbatch)
        return (self.cuts.forwards(place) if kind == FORWARD else self.cuts.backwards(place))[part]


def _unit_pieces(shape: StepShape, unit: str, first_piece: int, first_stage: int) -> UnitPieces:
    counted, cuts, plan = shape.counts[unit], shape.cuts, shape.plan.units[unit]
    needs = [_needs_of_stage(shape, unit, stage) for stage in range(plan.num_virtual_stages)]
    grid = len(needs), plan.data_parallel_size
    num_reductions = np.array([_num_reductions(shape, unit, stage) for stage in range(len(needs))], np.int64).reshape(grid)
    is_by_layer = np.array([(unit, stage) in cuts.reduced_by_layer for stage in range(len(needs))], bool)
    num_subsets = np.zeros(counted.num_microbatches, np.int64)
    for microbatch, number in _numbered_places(cuts.num_subsets, unit, counted):
        num_subsets[number] = cuts.num_subsets[microbatch]
    num_ranges = np.ones((2, len(needs), counted.num_microbatches), np.int64)
    for place, number in _numbered_places(cuts.segments, unit, counted):
        if place.stage < len(needs):
            cut = cuts.segments[place]
            num_ranges[:, place.stage, number] = len(cut.forward) + 1, len(cut.backward) + 1
    return UnitPieces(
        unit=unit,
        counted=counted,
        first_piece=first_piece,
        first_stage=first_stage,
        has_backward=np.array([[need.has_backward for need in row] for row in needs], bool).reshape(grid),
        trains=np.array([[need.trains_weights for need in row] for row in needs], bool).reshape(grid),
        num_subsets=num_subsets,
        is_split=_splits(cuts, unit, counted, len(needs)),
        num_gathers=int(cuts.gathers_parameters),
        num_stages=np.array(list(map(plan.num_stages_of, range(grid[1]))), np.int64),
        num_reductions=num_reductions,
        is_by_layer=is_by_layer[:, None] & (num_reductions > 1),
        num_forwards=num_ranges[0],
        num_backwards=num_ranges[1],
        is_cut=bool((num_ranges > 1).any()),
    )


def _needs_of_stage(shape: StepShape, unit: str, stage: int) -> list[BackwardNeed]:
    """Return the gradients that the backward of a stage computes in each replica; replicas with the same layers are alike."""
    replicas, known = shape.plan.units[unit].replicas, dict[range | None, BackwardNeed]({None: BackwardNeed.NONE})
    layers = [each.virtual_stages[stage].layers if stage < len(each.virtual_stages) else None for each in replicas]
    for replica, each in enumerate(layers):
        if each not in known:
            known[each] = shape.backward_need(unit, replica, stage)
    return [known[each] for each in layers]


def _num_reductions(shape: StepShape, unit: str, stage: int) -> list[int]:
    """Return how many pieces the reduction of a stage is cut into in each replica."""
    plan = shape.plan.units[unit]
    if not plan.is_unlike:
        return [len(shape.reductions(unit, 0, stage))] * plan.data_parallel_size
    return [
        len(shape.reductions(unit, replica, stage)) if stage < plan.num_stages_of(replica) else 0
        for replica in range(plan.data_parallel_size)
    ]


def _numbered_places(places: Iterable[AnyPlace], unit: str, counted: MicrobatchCounts) -> Iterator[tuple[AnyPlace, int]]:
    """Yield the places in a unit that exist, with the numbers of their microbatches."""
    for place in places:
        if place.unit == unit and place.replica < counted.num_replicas and place.microbatch < counted.counts[place.replica]:
            yield place, int(counted.microbatch_starts[place.replica]) + place.microbatch


def _splits(cuts: Cuts, unit: str, counted: MicrobatchCounts, num_stages: int) -> Bools:
    if isinstance(cuts.split, StageSplit):
        stages = np.zeros((num_stages, counted.num_replicas), bool)
        for name, replica, stage in cuts.split.counts:
            if name == unit:
                stages[stage, replica] = True
        return stages[:, counted.replica_of_microbatch]
    found = np.zeros((num_stages, counted.num_microbatches), bool)
    for place, number in _numbered_places(cuts.split, unit, counted):
        found[place.stage, number] = True
    return found
