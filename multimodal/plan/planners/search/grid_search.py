"""The best chains of all layers over one grid, by estimate: with one layer range per stage, or interleaved."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise, takewhile
from random import Random

import numpy as np

from multimodal.cost.memoize import memoized
from multimodal.cost.step_memory import GRADIENT_BYTES
from multimodal.plan.partition_layers import Range
from multimodal.plan.planners.estimate import step_estimate
from multimodal.plan.planners.estimate.grid import Grid, GridShape, Piece, build_grid, chain_pieces, cut_grid, list_shapes
from multimodal.plan.planners.estimate.memory_estimate import heaviest_share, heavy_count, range_bytes, working_bytes
from multimodal.plan.planners.estimate.step_estimate import ChainRange
from multimodal.plan.planners.planning_request import PlanningRequest, StageSize
from multimodal.values.errors import PlanError

SLACK = 1.1
"""Grids whose estimate, or a bound of it, is above this factor of the best are left out."""
MOST_ESTIMATED, MOST_PER_KIND = 100, 8
MOST_PER_SHAPE = 4
"""Most grids of the same tp, cp, pp and dp: if one of them lacks memory, for example, so do the others."""
NUM_MOVES, MOST_NODES = 600, 600_000
"""Most moves of an interleaved grid's cuts that are tried, and most computations in all of them."""
BOUND_SLACK = 1.04
"""Grids whose lower bound is above this factor of the best estimate are not estimated."""
MEAN_MOVED = 4
"""Mean number of neighbouring cuts that move together."""
SEED = 0

ScoredGrid = tuple[float, Grid]


def best_grids(request: PlanningRequest, *, known_seconds: float = math.inf) -> Iterator[list[ScoredGrid]]:
    """Yield the best pipelines of one range per stage, then the best interleaved ones, each the shortest estimate first.

    Every number of ranges per stage is examined: the one with the least waiting depends on how the layers' times combine
    (`chain_seconds`). Then cuts are moved while that shortens the estimate. Yields nothing if units cannot share tp and dp.
    known_seconds: the best estimate so far; grids far above it are not improved.
    """
    try:
        shapes = list(list_shapes(request))
    except PlanError:
        return
    fixed = request.fixed(request.graph.backbone.name).virtual_pipeline_size
    if fixed in (None, 1):
        yield _look_at(request, shapes, [1])
    if fixed != 1:
        most = max((shape.num_pieces for shape in shapes), default=0)
        found = _look_at(request, shapes, [fixed] if fixed else range(2, most + 1))
        improved = (_move_cuts(request, each) if each[0] <= SLACK * known_seconds else each for each in found)
        yield sorted(improved, key=lambda each: each[0])


def _look_at(request: PlanningRequest, shapes: Sequence[GridShape], numbers: Iterable[int]) -> list[ScoredGrid]:
    """Return the best grids with these numbers of ranges per stage, trying first those that are best with even ranges."""
    found: list[ScoredGrid] = []
    least = math.inf
    forms = [
        (_even_seconds(request, shape, each), shape, each) for shape in shapes for each in takewhile(shape.can_hold, numbers)
    ]
    for bound, shape, number in sorted(forms):
        if bound > BOUND_SLACK * least or len(found) == MOST_ESTIMATED:
            break
        grid = cut_grid(request, shape, virtual_stages=number)
        if _least_seconds(request, grid) <= BOUND_SLACK * least and fits(request, grid):
            found.append((grid_estimate(request, grid), grid))
            least = min(least, found[-1][0])
    kept: list[ScoredGrid] = []
    for seconds, grid in sorted(found, key=lambda each: each[0]):
        num_alike = sum(other.shape == grid.shape for _, other in kept)
        if seconds <= SLACK * least and len(kept) < MOST_PER_KIND and num_alike < MOST_PER_SHAPE:
            kept.append((seconds, grid))
    return kept


