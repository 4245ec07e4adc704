"""Fills the waiting time of a pipeline's lanes, by durations, with work that may leave its order (Optimus, Algorithm 2)."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import starmap
from typing import NamedTuple

import numpy as np

from multimodal.cost.step_costs import StepCosts
from multimodal.schedule.compile_schedule import component_of_lane, connected_lanes
from multimodal.schedule.encoder_ranges import (
    Parts,
    PlacedParts,
    Waits,
    count_fine_pieces,
    cut_finely,
    join_parts,
    weights_before_forwards,
    weights_before_last,
)
from multimodal.schedule.fill_idle_lanes import FilledLanes, LanesToFill
from multimodal.schedule.inside_slots import MOST_COLLECTIVES, NO_CARRIER, PieceCollectives
from multimodal.schedule.list_schedule import place_reductions
from multimodal.values.arrays.rows import Bools, Integers, group_rows, row_numbers, row_starts, take_rows
from multimodal.values.schedule import Schedule
from multimodal.values.shape import StepShape
from multimodal.values.work.step_work import BACKWARD, FORWARD, REDUCTION, WEIGHT_GRADIENT, step_work

TOLERANCES = (0, 20, 40, 60, 80, 100)
"""Percentages of an encoder's computation that may exceed a bubble; the one with the shortest step is taken."""
FINE_TOLERANCES = (0, 25, 50, 75)
"""The same for single segments, also inside waits; there, the excess prolongs the LLM's computation."""
MOST_WORK = 300_000_000
"""Largest product of pieces and queues of a pipeline that is filled: some tenths of a second. Large pipelines try fewer
tolerances; beyond this limit, where routes connect many pipelines, encoders run as in 1F1B."""
MOST_SEGMENTS = 60_000
"""Most segments of encoders that are placed one by one, over as many pipelines as possible; alike pipelines count once."""
_NANOSECONDS = 1e9


class Movable(NamedTuple):
    """The work of a schedule that leaves its order in line to fill the time in which lanes would wait."""

    fills: Bools
    """[num_computed] True for computations that fill; all others keep their order."""
    waits: Waits
    """Pairs of computations, the first of which begins after the second has ended, in addition to the step's needs."""
    limits: Integers | None = None
    """[num_stages] the most microbatches that movable work may have in flight in a stage; -1 or None: any number."""
    goes_inside: bool = False
    """True if encoders may be cut into segments that run inside the LLM's computations."""

    @classmethod
    def of(
        cls,
        in_line: Schedule,
        *,
        units: Collection[str] = (),
        reduced: Collection[str] = (),
        llm: str | None = None,
        num_more: int = 0,
        limits: Integers | None = None,
        goes_inside: bool = False,
    ) -> "Movable":
        """Return all weight gradients, and these units' computations, as movable work.

        reduced: units whose last weight gradients keep their places (`weights_before_last`); llm, num_more: the unit and the
        number of `weights_before_forwards`.
        """
        work, last = in_line.work, weights_before_last(in_line, reduced)
        is_unit = np.array([unit in units for unit, _, _ in work.stages], bool)
        fills: Bools = is_unit[work.computed_stages] | (work.kinds == WEIGHT_GRADIENT)
        fills[last.waiting] = False
        pairs = zip(weights_before_forwards(in_line, llm, num_more=num_more), last, strict=True)
        return cls(fills, Waits(*map(np.concatenate, pairs)), limits, goes_inside)


class Filled(NamedTuple):
    """A pipeline, filled in one way."""

    end: int
    place: Callable[[], list[PlacedParts]]
    """Returns the work of its lanes."""


