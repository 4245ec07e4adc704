"""FSDP: every rank computes the whole model for its own samples, and all ranks share the weights (ZeRO-3)."""

from collections.abc import Iterator

from multimodal.plan.planners.allowed_sizes import shared_data_parallel_sizes, shared_stage_sizes
from multimodal.plan.planners.estimate.candidate import Candidate, with_replicas
from multimodal.plan.planners.estimate.step_estimate import choose_candidates
from multimodal.plan.planners.estimate.unit_layout import even_layout
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.values.errors import PlanError

SHARDING = "optim_grads_params"


def plan_fsdp(request: PlanningRequest) -> PlannedRun:
    """Plan all units on all ranks, with tp 1 and pp 1, and weights shared by all of a unit's ranks.

    Raises PlanError if that does not fit, or if other sizes or another sharding are fixed.
    """
    if request.sharding not in (None, SHARDING):
        raise PlanError(f"shares weights, but --data-parallel-sharding-strategy {request.sharding} is asked for; leave it out")
    asked = request.changed(sharding=SHARDING)
    chosen, seconds = choose_candidates(asked, _candidates(asked))[0]
    return chosen.to_run(asked, seconds=seconds)


def _candidates(request: PlanningRequest) -> Iterator[Candidate]:
    graph, names = request.graph, request.graph.unit_names
    for name in names:
        fixed = request.fixed(name)
        sizes = fixed.tensor_parallel_size, fixed.pipeline_parallel_size, fixed.virtual_stages
        if any(size not in (None, 1) for size in sizes):
            raise PlanError(f"has tp 1 and pp 1, but unit '{name}' has other fixed sizes; unfix them or choose another planner")
    for size in shared_stage_sizes(request, names):
        if size.tensor == 1:
            layouts = {unit.name: even_layout(unit, 1, 1, 1, context=size.context) for unit in graph.units}
            yield from with_replicas(request, layouts, shared_data_parallel_sizes(request, names), groups=(names,))
