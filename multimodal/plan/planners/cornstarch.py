"""Cornstarch: every module partitioned by itself, coupled only by the time of an LLM stage (Cornstarch 5.2, Alg. 1)."""

from collections.abc import Iterator

from multimodal.plan.partition_layers import partition_unit, range_seconds
from multimodal.plan.planners.allowed_sizes import pipeline_parallel_sizes, stage_sizes
from multimodal.plan.planners.estimate.candidate import Candidate
from multimodal.plan.planners.estimate.layer_times import PlanningTimes
from multimodal.plan.planners.estimate.shared_sizes import shared_data_parallel_sizes, with_replicas
from multimodal.plan.planners.estimate.step_estimate import choose_candidates
from multimodal.plan.planners.estimate.unit_layout import UnitLayout
from multimodal.plan.planners.estimate.unit_options import infeasible
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest, StageSize
from multimodal.values.model_graph import Unit


def plan_cornstarch(request: PlanningRequest, *, is_frozen_aware: bool = True) -> PlannedRun:
    """Plan with the backwards that freezing leaves (Cornstarch 4.2). Raises PlanError if nothing fits.

    is_frozen_aware: False plans as if every backward took twice its forward, the baseline of Cornstarch's Table 3.
    """
    times = PlanningTimes(request, is_frozen_aware=is_frozen_aware)
    chosen, seconds = choose_candidates(request, _candidates(request, times), times=times)[0]
    return chosen.to_run(request, seconds=seconds)


def _candidates(request: PlanningRequest, times: PlanningTimes) -> Iterator[Candidate]:
    """Yield, for each number of LLM stages, its partition and those of other units that keep up with it; one dp for all."""
    graph, backbone = request.graph, request.graph.backbone
    data_sizes = shared_data_parallel_sizes(request, graph.unit_names)
    for tensor, context in stage_sizes(request, backbone.name):
        for num_stages in pipeline_parallel_sizes(request, backbone.name):
            if tensor * context * num_stages > request.num_gpus:
                break
            llm, target_seconds = partition_module(times, backbone, tensor=tensor, context=context, num_stages=num_stages)
            others = {
                unit.name: match_stage_seconds(request, times, unit, target_seconds=target_seconds)
                for unit in graph.units
                if unit is not backbone
            }
            yield from with_replicas(request, {**others, backbone.name: llm}, data_sizes)


def partition_module(times: PlanningTimes, unit: Unit, *, tensor: int, context: int, num_stages: int) -> tuple[UnitLayout, float]:
    """Partition one unit by the time of one forward and one backward; return it and its slowest stage's seconds."""
    total = times.of_unit(unit.name, StageSize(tensor, context)).total
    ranges = partition_unit(unit, total, num_stages=num_stages)
    return UnitLayout(tensor, 1, tuple((each,) for each in ranges), context), max(range_seconds(total, ranges))


def match_stage_seconds(request: PlanningRequest, times: PlanningTimes, unit: Unit, *, target_seconds: float) -> UnitLayout:
    """Return the unit's parallelism with fewest GPUs whose slowest stage takes at most `target_seconds`; else the fastest one."""
    best: tuple[bool, float, float] | None = None
    chosen: UnitLayout | None = None
    for tensor, context in stage_sizes(request, unit.name):
        for num_stages in pipeline_parallel_sizes(request, unit.name):
            if tensor * context * num_stages > request.num_gpus:
                break
            layout, seconds = partition_module(times, unit, tensor=tensor, context=context, num_stages=num_stages)
            is_late = seconds > target_seconds * (1 + 1e-9)
            rank = (is_late, seconds if is_late else layout.num_ranks, seconds)
            if best is None or rank < best:
                best, chosen = rank, layout
            if not is_late:
                break
    if chosen is None:
        raise infeasible(request)
    return chosen
