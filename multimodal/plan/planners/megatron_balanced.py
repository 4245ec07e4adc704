"""Megatron-LM balanced: encoder and LLM layers as one chain over the virtual stages of one grid (Optimus, Appendix B)."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from multimodal.plan.planners.estimate.candidate import Candidate, build_run, samples_in_flight
from multimodal.plan.planners.estimate.layer_times import PlanningTimes
from multimodal.plan.planners.estimate.memory_estimate import MemoryEstimate
from multimodal.plan.planners.estimate.step_estimate import LengthSpread, choose, reduction_seconds
from multimodal.plan.planners.estimate.unit_layout import (
    Range,
    UnitLayout,
    even_out_lanes,
    lay_out_grid,
    partition_layers,
    unit_pieces,
)
from multimodal.plan.planners.megatron import largest_fitting, shared_data_parallel_sizes, shared_stage_sizes
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import FixedSizes, PlanningRequest, StageSize, plain_schedule

VIRTUAL_STAGES = (1, 2, 3, 4, 6, 8, 12)
"""Layer ranges per pipeline stage that are tried; Optimus' tables have 6 and 12."""

Piece = tuple[str, Range, float]
"""A unit, one of its smallest layer ranges, and its seconds per microbatch."""


@dataclass(frozen=True)
class Grid:
    """All units on one grid of stages."""

    num_stages: int
    held: Mapping[str, Mapping[int, tuple[Range, ...]]]
    """Unit -> stage of the grid -> its layer ranges there, in the order in which microbatches reach the stages."""
    layouts: Mapping[str, UnitLayout]
    stage_seconds: tuple[float, ...]
    """Per stage of the grid, one microbatch through all its ranges."""
    virtual_stages: int

    @property
    def num_gpus(self) -> int:
        """Ranks in all."""
        layout = next(iter(self.layouts.values()))
        return self.num_stages * layout.ranks_per_stage * layout.data_parallel_size

    def with_replicas(self, data: int) -> "Grid":
        """Return the grid with another data parallel size."""
        layouts = {unit: replace(layout, data_parallel_size=data) for unit, layout in self.layouts.items()}
        return replace(self, layouts=layouts)


def plan_megatron_balanced(request: PlanningRequest) -> PlannedRun:
    """Plan one grid whose slowest virtual stage is as fast as the order of layers allows.

    The layers of all units, in the graph's order, are one chain, which F(l, m) = min_j max(F(j, m - 1), t_{j+1} + ... + t_l) cuts
    into pp x V virtual stages; stage s runs virtual stages s, s + pp, ... The paper leaves several encoders out; here they stand
    one after another in the chain. tp, cp, pp, V and dp are those with the shortest expected step.
    Raises PlanError when nothing fits.
    """
    times, memory = PlanningTimes(request), MemoryEstimate(request)
    grid, seconds = choose(request, list_grids(times), seconds=partial(grid_seconds, request), fits=partial(grid_fits, memory))
    return grid_run(request, grid, seconds=seconds)


def grid_run(request: PlanningRequest, grid: Grid, *, seconds: float) -> PlannedRun:
    """Deal ranks to a grid."""
    layout = grid.layouts[request.graph.backbone.name]
    plan = lay_out_grid(request.graph, grid.held, num_stages=grid.num_stages, layout=layout)
    return build_run(request, plan, schedule=plain_schedule(has_virtual_stages=grid.virtual_stages > 1), seconds=seconds)


