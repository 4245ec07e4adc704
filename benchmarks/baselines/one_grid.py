"""Other ways to lay all units over one grid: a balanced chain of layers (Optimus, App. B), and FSDP; and replicas of layouts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from multimodal.plan.planners import allowed_sizes
from multimodal.plan.planners.allowed_sizes import largest_fitting
from multimodal.plan.planners.estimate.candidate import Candidate, Groups
from multimodal.plan.planners.estimate.grid import Grid, cut_grid, list_shapes
from multimodal.plan.planners.estimate.step_estimate import choose_candidates, choose_run, reduction_seconds
from multimodal.plan.planners.estimate.unit_layout import UnitLayout, even_layout
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.values.errors import PlanError

VIRTUAL_STAGES = (1, 2, 3, 4, 6, 8, 12)
"""Layer ranges per pipeline stage that are tried; Optimus' tables have 6 and 12."""


def plan_megatron_balanced(request: PlanningRequest) -> PlannedRun:
    """Plan one grid whose slowest virtual stage is as fast as the order of layers allows.

    The layers of all units, in the graph's order, form one chain, which F(l, m) = min_j max(F(j, m - 1), t_{j+1} + ... + t_l)
    cuts into pp x V virtual stages; stage s runs virtual stages s, s + pp, ... The paper does not cover several encoders; here
    they follow each other in the chain. tp, cp, pp, V and dp are those with the shortest expected step. Raises PlanError if
    nothing fits.
    """
    fixed = request.fixed(request.graph.backbone.name).virtual_pipeline_size
    pairs = product(list_shapes(request), (fixed,) if fixed else VIRTUAL_STAGES)
    grids = (cut_grid(request, shape, virtual_stages=number) for shape, number in pairs if shape.can_hold(number))
    grid, seconds = choose_candidates(request, grids, seconds=grid_seconds, least_seconds=lambda *_: 0.0)[0]
    return grid.to_run(request, seconds=seconds)


def grid_seconds(request: PlanningRequest, grid: Grid) -> float:
    """Return the step of average microbatches: interleaving divides the warm-up, and reductions come behind everything."""
    slowest = max(grid.stage_seconds)
    ends = (sum(grid.stage_seconds) - slowest) / grid.virtual_stages
    reducing = max(reduction_seconds(request, *each) for each in grid.layouts.items())
    return ends + grid.num_microbatches(request) * slowest + reducing


def plan_fsdp(request: PlanningRequest) -> PlannedRun:
    """Plan all units on all ranks, with tp 1, pp 1 and shared weights; raises PlanError if that does not fit, or must not be."""
    if request.sharding not in (None, "optim_grads_params"):
        raise PlanError(f"shares weights, but --data-parallel-sharding-strategy {request.sharding} is asked for; leave it out")
    asked, names = request.changed(sharding="optim_grads_params"), request.graph.unit_names
    for name in names:
        fixed = request.fixed(name)
        sizes = fixed.tensor_parallel_size, fixed.pipeline_parallel_size, fixed.virtual_pipeline_size
        if any(size not in (None, 1) for size in sizes):
            raise PlanError(f"has tp 1 and pp 1, but unit '{name}' has other fixed sizes; unfix them or choose another planner")
    data_sizes, candidates = allowed_sizes.shared_data_parallel_sizes(asked, names), list[Candidate]()
    for size in (size for size in allowed_sizes.shared_stage_sizes(asked, names) if size.tensor == 1):
        layouts = {unit.name: even_layout(unit, size, 1, 1) for unit in request.graph.units}
        candidates += with_replicas(asked, layouts, data_sizes, groups=(names,))
    return choose_run(asked, candidates)


def with_replicas(
    request: PlanningRequest, layouts: Mapping[str, UnitLayout], data_sizes: Sequence[int], *, groups: Groups = ()
) -> Iterator[Candidate]:
    """Yield one replica of every unit, repeated by the largest of the data parallel sizes that fit (`largest_fitting`)."""
    one = Candidate({name: layouts[name] for name in request.graph.unit_names}, groups)
    for data in largest_fitting(data_sizes, gpus_per_replica=one.num_gpus, num_gpus=request.num_gpus):
        yield replace(one, layouts={name: replace(each, data_parallel_size=data) for name, each in one.layouts.items()})
