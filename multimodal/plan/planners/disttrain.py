"""DistTrain: every unit on ranks of its own, sized by the adaptive resource allocation of its Algorithm 1."""

from multimodal.plan.planners.allocation_search import AllocationChoice, AllocationProblem, search_allocation
from multimodal.plan.planners.candidate import Candidate
from multimodal.plan.planners.layer_times import PlanningTimes
from multimodal.plan.planners.memory_estimate import MemoryEstimate
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.plan.planners.unit_layout import UnitLayout, deal_ranges
from multimodal.plan.planners.unit_options import Bools, UnitOptions, infeasible, list_options
from multimodal.values.errors import PlanError
from multimodal.values.model_graph import Unit
from multimodal.values.plan import split_layers

BALANCE = "disttrain"
"""DistTrain reorders samples over replicas, and microbatches in a pipeline."""


def plan_disttrain(request: PlanningRequest) -> PlannedRun:
    """Plan as DistTrain does; generators included. Raises PlanError when nothing fits.

    The number of virtual stages of the LLM is the person's (`fixed_sizes`), as there, and 1 by default.
    """
    problem = build_problem(request)
    try:
        choice = search_allocation(problem)
    except PlanError:
        raise infeasible(request) from None
    candidate = build_candidate(request, problem, choice)
    return candidate.to_run(request, seconds=choice.seconds, balance=BALANCE)


def build_candidate(request: PlanningRequest, problem: AllocationProblem, choice: AllocationChoice) -> Candidate:
    """Turn a solution into layouts, layers cut evenly."""
    backbone = request.graph.backbone
    layouts = {
        name: _layout(request.graph.unit(name), options, choice.other_rows[name]) for name, options in problem.others.items()
    }
    layouts[backbone.name] = _layout(backbone, problem.llm, choice.llm_row, virtual_stages=problem.virtual_stages)
    return Candidate(
        {name: layouts[name] for name in request.graph.unit_names if name in layouts},
        micro_batch_size=request.default_micro_batch_size,
    )


def build_problem(
    request: PlanningRequest,
    *,
    virtual_stages: int | None = None,
    leaves_ranks: bool = True,
    left_out: frozenset[str] = frozenset(),
) -> AllocationProblem:
    """List every unit's parallelisms for Alg. 1.

    virtual_stages: of the LLM, where no number is fixed. leaves_ranks: whether every other unit needs a rank of its own.
    left_out: units that get no ranks here.
    """
    times, memory = PlanningTimes(request), MemoryEstimate(request)
    backbone = request.graph.backbone.name
    virtual_stages = request.fixed(backbone).virtual_stages or virtual_stages or 1
    names = [name for name in request.graph.unit_names if name not in left_out]
    options = {
        name: list_options(
            request,
            times,
            memory,
            unit=name,
            max_gpus=request.num_gpus - (len(names) - 1 if leaves_ranks else 0),
        )
        for name in names
    }
    llm = options.pop(backbone)
    return AllocationProblem(
        llm=llm.take(_can_interleave(request, llm, virtual_stages)),
        others=options,
        upstream=frozenset(unit.name for unit in request.graph.encoders) - left_out,
        num_gpus=request.num_gpus,
        num_microbatches=request.num_microbatches,
        virtual_stages=virtual_stages,
    )


def _can_interleave(request: PlanningRequest, llm: UnitOptions, virtual_stages: int) -> Bools:
    most = request.graph.backbone.transformer.num_layers
    return (llm.pipeline * virtual_stages <= most) & ((llm.pipeline > 1) | (virtual_stages == 1))


def _layout(unit: Unit, options: UnitOptions, row: int, *, virtual_stages: int = 1) -> UnitLayout:
    num_stages = int(options.pipeline[row])
    ranges = split_layers(unit.layers, num_stages=num_stages * virtual_stages)
    stages = deal_ranges(ranges, num_stages=num_stages)
    return UnitLayout(int(options.tensor[row]), int(options.data[row]), stages, int(options.context[row]))