@dataclass(frozen=True)
class FilledPipelines:
    """All pipelines of a step, filled. The schedule is made when it is asked for."""

    whole: "_Filling"
    groups: Sequence[tuple[Sequence[Integers], Filled | None]]
    """The lanes of pipelines that are alike, and how the first of them is filled; None: it runs in the order of 1F1B."""

    @property
    def end(self) -> float:
        """The end of the last pipeline; infinite if any pipeline runs in the order of 1F1B."""
        return max((math.inf if filled is None else filled.end for _, filled in self.groups), default=0.0)

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule, with reductions."""
        lanes = [PlacedParts(*[np.zeros(0, np.int64)] * 5)] * self.whole.in_line.num_lanes
        for group, filled in self.groups:
            placed = self.whole.in_order(group[0]) if filled is None else filled.place()
            for pipeline in group:
                for lane, parts in zip(pipeline.tolist(), self.whole.moved(placed, group[0], pipeline), strict=True):
                    lanes[lane] = parts
        return place_reductions(join_parts(self.whole.cut, lanes))


def fill_pipelines(in_line: Schedule, costs: StepCosts, movable: Movable) -> FilledPipelines:
    """Fill every pipeline of a step with what is movable, by the durations of `costs`.

    in_line: of a step in the compute dialect without collectives, cut only into input and weight gradients.
    """
    whole = _Filling(in_line, in_line.shape, costs, movable)
    alike = whole.alike_pipelines()
    longest_first = [group[0] for group in sorted(alike, key=len, reverse=True)]
    fine = _fill_finely(whole, longest_first, costs, movable) if movable.goes_inside else None
    groups = []
    for group in alike:
        ways = [whole, fine] if fine is not None and fine.has_cut(group[0]) else [whole]
        found = [filled for way in ways if (filled := way.fill(group[0])) is not None]
        groups.append((group, min(found, key=lambda filled: filled.end, default=None)))
    return FilledPipelines(whole, groups)


def _fill_finely(whole: "_Filling", pipelines: Sequence[Integers], costs: StepCosts, movable: Movable) -> "_Filling | None":
    """Cut the encoders of as many pipelines as allowed; None if nothing can run inside the LLM's computations.

    That is so if the computations do not report their waits, or if replicas share weights, which they must gather in one order.
    """
    shape = whole.cut
    # Ranges of segments may run inside other computations if no ranks share tokens.
    whole_tokens = (unit.name for unit in shape.graph.encoders if shape.plan.units[unit.name].context_parallel_size == 1)
    work = step_work(shape)
    split = {work.stages[stage][0] for stage in np.unique(work.computed_stages[work.kinds == WEIGHT_GRADIENT]).tolist()}
    units = frozenset(whole_tokens) - split
    options = costs.options or MOST_COLLECTIVES
    if not units or shape.cuts.segments or options.hides_waits or options.zero_stage >= 3:
        return None
    lanes, num_segments, counts = set[int](), 0, count_fine_pieces(shape, units)
    for pipeline in pipelines:
        count = sum(counts.get(lane, 0) for lane in pipeline.tolist())
        if num_segments + count <= MOST_SEGMENTS:
            lanes, num_segments = lanes | set(pipeline.tolist()), num_segments + count
    cut = cut_finely(shape, units, lanes=lanes)
    fine = _Filling(whole.in_line, cut, costs, movable, inside=units, lanes=lanes) if lanes else None
    return fine if fine is not None and len(fine.waits) else None


class _Filling:
    """One way to fill the pipelines of a step: with whole encoders, or with encoders cut into ranges of segments."""

    def __init__(
        self,
        in_line: Schedule,
        cut: StepShape,
        costs: StepCosts,
        movable: Movable,
        *,
        inside: frozenset[str] = frozenset(),
        lanes: Collection[int] | None = None,
    ) -> None:
        """Take all values from the costs.

        in_line: of the uncut step; inside: encoders that may run inside the LLM's work; lanes: of pipelines filled; None: all.
        """
        self.in_line, self.cut = in_line, cut
        self.work, uncut = step_work(cut), in_line.work
        self.limits = np.full(len(self.work.stages), -1) if movable.limits is None else movable.limits
        self.parts = Parts.of(uncut, self.work)
        self.piece_of_part = np.zeros(self.work.num_computed, np.int64)
        """[num_computed] the piece of the uncut step that each piece is part of."""
        whole = np.flatnonzero(self.parts.first >= 0)
        self.piece_of_part[self.parts.expand(whole)] = np.repeat(whole, self.parts.counts[whole])
        self.tolerances = FINE_TOLERANCES if inside else TOLERANCES
        self.goes_inside, self.behind = np.zeros(self.work.num_computed, np.uint8), np.zeros(self.work.num_computed, np.int64)
        self.fills, waits = movable.fills, movable.waits
        self.delayed, self.awaited = self.parts.first[waits.waiting], self.parts.first[waits.awaited]
        self._known: dict[int, LanesToFill] = {}
        """First lane -> what to fill, for the first pipeline of each group that `alike_pipelines` found."""
        # Durations of computations, delays of messages and waits of work that keeps its order, in nanoseconds.
        work = self.work
        is_asked = work.kinds != REDUCTION
        if lanes is not None:
            is_asked &= np.isin(work.first_lanes, list(lanes))[work.computed_stages]
        computed, messages = np.flatnonzero(is_asked), np.flatnonzero(is_asked[work.message_ends[1]])
        found = costs.of_pieces(work, np.concatenate((computed, work.num_computed + 2 * messages)))
        nanoseconds = np.round((found.seconds + found.latency_seconds) * _NANOSECONDS).astype(np.int64)
        self.durations, self.waiting = np.zeros((2, work.num_computed), np.int64)
        self.durations[computed] = nanoseconds[: len(computed)]
        self.waiting[computed] = np.floor(found.tensor_parallel_seconds[: len(computed)] * _NANOSECONDS)
        delays = np.zeros(work.num_messages + 1, np.int64)
        delays[messages] = nanoseconds[len(computed) :]
        self.delays = delays[work.message_of_need]
        """[num_needs] 0 where nothing is sent."""
        keeping = computed[~self.fills[self.piece_of_part[computed]]] if inside else computed[:0]
        starts, seconds = costs.waits(work, keeping)
        counts = np.zeros(work.num_computed, np.int64)
        counts[keeping] = np.diff(starts)
        self.wait_starts, self.waits = row_starts(counts), np.floor(seconds * _NANOSECONDS).astype(np.int64)
        units = np.array([unit in inside for unit, _, _ in work.stages], bool)
        filling = computed[units[work.computed_stages[computed]]]
        collectives = PieceCollectives.of(work, filling, options=costs.options or MOST_COLLECTIVES)
        self.goes_inside[filling] = collectives.fits_inside * (1 + collectives.ends_with_one.astype(np.uint8))
        self.behind[filling] = self.waiting[filling] * collectives.ends_with_one

    def has_cut(self, pipeline: Integers) -> bool:
        """Return True if a pipeline's encoders are cut."""
        return bool((self.parts.counts[self.piece_of_part[self.pieces[int(pipeline[0])]]] > 1).any())

    def alike_pipelines(self) -> list[list[Integers]]:
        """Return the lanes of all pipelines of a whole step, grouped: pipelines of a group are alike."""
        found: dict[bytes, list[Integers]] = {}
        pipelines = connected_lanes(self.cut)
        for pipeline in pipelines:
            pieces = self.pieces[int(pipeline[0])]
            to_fill = self._lanes_to_fill(pieces, pipeline)
            compared = (*vars(to_fill).values(), self.waiting[pieces]) if len(pipelines) > 1 else ()
            group = found.setdefault(b"".join(array.tobytes() for array in compared), [])
            if not group:
                self._known[int(pipeline[0])] = to_fill
            group.append(pipeline)
        return list(found.values())

    def moved(self, placed: "Sequence[PlacedParts]", source: Integers, target: Integers) -> "Sequence[PlacedParts]":
        """Return the work of one pipeline's lanes as that of another pipeline, which is alike."""
        if source is target:
            return placed
        counterpart = np.full(self.work.num_computed + 1, NO_CARRIER)
        counterpart[self.pieces[int(source[0])]] = self.pieces[int(target[0])]
        # -1 (no carrier) reads the last entry.
        return [lane._replace(pieces=counterpart[lane.pieces], carriers=counterpart[lane.carriers]) for lane in placed]

    def in_order(self, pipeline: Integers) -> list[PlacedParts]:
        """Return the work of a pipeline's lanes in the order of 1F1B."""
        rows = (self.in_line.lane_pieces(lane) for lane in pipeline.tolist())
        kept = (row[self.parts.first[row] >= 0] for row in rows)
        return [PlacedParts(row, np.zeros_like(row), *[np.full(len(row), -1)] * 3) for row in kept]

    def fill(self, pipeline: Integers) -> Filled | None:
        """Fill a pipeline; None if it is too large."""
        pieces = self.pieces[int(pipeline[0])]
        to_fill = self._known.get(int(pipeline[0])) or self._lanes_to_fill(pieces, pipeline)
        size = len(pieces) * (len(to_fill.queue_starts) - 1)
        if size > MOST_WORK:
            return None
        tolerances = self.tolerances[: max(1, MOST_WORK // size) if size else 1]
        lanes = to_fill.fill(tolerances=tolerances)
        return Filled(lanes.end, partial(self._place, len(pipeline), pieces, to_fill, lanes))

    def _place(self, num_lanes: int, pieces: Integers, to_fill: LanesToFill, lanes: FilledLanes) -> list[PlacedParts]:
        starts, of_piece = take_rows(to_fill.lane_starts, to_fill.lanes, lanes.order)
        ordered = np.repeat(lanes.order, np.diff(starts))
        whole = self.piece_of_part[pieces]
        carriers = np.where(lanes.carriers < 0, -1, whole[lanes.carriers])
        first, end = (bounds[pieces] for bounds in self.work.pieces.segment_bounds)
        boundaries = np.where(self.work.kinds[pieces] == FORWARD, first, end)
        columns = PlacedParts(whole, pieces - self.parts.first[whole], boundaries, carriers, lanes.waits)
        lane_starts, slots = group_rows(of_piece, ordered, num_lanes)
        rows = zip(*(np.split(column[slots], lane_starts[1:-1]) for column in columns), strict=True)
        return list(starmap(PlacedParts, rows))

    @cached_property
    def pieces(self) -> Mapping[int, Integers]:
        """The first lane of each pipeline -> the computations of its lanes, ascending."""
        pipelines = connected_lanes(self.cut)
        pieces = np.flatnonzero(self.work.kinds != REDUCTION)
        owners = component_of_lane(self.cut)[self.work.first_lanes][self.work.computed_stages[pieces]]
        ends = np.cumsum(np.bincount(owners, minlength=len(pipelines)))
        rows = np.split(pieces[np.argsort(owners, kind="stable")], ends[:-1])
        return {int(pipeline[0]): row for pipeline, row in zip(pipelines, rows, strict=True)}

    def _lanes_to_fill(self, pieces: Integers, pipeline: Integers) -> LanesToFill:
        """Return a pipeline's part of a step with its own numbers of pieces and lanes: encoders fill, all else keeps its order.

        Forwards and backwards of one encoder stage keep the order in which they are needed.
        """
        work, uncut = self.work, self.in_line.work
        local_piece, local_lane = np.full(work.num_computed, -1), np.full(self.in_line.num_lanes, -1)
        local_piece[pieces], local_lane[pipeline] = np.arange(len(pieces)), np.arange(len(pipeline))
        lane_starts, lanes = work.lanes_of(pieces)
        rows = [self.in_line.lane_pieces(lane) for lane in pipeline.tolist()]
        rows = [row[self.parts.first[row] >= 0] for row in rows]
        line = [self.parts.first[row[~self.fills[row]]] for row in rows]
        filling = np.concatenate([row[self.fills[row]] for row in rows])
        if not uncut.is_in_one_lane:
            filling = filling[np.sort(np.unique(filling, return_index=True)[1])]
        filling = filling[np.argsort(uncut.blocks[filling], kind="stable")]
        is_first = np.diff(uncut.blocks[filling], prepend=-1) > 0
        sizes = np.bincount(np.cumsum(is_first) - 1, self.parts.counts[filling]).astype(np.int64)
        need_starts, needs, delays = self._needs(pieces, local_piece)
        wait_starts, waits = take_rows(self.wait_starts, self.waits, pieces)
        holders, releases, limits = self._holders(pieces)
        return LanesToFill(
            durations=self.durations[pieces],
            lane_starts=lane_starts,
            lanes=local_lane[lanes],
            need_starts=need_starts,
            needs=needs,
            delays=delays,
            line_starts=row_starts(list(map(len, line))),
            line=local_piece[np.concatenate(line)],
            queue_starts=row_starts(sizes),
            queues=local_piece[self.parts.expand(filling)],
            holders=holders,
            releases=releases,
            limits=limits,
            wait_starts=wait_starts,
            waits=waits,
            goes_inside=self.goes_inside[pieces],
            behind=self.behind[pieces],
        )

    def _needs(self, pieces: Integers, local_piece: Integers) -> tuple[Integers, Integers, Integers]:
        """Return the needs of a pipeline's pieces in its own numbers, with delays: the step's, and those of `Movable.waits`."""
        starts, needs = take_rows(self.work.need_starts, np.arange(len(self.work.needs)), pieces)
        owners, awaited = local_piece[self.delayed], local_piece[self.awaited]
        is_here = owners >= 0
        owners = np.append(row_numbers(starts), owners[is_here])
        needed, delays = np.append(local_piece[self.work.needs[needs]], awaited[is_here]), np.zeros(len(owners), np.int64)
        delays[: len(needs)] = self.delays[needs]
        starts, order = group_rows(owners, np.arange(len(owners)), len(pieces))
        return starts, needed[order], delays[order]

    def _holders(self, pieces: Integers) -> tuple[Integers, Integers, Integers]:
        """Return, for each piece, the stages that keep one microbatch more and one less from its start on; and stages' limits."""
        if (self.limits < 0).all():
            return np.full(len(pieces), -1), np.full(len(pieces), -1), self.limits[:0]
        whole, kinds = self.piece_of_part[pieces], self.work.kinds[pieces]
        stages, stage_of_piece = np.unique(self.work.computed_stages[pieces], return_inverse=True)
        limits = self.limits[stages]
        is_limited = self.fills[whole] & (limits >= 0)[stage_of_piece]
        parts = pieces - self.parts.first[whole]
        begins = is_limited & (kinds == FORWARD) & (parts == 0)
        ends = is_limited & ((kinds == WEIGHT_GRADIENT) | ((kinds == BACKWARD) & (parts == self.parts.counts[whole] - 1)))
        return np.where(begins, stage_of_piece, -1), np.where(ends, stage_of_piece, -1), limits
