"""Megatron-LM: one rigid grid, in which encoders and generators are extra pipeline stages beside the LLM's (DistTrain 2.1)."""

import time
from collections.abc import Iterator
from itertools import product

from multimodal.plan.planners.candidate import Candidate
from multimodal.plan.planners.choose import choose_candidate
from multimodal.plan.planners.layer_times import PlanningTimes
from multimodal.plan.planners.memory_estimate import MemoryEstimate
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.plan.planners.shared_grid import (
    largest_fitting,
    shared_context_parallel_sizes,
    shared_data_parallel_sizes,
    shared_tensor_parallel_sizes,
)
from multimodal.plan.planners.unit_layout import UnitLayout, deal_ranges
from multimodal.values.model_graph import Unit
from multimodal.values.plan import split_layers

MOST_EXTRA_STAGES = 8
"""Stages that an encoder or a generator is cut into when it does not fit into fewer."""


def plan_megatron(request: PlanningRequest) -> PlannedRun:
    """Plan one grid: the same tp, cp and dp for all units, transformer layers cut evenly, one stage for every other unit.

    An encoder or a generator gets as few stages as memory allows (usually 1), and the LLM the number that makes the step
    shortest, so the baseline is as good as tuning makes it. Raises PlanError when nothing fits.
    """
    started = time.perf_counter()
    times, memory = PlanningTimes(request), MemoryEstimate(request)
    chosen, seconds = choose_candidate(request, _candidates(request), times=times, memory=memory, planner="megatron")
    return chosen.to_run(request, planner="megatron", seconds=seconds, started=started)


def _candidates(request: PlanningRequest) -> Iterator[Candidate]:
    graph, size = request.graph, request.default_micro_batch_size
    names = graph.unit_names
    backbone = graph.backbone.name
    data_sizes = shared_data_parallel_sizes(request, names, micro_batch_size=size)
    tensor_sizes = shared_tensor_parallel_sizes(request, names)
    context_sizes = shared_context_parallel_sizes(request, names, micro_batch_size=size)
    for extra, tensor, context in product(range(1, MOST_EXTRA_STAGES + 1), tensor_sizes, context_sizes):
        for pipeline in request.pipeline_parallel_sizes(backbone):
            stages = {unit.name: _num_stages(request, unit, backbone, pipeline, extra) for unit in graph.units}
            replica = tensor * context * sum(stages.values())
            for data in largest_fitting(data_sizes, gpus_per_replica=replica, num_gpus=request.num_gpus):
                layouts = {unit.name: even_layout(unit, tensor, data, stages[unit.name], context=context) for unit in graph.units}
                yield Candidate(layouts, size)


def _num_stages(request: PlanningRequest, unit: Unit, backbone: str, pipeline: int, extra: int) -> int:
    if unit.name == backbone:
        return pipeline
    return request.fixed(unit.name).pipeline_parallel_size or min(extra, unit.transformer.num_layers)


def even_layout(unit: Unit, tensor: int, data: int, num_stages: int, virtual_stages: int = 1, *, context: int = 1) -> UnitLayout:
    """Cut a unit's layers evenly into stages, dealt in turn where they are virtual."""
    ranges = split_layers(unit.layers, num_stages=num_stages * virtual_stages)
    return UnitLayout(tensor, data, deal_ranges(ranges, num_stages=num_stages), context)
