"""Megatron-LM: one rigid grid, in which encoders and generators are extra pipeline stages beside the LLM's (DistTrain 2.1)."""

from collections.abc import Iterator
from itertools import product

from multimodal.plan.planners.estimate.candidate import Candidate
from multimodal.plan.planners.estimate.shared_sizes import shared_data_parallel_sizes, shared_stage_sizes, with_replicas
from multimodal.plan.planners.estimate.step_estimate import choose_candidate
from multimodal.plan.planners.estimate.unit_layout import even_layout
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.values.model_graph import Unit

MOST_EXTRA_STAGES = 8
"""Stages that an encoder or a generator is cut into when it does not fit into fewer."""


def plan_megatron(request: PlanningRequest) -> PlannedRun:
    """Plan one grid: the same tp, cp and dp for all units, transformer layers cut evenly, one stage for every other unit.

    An encoder or a generator gets as few stages as memory allows (usually 1), and the LLM the number that makes the step
    shortest, so the baseline is as good as tuning makes it. Raises PlanError when nothing fits.
    """
    chosen, seconds = choose_candidate(request, _candidates(request))
    return chosen.to_run(request, seconds=seconds)


def _candidates(request: PlanningRequest) -> Iterator[Candidate]:
    graph, names = request.graph, request.graph.unit_names
    data_sizes = shared_data_parallel_sizes(request, names)
    for extra, (tensor, context) in product(range(1, MOST_EXTRA_STAGES + 1), shared_stage_sizes(request, names)):
        for pipeline in request.pipeline_parallel_sizes(graph.backbone.name):
            stages = {unit.name: _num_stages(request, unit, extra) for unit in graph.units} | {graph.backbone.name: pipeline}
            layouts = {unit.name: even_layout(unit, tensor, 1, stages[unit.name], context=context) for unit in graph.units}
            yield from with_replicas(request, layouts, data_sizes)


def _num_stages(request: PlanningRequest, unit: Unit, extra: int) -> int:
    return request.fixed(unit.name).pipeline_parallel_size or min(extra, unit.num_inner_layers)