def _even_seconds(request: PlanningRequest, shape: GridShape, virtual_stages: int) -> float:
    """Return the seconds with perfectly even ranges, including the pipeline's filling and draining."""
    work = _whole_chain_seconds(request, shape.size) / shape.num_stages
    return (-(-request.num_microbatches // shape.data_parallel_size) + (shape.num_stages - 1) / virtual_stages) * work


@memoized
def _whole_chain_seconds(request: PlanningRequest, size: StageSize) -> float:
    return sum(piece.seconds for piece in chain_pieces(request, size))


def _move_cuts(request: PlanningRequest, scored: ScoredGrid) -> ScoredGrid:
    """Move neighbouring cuts by one layer, at random with a fixed seed, and keep each move that makes nothing longer."""
    draw, (best, grid) = Random(SEED), scored
    pieces, shape = chain_pieces(request, grid.shape.size), grid.shape
    cuts, count = [0, *accumulate(map(len, grid.ranges))], grid.num_microbatches(request)
    nodes = step_estimate.num_nodes(num_ranges=len(grid.ranges), num_lanes=shape.num_stages, num_microbatches=count)
    for _ in range(min(NUM_MOVES, MOST_NODES // nodes) if len(cuts) > 2 else 0):
        first, step = draw.randrange(1, len(cuts) - 1), draw.choice((-1, 1))
        end = min(len(cuts) - 1, first + 1 + int(draw.expovariate(1 / MEAN_MOVED)))
        moved = [cut + step * (first <= index < end) for index, cut in enumerate(cuts)]
        if moved[first] == moved[first - 1] or moved[end] == moved[end - 1]:
            continue
        other = build_grid(pieces, tuple(pairwise(moved)), shape=shape)
        seconds = grid_estimate(request, other)
        if seconds <= best and fits(request, other):
            best, grid, cuts = seconds, other, moved
    return best, grid


def _least_seconds(request: PlanningRequest, grid: Grid) -> float:
    """Return the busiest lane's work, or the last lane's and the work of lanes before it outside of it, whichever is longer."""
    count, before = grid.num_microbatches(request), grid.ranges[: grid.num_stages - 1]
    filling = sum(piece.seconds for pieces in before for piece in pieces)
    return max(count * max(grid.stage_seconds), count * grid.stage_seconds[-1] + filling)


def grid_estimate(request: PlanningRequest, grid: Grid) -> float:
    """Return the expected step of a grid, with gathers and reductions hidden as far as possible."""
    if grid.virtual_stages == 1:
        return grid.seconds(request)
    known, ranges = _known_ranges(request, grid.shape), []
    for position, pieces in enumerate(grid.ranges):
        key = position % grid.num_stages, pieces[0].unit, pieces[0].layers, pieces[-1].unit, pieces[-1].layers
        if key not in known:
            known[key] = _chain_range(request, grid, position)
        ranges.append(known[key])
    count, lanes, chunks = grid.num_microbatches(request), grid.num_stages, grid.virtual_stages
    seconds = step_estimate.chain_seconds(ranges, num_lanes=lanes, num_microbatches=count)
    waits = step_estimate.slowdown(request, grid.layouts, num_stages=lanes, num_microbatches=count, num_chunks=chunks)
    heaviest = (step_estimate.heaviest_seconds(request, unit, each.size) for unit, each in grid.layouts.items())
    return max(seconds * waits, *heaviest)


@memoized
def _known_ranges(request: PlanningRequest, shape: GridShape) -> dict[tuple[int, str, Range, str, Range], ChainRange]:
    """(Lane, unit and layers of the first piece, and of the last one) -> range; so moves only cost what changes."""
    return {}


def fits(request: PlanningRequest, grid: Grid) -> bool:
    """Return True if the bytes that lanes of a chain keep at any time of a step are within the planned memory.

    Each lane of an interleaved one keeps less than the one before it, but the first has the embedding, too, the last the head.
    """
    if grid.virtual_stages == 1:
        return grid.fits(request)
    return all(_lane_bytes(request, grid, lane) <= request.planned_memory_bytes for lane in {0, 1, grid.num_stages - 1})


def _lane_bytes(request: PlanningRequest, grid: Grid, lane: int) -> float:
    held, count = grid.ranges[lane :: grid.num_stages], grid.num_microbatches(request)
    states = step_estimate.chunks_in_flight(lane, num_lanes=grid.num_stages, chunks=len(held), num_microbatches=count)
    most, size = int(states.max()), request.default_micro_batch_size
    # A few samples may be heavier on average than many.
    heavy = {
        unit: max(heavy_count(request, unit, most * size) / most, size * heaviest_share(request, unit, count=most, of=count))
        for unit in grid.layouts
    }
    static, working, of_chunks = 0.0, 0.0, np.zeros(len(held))
    for chunk, piece in ((chunk, piece) for chunk, pieces in enumerate(held) for piece in pieces):
        layout = grid.layouts[piece.unit]
        own, kept = range_bytes(request, piece.unit, (piece.layers,), piece.size, layout.weight_copies)
        static += own
        # A module's replicas in a stage take its microbatches in turn.
        taken = piece.size.num_ranks / grid.shape.size.num_ranks
        of_chunks[chunk] += taken * kept / piece.size.tensor * heavy[piece.unit]
        working = max(working, working_bytes(request, piece.unit, piece.size))
    return static + working + float((states @ of_chunks).max())


def _chain_range(request: PlanningRequest, grid: Grid, position: int) -> ChainRange:
    """Return the seconds of one range; all of its layers but the first are reduced while its last backward runs."""
    pieces, before = grid.ranges[position], request.trained_weights
    first_rank = position % grid.num_stages * (grid.num_gpus // grid.num_stages)

    def cost(bytes_per_weight: float, moved: Sequence[Piece]) -> float:
        num_bytes = defaultdict[str, float](float)
        for unit, (first, end), *_ in moved:
            num_bytes[unit] += bytes_per_weight * (before[unit][end] - before[unit][first])
        seconds_of = partial(step_estimate.replicas_seconds, request, first_rank=first_rank)
        return sum(seconds_of(each, grid.layouts[unit]) for unit, each in num_bytes.items())

    forward, backward = (sum(getattr(piece, name) for piece in pieces) for name in ("forward_seconds", "backward_seconds"))
    gathering = cost(request.cluster.bytes_per_element, pieces)
    reducing = max(cost(GRADIENT_BYTES, pieces[:1]), cost(GRADIENT_BYTES, pieces) - backward)
    return ChainRange(forward, backward, gathering, reducing)
