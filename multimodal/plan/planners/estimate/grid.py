"""One chain of all layers over the virtual stages of one grid: sizes, cuts, seconds and memory.

A module of transformers or diffusers is one piece that ranks cannot share: each rank of its stage has a replica of its own.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from multimodal.balance.encoder_pipelines import keep_beside_llm
from multimodal.cost.memoize import memoized
from multimodal.plan.partition_layers import Range, partition_layers, unit_pieces
from multimodal.plan.planners.allowed_sizes import (
    data_parallel_sizes,
    largest_fitting,
    shared_data_parallel_sizes,
    shared_stage_sizes,
)
from multimodal.plan.planners.estimate import step_estimate
from multimodal.plan.planners.estimate.candidate import Candidate
from multimodal.plan.planners.estimate.memory_estimate import stage_bytes, working_bytes
from multimodal.plan.planners.estimate.unit_layout import UnitLayout, layer_times
from multimodal.plan.planners.planning_request import PlanningRequest, StageSize
from multimodal.plan.plans_of_sizes import place_stages
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan


class Piece(NamedTuple):
    """One of the smallest layer ranges of a unit; seconds are of one microbatch, of a module the mean of its stage's ranks."""

    unit: str
    layers: Range
    forward_seconds: float
    backward_seconds: float
    size: StageSize
    """The sizes by which ranks share it."""

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward."""
        return self.forward_seconds + self.backward_seconds


class GridShape(NamedTuple):
    """The ranks of one grid, and the size of the chain that is cut for it."""

    size: StageSize
    num_stages: int
    data_parallel_size: int
    num_pieces: int
    """Number of smallest ranges in the chain, which is the most virtual stages that it can have."""

    def can_hold(self, virtual_stages: int) -> bool:
        """Return True if every stage can hold so many layer ranges; a single stage has nothing to interleave."""
        return self.num_stages * virtual_stages <= self.num_pieces and (self.num_stages > 1 or virtual_stages == 1)


@dataclass(frozen=True, kw_only=True)
class Grid(Candidate):
    """All units on one grid of stages."""

    shape: GridShape
    held: Mapping[str, Mapping[int, tuple[Range, ...]]]
    """Unit -> stage of the grid -> its layer ranges there, in the order in which microbatches reach the stages."""
    stage_seconds: tuple[float, ...]
    """Seconds of one microbatch in all ranges of each stage of the grid."""
    ranges: tuple[tuple[Piece, ...], ...]
    """The smallest ranges that each virtual stage holds, in the order of the chain."""

    @property
    def num_stages(self) -> int:
        """Stages of the grid."""
        return self.shape.num_stages

    @property
    def virtual_stages(self) -> int:
        """Layer ranges per stage."""
        return len(self.ranges) // self.num_stages

    def num_microbatches(self, request: PlanningRequest) -> int:
        """Return the microbatches of the busiest replica."""
        return -(-request.num_microbatches // self.shape.data_parallel_size)

    @property
    def num_gpus(self) -> int:
        """Total number of ranks."""
        return self.num_stages * self.shape.size.num_ranks * self.shape.data_parallel_size

    def build_plan(self, graph: ModelGraph) -> Plan:
        """Give every stage of the grid its ranks."""
        units = {}
        for name in graph.unit_names:
            layout = self.layouts[name]
            units[name] = place_stages(self.held[name], **layout.size._asdict(), data=layout.data_parallel_size)
        return keep_beside_llm(Plan(units), graph)

    def seconds(self, request: PlanningRequest) -> float:
        """Return the expected step: interleaving divides the warm-up; the rest as in `estimate_seconds` with `has_spread`."""
        count, slowest, through_all = self.num_microbatches(request), max(self.stage_seconds), sum(self.stage_seconds)
        ends = (through_all - slowest) / self.virtual_stages
        waits = step_estimate.slowdown(request, self.layouts, num_stages=self.num_stages, num_microbatches=count)
        heaviest = max(step_estimate.heaviest_seconds(request, unit, each.size) for unit, each in self.layouts.items())
        exposed = max(
            step_estimate.exposed_reduction_seconds(request, unit, layout, stage_seconds=slowest)
            for unit, layout in self.layouts.items()
        )
        return max(ends + count * slowest * waits, heaviest, through_all) + exposed

    def fits(self, request: PlanningRequest, *, schedule: str | None = None) -> bool:
        """Return True if the units' estimated bytes fit together in every stage of the grid."""
        total, working = ([0.0] * self.num_stages for _ in range(2))
        for unit, stages in self.held.items():
            layout = self.layouts[unit]
            for index, stage in enumerate(stages):
                samples = self.samples_in_flight(request, unit, index, schedule=schedule)
                total[stage] += stage_bytes(request, unit, layout, index, num_samples=samples)
                working[stage] = max(working[stage], working_bytes(request, unit, layout.size))
        return max(map(sum, zip(total, working, strict=True))) <= request.planned_memory_bytes


