"""The best chains of all layers over one grid, by estimate: with one layer range per stage, and interleaved with any number."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from multimodal.cost.step_memory import GRADIENT_BYTES
from multimodal.plan.planners.estimate.chain_estimate import ChainRange, chain_seconds, chunks_in_flight
from multimodal.plan.planners.estimate.layer_times import PlanningTimes
from multimodal.plan.planners.estimate.memory_estimate import MemoryEstimate
from multimodal.plan.planners.estimate.step_estimate import (
    LengthSpread,
    exposed_reduction_seconds,
    reduction_seconds,
    replicas_seconds,
)
from multimodal.plan.planners.megatron_balanced import (
    Grid,
    GridShape,
    Piece,
    chain_pieces,
    cut_grid,
    grid_fits,
    grid_seconds,
    list_shapes,
)
from multimodal.plan.planners.planning_request import PlanningRequest, StageSize
from multimodal.values.errors import PlanError

SLACK = 1.1
"""Grids whose estimate, or a bound of it, is above this factor of the best are left out."""
MOST_PER_KIND = 8
NUM_EVENED = 3
"""Interleaved grids that are tried with even lanes, too."""

ScoredGrid = tuple[float, Grid]


def best_grids(times: PlanningTimes, memory: MemoryEstimate, spread: LengthSpread) -> Iterator[list[ScoredGrid]]:
    """Yield the best pipelines of one range per stage, then the best interleaved ones, each the shortest estimate first.

    Every number of ranges per stage is looked at: which one waits least depends on how the layers' times fit together
    (`chain_seconds`). Yields nothing where units cannot share tp and dp.
    """
    try:
        shapes = list(list_shapes(times.request))
    except PlanError:
        return
    fixed = times.request.fixed(times.request.graph.backbone.name).virtual_stages
    pieces = {size: chain_pieces(times, size) for size in dict.fromkeys(shape.size for shape in shapes)}
    find = partial(_best_of, memory, spread, shapes, pieces)
    if fixed in (None, 1):
        yield find([1])
    if fixed != 1:
        yield find([fixed] if fixed else range(2, max(shape.num_pieces for shape in shapes) + 1))


def _best_of(
    memory: MemoryEstimate,
    spread: LengthSpread,
    shapes: Sequence[GridShape],
    pieces: dict[StageSize, tuple[Piece, ...]],
    numbers: Iterable[int],
) -> list[ScoredGrid]:
    """Return the best grids with these numbers of ranges per stage; of shapes, those first that even stages make shortest."""
    request = spread.request
    found: list[ScoredGrid] = []
    least = math.inf

    def look_at(grid: Grid) -> None:
        nonlocal least
        fits = grid_fits if grid.virtual_stages == 1 else chain_fits
        if _least_seconds(request, grid) <= SLACK * least and fits(memory, grid):
            found.append((grid_estimate(spread, grid), grid))
            least = min(least, found[-1][0])

    of_even_stages = {shape: _even_seconds(request, shape, pieces[shape.size]) for shape in shapes}
    for shape in sorted(shapes, key=of_even_stages.__getitem__):
        if of_even_stages[shape] > SLACK * least:
            break
        for number in numbers:
            if not shape.can_hold(number):
                break
            look_at(cut_grid(pieces[shape.size], shape, virtual_stages=number))
    found.sort(key=lambda each: each[0])
    for _, grid in found[:NUM_EVENED] if found and found[0][1].virtual_stages > 1 else ():
        shape = _shape_of(grid, shapes)
        even = cut_grid(pieces[shape.size], shape, virtual_stages=grid.virtual_stages, is_even=True)
        if even != grid:
            look_at(even)
    found.sort(key=lambda each: each[0])
    return [each for each in found[:MOST_PER_KIND] if each[0] <= SLACK * least]


def _even_seconds(request: PlanningRequest, shape: GridShape, pieces: Sequence[Piece]) -> float:
    """Return the seconds of perfectly even stages that never wait."""
    count = -(-request.num_microbatches // shape.data_parallel_size)
    return count * sum(piece.seconds for piece in pieces) / shape.num_stages


def _least_seconds(request: PlanningRequest, grid: Grid) -> float:
    """Return the busiest lane's work, or what the last lane does, and the lanes before it before its first and after its last."""
    count, before = _num_microbatches(request, grid), grid.ranges[: grid.num_stages - 1]
    filling = sum(piece.seconds for pieces in before for piece in pieces)
    return max(count * max(grid.stage_seconds), count * grid.stage_seconds[-1] + filling)


