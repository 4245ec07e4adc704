"""Cornstarch: every module partitioned by itself, coupled only by the time of an LLM stage (Cornstarch 5.2, Alg. 1)."""

from collections.abc import Iterator

from benchmarks.baselines.one_grid import with_replicas
from multimodal.plan.planners.allowed_sizes import (
    pipeline_parallel_sizes,
    shared_data_parallel_sizes,
    stage_sizes,
)
from multimodal.plan.planners.estimate.candidate import Candidate
from multimodal.plan.planners.estimate.step_estimate import choose_run
from multimodal.plan.planners.estimate.unit_layout import UnitLayout, balanced_layout, stage_times
from multimodal.plan.planners.estimate.unit_options import infeasible
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest, StageSize
from multimodal.values.model_graph import Unit


def plan_cornstarch(request: PlanningRequest, *, is_frozen_aware: bool = True) -> PlannedRun:
    """Plan (Cornstarch 4.2); is_frozen_aware: False takes every backward for twice its forward (Table 3's baseline)."""
    asked = request.changed(is_frozen_aware=is_frozen_aware)
    return choose_run(asked, _candidates(asked))


def _candidates(request: PlanningRequest) -> Iterator[Candidate]:
    """Yield, for each number of LLM stages, its partition and those of other units that keep up with it; one dp for all."""
    graph, backbone = request.graph, request.graph.backbone
    data_sizes = shared_data_parallel_sizes(request, graph.unit_names)
    for size in stage_sizes(request, backbone.name):
        for llm in _layouts(request, backbone, size):
            target_seconds = _slowest_stage(request, backbone, llm)
            layouts = {
                unit.name: llm if unit is backbone else _match_stage_seconds(request, unit, target_seconds)
                for unit in graph.units
            }
            yield from with_replicas(request, layouts, data_sizes)


def _layouts(request: PlanningRequest, unit: Unit, size: StageSize) -> Iterator[UnitLayout]:
    """Yield the layouts of a unit on one replica: all numbers of stages that the GPUs suffice for, ascending."""
    for num_stages in pipeline_parallel_sizes(request, unit.name):
        if size.num_ranks * num_stages > request.num_gpus:
            return
        yield balanced_layout(request, unit, size, data=1, num_stages=num_stages)


def _slowest_stage(request: PlanningRequest, unit: Unit, layout: UnitLayout) -> float:
    return max(stage_times(request, unit.name, layout.size, layout.stages))


def _match_stage_seconds(request: PlanningRequest, unit: Unit, target_seconds: float) -> UnitLayout:
    """Return the unit's parallelism with fewest GPUs whose slowest stage takes at most `target_seconds`; else the fastest one."""
    best = list[tuple[bool, float, float, UnitLayout]]()
    for size in stage_sizes(request, unit.name):
        for layout in _layouts(request, unit, size):
            seconds = _slowest_stage(request, unit, layout)
            is_late = seconds > target_seconds * (1 + 1e-9)
            best.append((is_late, seconds if is_late else layout.num_ranks, seconds, layout))
            if not is_late:
                break
    if not best:
        raise infeasible(request)
    return min(best, key=lambda each: each[:3])[-1]
