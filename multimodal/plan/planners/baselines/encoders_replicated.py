"""Encoders-replicated: the LLM's pipeline, with a copy of every encoder in each of its stages (Cornstarch, section 2)."""

from collections.abc import Iterator
from dataclasses import replace

from multimodal.plan.planners.allowed_sizes import data_parallel_sizes, pipeline_parallel_sizes, shared_stage_sizes
from multimodal.plan.planners.estimate.candidate import Candidate, with_replicas
from multimodal.plan.planners.estimate.step_estimate import choose_candidates
from multimodal.plan.planners.estimate.unit_layout import even_layout
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.schedule.builders import simulated_only
from multimodal.values.errors import PlanError


def plan_encoders_replicated(request: PlanningRequest) -> PlannedRun:
    """Plan the LLM alone, and give every one of its stages a replica of each encoder with the same tp and cp.

    An encoder then has dp x pp (of the LLM) replicas of one stage each, and every LLM stage runs it for every microbatch. Only
    the copies beside the first stage compute something new, so such a plan can be simulated but not run. Generators get ranks of
    their own behind the LLM. Raises PlanError if nothing fits, or dp or pp of an encoder are fixed to other sizes.
    """
    chosen, seconds = choose_candidates(request, _candidates(request))[0]
    replicated = _replicate(request, chosen)
    is_repeated = request.graph.encoders and chosen.layouts[request.graph.backbone.name].pipeline_parallel_size > 1
    schedule = "encoders-replicated" if is_repeated else "1f1b"
    run = replicated.to_run(request, seconds=seconds, schedule=schedule)
    return replace(run, notes=(simulated_only()[schedule],)) if is_repeated else run


def _candidates(request: PlanningRequest) -> Iterator[Candidate]:
    """Yield each LLM layout with encoders of its dp, as many of whose microbatches run on each of its stages."""
    graph, backbone = request.graph, request.graph.backbone.name
    together = (*(unit.name for unit in graph.encoders), backbone)
    for tensor, context in shared_stage_sizes(request, together):
        for pipeline in pipeline_parallel_sizes(request, backbone):
            layouts = {
                unit.name: even_layout(unit, tensor, 1, pipeline if unit.name == backbone else 1, context=context)
                for unit in graph.units
            }
            yield from with_replicas(request, layouts, data_parallel_sizes(request, backbone), groups=(together,))


def _replicate(request: PlanningRequest, candidate: Candidate) -> Candidate:
    graph = request.graph
    llm = candidate.layouts[graph.backbone.name]
    count = llm.data_parallel_size * llm.pipeline_parallel_size
    for unit in graph.encoders:
        fixed = request.fixed(unit.name)
        if fixed.data_parallel_size not in (None, count) or fixed.pipeline_parallel_size not in (None, 1):
            raise PlanError(
                f"encoders-replicated gives '{unit.name}' pp 1 and dp {count}, one replica per stage of the LLM, but other sizes "
                "are fixed; unfix them or choose another planner"
            )
    encoders = {
        unit.name: even_layout(unit, llm.tensor_parallel_size, count, 1, context=llm.context_parallel_size)
        for unit in graph.encoders
    }
    return replace(candidate, layouts={**candidate.layouts, **encoders})