def list_grids(times: PlanningTimes, *, layers_per_range: Sequence[int] = ()) -> Iterator[Grid]:
    """Yield the grid of every tp, cp, dp, pp and V.

    layers_per_range: V that make ranges of about this many layers, or of equal time, are tried, too, unless V is fixed.
    """
    request, names = times.request, times.request.graph.unit_names
    backbone = request.fixed(request.graph.backbone.name)
    chunks = (backbone.virtual_stages,) if backbone.virtual_stages else VIRTUAL_STAGES
    data_sizes = shared_data_parallel_sizes(request, names)
    for tensor, context in shared_stage_sizes(request, names):
        pieces = chain_pieces(times, StageSize(tensor, context))
        most_stages = min(len(pieces), request.num_gpus // (tensor * context))
        stages = (backbone.pipeline_parallel_size,) if backbone.pipeline_parallel_size else range(1, most_stages + 1)
        for num_stages in stages:
            for virtual_stages in sorted({*chunks, *_finer(pieces, num_stages, layers_per_range, backbone)}):
                if num_stages * virtual_stages > len(pieces) or (num_stages == 1 and virtual_stages > 1):
                    continue
                cuts = partition_layers([seconds for _, _, seconds in pieces], num_stages=num_stages * virtual_stages)
                grid = build_grid(pieces, cuts, num_stages=num_stages, tensor=tensor, context=context)
                replica = num_stages * tensor * context
                for data in largest_fitting(data_sizes, gpus_per_replica=replica, num_gpus=request.num_gpus):
                    yield grid.with_replicas(data)


def _finer(pieces: Sequence[Piece], num_stages: int, layers_per_range: Sequence[int], fixed: FixedSizes) -> set[int]:
    """Return the V that make ranges of this many layers, and the V that makes all ranges about as long as the heaviest piece."""
    if fixed.virtual_stages or not layers_per_range:
        return set()
    seconds = [each for _, _, each in pieces]
    numbers = {len(pieces) // (num_stages * layers) for layers in layers_per_range}
    return (numbers | {math.ceil(sum(seconds) / (max(seconds) * num_stages))}) - {0}


def even_grid(times: PlanningTimes, grid: Grid) -> Grid:
    """Return the grid with evened out lanes (`even_out_lanes`)."""
    layout = next(iter(grid.layouts.values()))
    tensor, context = layout.stage_size
    pieces = chain_pieces(times, layout.stage_size)
    seconds = [each for _, _, each in pieces]
    cuts = partition_layers(seconds, num_stages=grid.num_stages * grid.virtual_stages)
    evened = even_out_lanes(seconds, cuts, num_lanes=grid.num_stages)
    even = build_grid(pieces, evened, num_stages=grid.num_stages, tensor=tensor, context=context)
    return even.with_replicas(layout.data_parallel_size)


def chain_pieces(times: PlanningTimes, size: StageSize) -> tuple[Piece, ...]:
    """List the layers of all units as one chain."""
    pieces = []
    for unit in times.request.graph.units:
        total = times.of_unit(unit.name, size).total
        pieces += [(unit.name, piece, sum(total[piece[0] : piece[1]])) for piece in unit_pieces(unit)]
    return tuple(pieces)


def build_grid(pieces: Sequence[Piece], cuts: Sequence[Range], *, num_stages: int, tensor: int, context: int) -> Grid:
    """Cut the chain into virtual stages and deal them to the grid's stages in turn; one replica."""
    held: dict[str, dict[int, list[Range]]] = {}
    stage_seconds = [0.0] * num_stages
    for position, (first, end) in enumerate(cuts):
        stage = position % num_stages
        for unit, (start, stop), seconds in pieces[first:end]:
            stage_seconds[stage] += seconds
            ranges = held.setdefault(unit, {}).setdefault(stage, [])
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], stop)
            else:
                ranges.append((start, stop))
    frozen = {unit: {stage: tuple(ranges) for stage, ranges in stages.items()} for unit, stages in held.items()}
    layouts = {unit: UnitLayout(tensor, 1, tuple(stages.values()), context) for unit, stages in frozen.items()}
    return Grid(num_stages, frozen, layouts, tuple(stage_seconds), len(cuts) // num_stages)


def grid_seconds(request: PlanningRequest, grid: Grid, *, spread: LengthSpread | None = None) -> float:
    """Return the expected step: interleaving divides the warm-up by the virtual stages; spread: as for `estimate_seconds`."""
    data = next(iter(grid.layouts.values())).data_parallel_size
    count = -(-request.num_microbatches // data)
    slowest = max(grid.stage_seconds)
    ends = (sum(grid.stage_seconds) - slowest) / grid.virtual_stages
    waits, heaviest = 1.0, 0.0
    if spread:
        size = request.default_micro_batch_size
        waits = max(spread.slowdown(unit, micro_batch_size=size, num_stages=grid.num_stages) for unit in grid.layouts)
        heaviest = max(spread.heaviest_seconds(unit, layout) for unit, layout in grid.layouts.items())
    reduction = max(reduction_seconds(request, unit, layout) for unit, layout in grid.layouts.items())
    return max(ends + count * slowest * waits, heaviest) + reduction


def grid_fits(memory: MemoryEstimate, grid: Grid) -> bool:
    """Return True if the units' estimated bytes fit together in every stage of the grid."""
    request = memory.request
    candidate = Candidate(grid.layouts, request.default_micro_batch_size)
    total = [0.0] * grid.num_stages
    working = [0.0] * grid.num_stages
    for unit, stages in grid.held.items():
        for index, stage in enumerate(stages):
            samples = samples_in_flight(request, candidate, unit, index)
            layout = grid.layouts[unit]
            total[stage] += memory.stage_bytes(unit, layout, index, num_samples=samples)
            working[stage] = max(working[stage], memory.working_bytes(unit, layout.stage_size))
    return max(map(sum, zip(total, working, strict=True))) <= request.planned_memory_bytes