def list_shapes(request: PlanningRequest) -> Iterator[GridShape]:
    """Yield every tp, cp, pp and dp that is allowed; raises PlanError if units, other than modules, cannot share tp and dp."""
    graph = request.graph
    fixed = request.fixed(graph.backbone.name).pipeline_parallel_size
    names = [unit.name for unit in graph.units if unit.module is None]
    data_sizes = shared_data_parallel_sizes(request, names)
    data_sizes_of_modules = [data_parallel_sizes(request, unit.name) for unit in graph.units if unit.module is not None]
    num_pieces = sum(len(unit_pieces(unit)) for unit in graph.units)
    for size in shared_stage_sizes(request, names):
        ranks = size.num_ranks
        for num_stages in (fixed,) if fixed else range(1, min(num_pieces, request.num_gpus // ranks) + 1):
            for data in largest_fitting(data_sizes, gpus_per_replica=num_stages * ranks, num_gpus=request.num_gpus):
                is_even = all(data * ranks in sizes for sizes in data_sizes_of_modules)  # every replica gets as many microbatches
                if is_even and request.allows_num_gpus(num_stages * ranks * data):
                    yield GridShape(size, num_stages, data, num_pieces)


def cut_grid(request: PlanningRequest, shape: GridShape, *, virtual_stages: int) -> Grid:
    """Cut the chain of all layers so that the slowest range is as fast as possible."""
    pieces = chain_pieces(request, shape.size)
    cuts = partition_layers([piece.seconds for piece in pieces], num_stages=shape.num_stages * virtual_stages)
    return build_grid(pieces, cuts, shape=shape)


@memoized
def chain_pieces(request: PlanningRequest, size: StageSize) -> tuple[Piece, ...]:
    """List the layers of all units as one chain."""
    pieces = []
    for unit in request.graph.units:
        own, num_sharers = (size, 1) if unit.module is None else (StageSize(1), size.num_ranks)
        of_unit = layer_times(request, unit.name, own)
        for first, end in unit_pieces(unit):
            forward, backward = (sum(seconds[first:end]) / num_sharers for seconds in of_unit)
            pieces.append(Piece(unit.name, (first, end), forward, backward, own))
    return tuple(pieces)


def build_grid(pieces: Sequence[Piece], cuts: Sequence[Range], *, shape: GridShape) -> Grid:
    """Cut the chain into virtual stages and deal them to the grid's stages in turn."""
    num_stages = shape.num_stages
    held: dict[str, dict[int, list[Range]]] = {}
    stage_seconds = [0.0] * num_stages
    for position, (first, end) in enumerate(cuts):
        stage = position % num_stages
        for piece in pieces[first:end]:
            start, stop = piece.layers
            stage_seconds[stage] += piece.seconds
            ranges = held.setdefault(piece.unit, {}).setdefault(stage, [])
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], stop)
            else:
                ranges.append((start, stop))
    frozen = {unit: {stage: tuple(ranges) for stage, ranges in stages.items()} for unit, stages in held.items()}
    layouts, ranks = {}, shape.size.num_ranks * shape.data_parallel_size
    for unit, size in {piece.unit: piece.size for piece in pieces}.items():
        layouts[unit] = UnitLayout(size, ranks // size.num_ranks, tuple(frozen[unit].values()))
    ranges_of = tuple(tuple(pieces[first:end]) for first, end in cuts)
    return Grid(layouts, shape=shape, held=frozen, stage_seconds=tuple(stage_seconds), ranges=ranges_of)