def _shape_of(grid: Grid, shapes: Sequence[GridShape]) -> GridShape:
    layout = next(iter(grid.layouts.values()))
    wanted = layout.stage_size, grid.num_stages, layout.data_parallel_size
    return next(shape for shape in shapes if shape[:3] == wanted)


def _num_microbatches(request: PlanningRequest, grid: Grid) -> int:
    data = next(iter(grid.layouts.values())).data_parallel_size
    return -(-request.num_microbatches // data)


def grid_estimate(spread: LengthSpread, grid: Grid) -> float:
    """Return the expected step of a grid, with gatherings and reductions hidden as far as they can."""
    request = spread.request
    if grid.virtual_stages == 1:
        return _pipeline_estimate(spread, grid)
    ranges = [_chain_range(request, grid, position) for position in range(len(grid.ranges))]
    seconds = chain_seconds(ranges, num_lanes=grid.num_stages, num_microbatches=_num_microbatches(request, grid))
    size = request.default_micro_batch_size
    waits = max(spread.slowdown(unit, micro_batch_size=size, num_stages=grid.num_stages) for unit in grid.layouts)
    return max(seconds * waits, *(spread.heaviest_seconds(unit, layout) for unit, layout in grid.layouts.items()))


def chain_fits(memory: MemoryEstimate, grid: Grid) -> bool:
    """Return True if what lanes of an interleaved chain keep at any time of a step is within the memory to count on.

    Each lane keeps less than the one before it, but the second one has no embedding, and the last one has the head.
    """
    lanes = {0, 1, grid.num_stages - 1}
    return all(_lane_bytes(memory, grid, lane) <= memory.request.planned_memory_bytes for lane in lanes)


def _lane_bytes(memory: MemoryEstimate, grid: Grid, lane: int) -> float:
    request, held = memory.request, grid.ranges[lane :: grid.num_stages]
    count = _num_microbatches(request, grid)
    states = chunks_in_flight(lane, num_lanes=grid.num_stages, chunks=len(held), num_microbatches=count)
    num_samples = float(states.max()) * request.default_micro_batch_size
    static, working, of_chunks = 0.0, 0.0, np.zeros(len(held))
    for chunk, piece in ((chunk, piece) for chunk, pieces in enumerate(held) for piece in pieces):
        layout = replace(grid.layouts[piece.unit], stages=((piece.layers,),))
        static += memory.stage_bytes(piece.unit, layout, 0, num_samples=0.0)
        of_chunks[chunk] += memory.activation_bytes(piece.unit, layout, 0, num_samples=num_samples)
        working = max(working, memory.working_bytes(piece.unit, layout.stage_size))
    return static + working + float((states @ of_chunks).max()) / float(states.max())


def _pipeline_estimate(spread: LengthSpread, grid: Grid) -> float:
    request, slowest = spread.request, max(grid.stage_seconds)
    whole = max(reduction_seconds(request, unit, layout) for unit, layout in grid.layouts.items())
    exposed = max(
        exposed_reduction_seconds(request, unit, layout, stage_seconds=slowest) for unit, layout in grid.layouts.items()
    )
    through_all = sum(grid.stage_seconds)  # however few microbatches there are, one passes all stages
    return max(grid_seconds(request, grid, spread=spread) - whole, through_all) + exposed


def _chain_range(request: PlanningRequest, grid: Grid, position: int) -> ChainRange:
    """Return the seconds of one range; all of its layers but the first are reduced while its last backward runs."""
    pieces = grid.ranges[position]
    layout = grid.layouts[pieces[0].unit]
    first_rank = position % grid.num_stages * layout.ranks_per_stage * layout.data_parallel_size
    weights = [_num_trained(request, piece) for piece in pieces]
    cost = partial(replicas_seconds, request, layout=layout, first_rank=first_rank)
    forward, backward = (sum(getattr(piece, name) for piece in pieces) for name in ("forward_seconds", "backward_seconds"))
    reducing = cost(GRADIENT_BYTES * sum(weights))
    return ChainRange(
        forward,
        backward,
        cost(request.cluster.bytes_per_element * sum(weights)),
        max(cost(GRADIENT_BYTES * weights[0]), reducing - backward),
    )


def _num_trained(request: PlanningRequest, piece: Piece) -> int:
    before = request.trained_weights[piece.unit]
    return before[piece.layers[1]] - before[piece.layers[0]]
