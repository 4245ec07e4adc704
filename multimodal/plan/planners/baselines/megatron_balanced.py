"""Megatron-LM balanced: encoder and LLM layers as one chain over the virtual stages of one grid (Optimus, Appendix B)."""

from collections.abc import Iterator
from functools import partial
from itertools import groupby, product

from multimodal.plan.planners.estimate.grid import Grid, chain_pieces, cut_grid, grid_fits, grid_run, grid_seconds, list_shapes
from multimodal.plan.planners.estimate.layer_times import PlanningTimes
from multimodal.plan.planners.estimate.memory_estimate import MemoryEstimate
from multimodal.plan.planners.estimate.step_estimate import choose_near
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest

VIRTUAL_STAGES = (1, 2, 3, 4, 6, 8, 12)
"""Layer ranges per pipeline stage that are tried; Optimus' tables have 6 and 12."""


def plan_megatron_balanced(request: PlanningRequest) -> PlannedRun:
    """Plan one grid whose slowest virtual stage is as fast as the order of layers allows.

    The layers of all units, in the graph's order, form one chain, which F(l, m) = min_j max(F(j, m - 1), t_{j+1} + ... + t_l)
    cuts into pp x V virtual stages; stage s runs virtual stages s, s + pp, ... The paper does not cover several encoders; here
    they follow each other in the chain. tp, cp, pp, V and dp are those with the shortest expected step. Raises PlanError if
    nothing fits.
    """
    times, memory = PlanningTimes(request), MemoryEstimate(request)
    grids = choose_near(request, list_grids(times), seconds=partial(grid_seconds, request), fits=partial(grid_fits, memory))
    grid, seconds = grids[0]
    return grid_run(request, grid, seconds=seconds)


def list_grids(times: PlanningTimes) -> Iterator[Grid]:
    """Yield the grid of every tp, cp, dp, pp and V."""
    request = times.request
    fixed = request.fixed(request.graph.backbone.name).virtual_stages
    for size, shapes in groupby(list_shapes(request), key=lambda shape: shape.size):
        pieces = chain_pieces(times, size)
        for shape, virtual_stages in product(shapes, (fixed,) if fixed else VIRTUAL_STAGES):
            if shape.can_hold(virtual_stages):
                yield cut_grid(pieces, shape, virtual_stages=virtual_stages)
