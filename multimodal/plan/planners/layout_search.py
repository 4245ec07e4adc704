"""The best layouts by estimate, of every kind: disaggregated, colocated, with virtual stages, at several microbatch sizes."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from multimodal.plan.planners.allocation_search import AllocationProblem, rank_allocations
from multimodal.plan.planners.candidate import Candidate, fits
from multimodal.plan.planners.disttrain import build_candidate, build_problem
from multimodal.plan.planners.layer_times import PlanningTimes
from multimodal.plan.planners.length_spread import LengthSpread
from multimodal.plan.planners.megatron import even_layout
from multimodal.plan.planners.megatron_balanced import build_run, grid_fits, grid_seconds, list_grids
from multimodal.plan.planners.memory_estimate import MemoryEstimate
from multimodal.plan.planners.partition_layers import partition_unit
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import MICRO_BATCH_SIZES, PlanningRequest
from multimodal.plan.planners.shared_grid import micro_batch_sizes
from multimodal.plan.planners.step_estimate import estimate_seconds, lower_bound_seconds
from multimodal.plan.planners.unit_layout import UnitLayout, deal_ranges
from multimodal.values.errors import PlanError
from multimodal.values.model_graph import Unit

VIRTUAL_STAGES = (1, 2, 4)
SLACK = 1.2
"""Layouts whose estimate is above this factor of the best of their kind are left out."""
KIND_SLACK = 1.5
"""Kinds whose best estimate is above this factor of the best of all are left out; estimates compare badly between kinds."""
MOST_PER_KIND = 8
MOST_RECOMPUTED_SIZES = 3
LEAST_SHARDED_SIZE = 2
"""Of the microbatch sizes, by position."""

Scored = tuple[Candidate, float]


def best_layouts(request: PlanningRequest, *, deadline: float = math.inf) -> list[list[PlannedRun]]:
    """Return kinds of layouts, each the best runs of its kind with their estimated seconds, the shortest first.

    A kind is a placement (ranks of its own for each unit, all ranks for all units, or one chain over a grid), a number of virtual
    stages of the LLM, a microbatch size, whether whole layers are computed again in their backward, and what replicas share.
    deadline: of `time.process_time()`, after which no further microbatch size is looked at.
    """
    kinds: list[list[PlannedRun]] = []
    best = math.inf
    for form in _forms(request):
        if kinds and time.process_time() > deadline:
            break
        found = [kind for kind in _kinds(form) if kind]
        kinds += found
        best = min((best, *(kind[0].objective_seconds for kind in found)))
    return [kind for kind in kinds if kind[0].objective_seconds <= KIND_SLACK * best]


def _forms(request: PlanningRequest) -> Iterator[PlanningRequest]:
    """Yield the request with a microbatch size and what may be given up for memory.

    Whole layers are recomputed at the smallest sizes only, where that saves most; weights are sharded at larger ones, where the
    gathering of layers hides behind computing.
    """
    for index, size in enumerate(micro_batch_sizes(request, MICRO_BATCH_SIZES)):
        sized = replace(request, micro_batch_size=size)
        yield sized
        if index < MOST_RECOMPUTED_SIZES and request.recompute is None:
            yield replace(sized, recompute="full")
        if index >= LEAST_SHARDED_SIZE and request.sharding is None and request.transformer_impl != "transformer_engine":
            yield replace(sized, sharding="optim_grads_params")


def _kinds(request: PlanningRequest) -> Iterator[list[PlannedRun]]:
    times, memory, spread = PlanningTimes(request), MemoryEstimate(request), LengthSpread(request)
    for virtual_stages in _virtual_stages(request):
        for list_scored, leaves_ranks in ((_disaggregated, True), (_colocated, False)):
            problem = build_problem(request, virtual_stages=virtual_stages, leaves_ranks=leaves_ranks)
            scored = list_scored(request, times, memory, spread, problem) if len(problem.llm) else ()
            yield [
                candidate.to_run(request, planner="braid", seconds=seconds, started=time.perf_counter())
                for candidate, seconds in scored
            ]
    yield from _grids(request, times, memory, spread)


def _grids(
    request: PlanningRequest, times: PlanningTimes, memory: MemoryEstimate, spread: LengthSpread
) -> list[list[PlannedRun]]:
    """The best grids for each number of virtual stages; none where units cannot share tp and dp."""
    try:
        scored = sorted(
            ((grid_seconds(request, grid, spread=spread), index, grid) for index, grid in enumerate(list_grids(request, times))),
            key=lambda entry: entry[:2],
        )
    except PlanError:
        return []
    found: dict[int, list[PlannedRun]] = {}
    least: dict[int, float] = {}
    for seconds, _, grid in scored:
        kept = found.setdefault(grid.virtual_stages, [])
        if len(kept) >= MOST_PER_KIND // 2 or seconds > SLACK * least.get(grid.virtual_stages, seconds):
            continue
        if grid_fits(request, memory, grid):
            least.setdefault(grid.virtual_stages, seconds)
            kept.append(build_run(request, grid, planner="braid", seconds=seconds, started=time.perf_counter()))
    return list(found.values())


def _virtual_stages(request: PlanningRequest) -> Sequence[int]:
    fixed = request.fixed(request.graph.backbone.name).virtual_stages
    return (fixed,) if fixed else VIRTUAL_STAGES


def _disaggregated(
    request: PlanningRequest, times: PlanningTimes, memory: MemoryEstimate, spread: LengthSpread, problem: AllocationProblem
) -> list[Scored]:
    """The best choice of other units for each parallelism of the LLM; layers partitioned by their times."""
    found = []
    for choice in rank_allocations(problem, slack=SLACK)[: 2 * MOST_PER_KIND]:
        even = build_candidate(request, problem, choice)
        balanced = balance_layers(request, times, even)
        scored = [
            (each, estimate_seconds(request, times, each, spread=spread))
            for each in (balanced, even)
            if fits(request, memory, each)
        ]
        found += scored[:1]
    return sorted(found, key=lambda each: (each[1], each[0].num_gpus))[:MOST_PER_KIND]


def _colocated(
    request: PlanningRequest, times: PlanningTimes, memory: MemoryEstimate, spread: LengthSpread, problem: AllocationProblem
) -> list[Scored]:
    """Every unit on all ranks that the LLM takes, encoders and generators with one stage per replica."""
    graph, llm = request.graph, problem.llm
    backbone = graph.backbone
    group = (graph.unit_names,)
    others = [unit for unit in graph.units if unit.name != backbone.name]
    if not others:
        return []
    found: list[Scored] = []
    best = float("inf")
    for row in range(len(llm)):
        count = int(llm.gpus[row])
        if llm.stage_seconds[row] * problem.num_microbatches / llm.data[row] > SLACK * best:
            continue
        own = even_layout(
            backbone,
            int(llm.tensor[row]),
            int(llm.data[row]),
            int(llm.pipeline[row]),
            virtual_stages=problem.virtual_stages,
            context=int(llm.context[row]),
        )
        for layouts in product(*(_spread(request, unit, count) for unit in others)):
            chosen = {**{unit.name: layout for unit, layout in zip(others, layouts, strict=True)}, backbone.name: own}
            candidate = Candidate({name: chosen[name] for name in graph.unit_names}, request.default_micro_batch_size, group)
            if lower_bound_seconds(request, times, candidate) > SLACK * best:
                continue
            seconds = estimate_seconds(request, times, candidate, spread=spread)
            if seconds <= SLACK * best and fits(request, memory, candidate):
                found.append((candidate, seconds))
                best = min(best, seconds)
    return sorted(found, key=lambda each: (each[1], each[0].num_gpus))[:MOST_PER_KIND]


def _spread(request: PlanningRequest, unit: Unit, num_gpus: int) -> Iterator[UnitLayout]:
    """Replicas of one stage over all ranks, for every tensor and context parallel size; fixed sizes are kept."""
    fixed = request.fixed(unit.name)
    stages = fixed.pipeline_parallel_size or 1
    context_sizes = request.context_parallel_sizes(unit.name, micro_batch_size=request.default_micro_batch_size)
    for tensor, context in product(request.tensor_parallel_sizes(unit.name), context_sizes):
        data, rest = divmod(num_gpus, tensor * context * stages)
        if data and not rest and fixed.data_parallel_size in (None, data):
            yield even_layout(unit, tensor, data, stages, context=context)


def balance_layers(request: PlanningRequest, times: PlanningTimes, candidate: Candidate) -> Candidate:
    """Partition every unit's layers anew by their times, into as many stages as it has."""
    layouts = {}
    for name, layout in candidate.layouts.items():
        unit = request.graph.unit(name)
        total = times.of_layout(name, layout, num_samples=candidate.micro_batch_size).total
        ranges = partition_unit(unit, total, num_stages=layout.pipeline_parallel_size * layout.virtual_stages)
        stages = deal_ranges(ranges, num_stages=layout.pipeline_parallel_size)
        layouts[name] = replace(layout, stages=stages)
    return replace(candidate, layouts=layouts)
