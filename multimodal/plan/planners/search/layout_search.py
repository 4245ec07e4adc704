"""The best layouts of every kind by estimate: disaggregated, colocated, with virtual stages, at several microbatch sizes."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from multimodal.plan.planners.allowed_sizes import micro_batch_sizes, stage_sizes, tensor_parallel_sizes
from multimodal.plan.planners.estimate.candidate import Candidate, Groups
from multimodal.plan.planners.estimate.step_estimate import estimate_seconds, lower_bound_seconds
from multimodal.plan.planners.estimate.unit_layout import UnitLayout, balanced_layout, even_layout, stage_times
from multimodal.plan.planners.idle_units import place_idle_units, without_idle_units
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.plan.planners.search.allocation import AllocationProblem, build_candidate, build_problem, rank_allocations
from multimodal.plan.planners.search.grid_search import best_grids
from multimodal.values.model_graph import Unit

VIRTUAL_STAGES = (1, 2, 4)
SLACK = 1.2
"""Layouts whose estimate is above this factor of the best of their kind are left out."""
KIND_SLACK = 1.5
"""Kinds whose best estimate is above this factor of the best are left out; estimates of different kinds compare badly."""
MOST_PER_KIND = 8
EFFICIENT_TOKENS = 8_192
"""Tokens of a microbatch from which layers are efficient."""
FILLING_MICROBATCHES = 8
"""Microbatches per GPU with which a pipeline is mostly full."""
NUM_PROMISING_SIZES = 2
"""Microbatch sizes at which recomputation and sharded weights are also tried."""

Scored = tuple[Candidate, float]


@dataclass(frozen=True)
class Layout:
    """A layout with its estimated step; the plan is built on demand."""

    request: PlanningRequest
    """The request with the layout's microbatch size, recomputation and sharding."""
    form: Candidate
    seconds: float

    @property
    def placement(self) -> tuple[type[Candidate], Groups]:
        """The kind of placement: estimates have about the same error for all layouts of a kind."""
        return type(self.form), self.form.groups

    def to_run(self, whole: PlanningRequest) -> PlannedRun:
        """Assign ranks; whole: the request with units without work in the data."""
        return place_idle_units(self.form.to_run(self.request, seconds=self.seconds), whole)


def best_layouts(request: PlanningRequest, *, takes_more: Callable[[], bool] = lambda: True) -> list[list[Layout]]:
    """Return kinds of layouts, each with its best layouts and their estimated seconds, the shortest first.

    A kind is a placement (separate ranks for each unit, all ranks for all units, or one chain over a grid), a number of virtual
    stages of the LLM, a microbatch size, recomputation or not, and the state that replicas share. takes_more: called before every
    microbatch size; once it returns False and there is a layout, no further size is tried.
    """
    request = without_idle_units(request)
    kinds: list[list[Layout]] = []
    best: dict[int, float] = {}

    def look_at(forms: Iterable[PlanningRequest]) -> None:
        for form in forms:
            if not takes_more() and kinds:
                return
            found = [kind for kind in _kinds(form, known_seconds=min(best.values(), default=math.inf)) if kind]
            size = form.default_micro_batch_size
            best[size] = min((best.get(size, math.inf), *(kind[0].seconds for kind in found)))
            kinds.extend(found)

    sizes = micro_batch_sizes(request)
    look_at(request.changed(micro_batch_size=size) for size in efficient_first(request, sizes))
    if request.recompute is None:  # the smallest size saves most
        promising = dict.fromkeys((*_best_first(best), sizes[0]))
        look_at(request.changed(micro_batch_size=size, recompute="full") for size in promising)
    if request.sharding is None:
        # The longer a layer computes, the more of the next one's gathering is hidden.
        promising = dict.fromkeys((*_best_first(best), *(2 * size for size in _best_first(best)[:1] if 2 * size in sizes)))
        look_at(request.changed(micro_batch_size=size, sharding="optim_grads_params") for size in promising)
    has_products_to_share = any(tensor_parallel_sizes(request, unit)[-1] > 1 for unit in request.graph.unit_names)
    if request.transformer_impl != "transformer_engine" and has_products_to_share:
        promising = dict.fromkeys(each for size in _best_first(best) for each in (size, size // 2) if each in sizes)
        look_at(request.changed(micro_batch_size=size, tp_comm_overlap=True) for size in promising)
    least = min(best.values(), default=math.inf)
    return [kind for kind in kinds if kind[0].seconds <= KIND_SLACK * least]


def efficient_first(request: PlanningRequest, sizes: Sequence[int]) -> list[int]:
    """Sort microbatch sizes by the distance of their tokens from a number that makes layers efficient, or fills pipelines."""
    longest = max(loads[0] for loads in request.loads.mean.values()) or 1.0
    of_gpu = request.global_batch_size * longest / request.num_gpus
    wanted = min(EFFICIENT_TOKENS, of_gpu / FILLING_MICROBATCHES)
    return sorted(sizes, key=lambda size: abs(math.log2(size * longest / wanted)))


def _best_first(best: Mapping[int, float]) -> list[int]:
    return sorted((size for size in best if math.isfinite(best[size])), key=lambda size: best[size])[:NUM_PROMISING_SIZES]


def _kinds(request: PlanningRequest, *, known_seconds: float) -> Iterator[list[Layout]]:
    fixed = request.fixed(request.graph.backbone.name).virtual_pipeline_size
    for virtual_stages in (fixed,) if fixed else VIRTUAL_STAGES:
        for list_scored, leaves_ranks in ((_disaggregated, True), (_colocated, False)):
            problem = build_problem(request, virtual_stages=virtual_stages, leaves_ranks=leaves_ranks)
            scored = list_scored(request, problem) if len(problem.llm) else ()
            yield [Layout(request, candidate, seconds) for candidate, seconds in scored]
    if request.zero_stage != 3:  # its estimate would have to consider shared state
        for grids in best_grids(request, known_seconds=known_seconds):
            yield [Layout(request, grid, seconds) for seconds, grid in grids]


def _disaggregated(request: PlanningRequest, problem: AllocationProblem) -> list[Scored]:
    """Return the best choice of the other units for each parallelism of the LLM, with layers partitioned by their times."""
    scored = []
    for choice in rank_allocations(problem, slack=SLACK)[: 2 * MOST_PER_KIND]:
        even = build_candidate(problem, choice)
        layouts = {}
        for name, old in even.layouts.items():
            layouts[name] = balanced_layout(
                request,
                request.graph.unit(name),
                old.size,
                data=old.data_parallel_size,
                num_stages=old.pipeline_parallel_size,
                virtual_stages=old.virtual_stages,
            )
        balanced = replace(even, layouts=layouts)
        if chosen := next((each for each in (balanced, even) if each.fits(request)), None):
            scored.append((chosen, estimate_seconds(request, chosen, has_spread=True)))
    return sorted(scored, key=lambda each: (each[1], each[0].num_gpus))[:MOST_PER_KIND]


def _colocated(request: PlanningRequest, problem: AllocationProblem) -> list[Scored]:
    """Return layouts with every unit on all of the LLM's ranks; encoders and generators have one stage per replica."""
    llm, graph, backbone = problem.llm, request.graph, request.graph.backbone
    others = [unit for unit in graph.units if unit.name != backbone.name]
    if not others:
        return []
    found: list[Scored] = []
    best = float("inf")
    busy_seconds = llm.stage_seconds * request.num_microbatches / llm.data
    spreads: dict[int, list[tuple[float, tuple[UnitLayout, ...]]]] = {}
    for row in np.argsort(busy_seconds, kind="stable").tolist():
        count = int(llm.gpus[row])
        if busy_seconds[row] > SLACK * best:
            break
        if count not in spreads:
            spreads[count] = _spreads(request, others, count)
        own = llm.layout(row, backbone, virtual_stages=problem.virtual_stages)
        for others_seconds, layouts in spreads[count]:
            if busy_seconds[row] + others_seconds > SLACK * best:
                continue
            chosen = {**{unit.name: layout for unit, layout in zip(others, layouts, strict=True)}, backbone.name: own}
            candidate = Candidate({name: chosen[name] for name in graph.unit_names}, (graph.unit_names,))
            if lower_bound_seconds(request, candidate) > SLACK * best:
                continue
            seconds = estimate_seconds(request, candidate, has_spread=True)
            if seconds <= SLACK * best and candidate.fits(request):
                found.append((candidate, seconds))
                best = min(best, seconds)
    return sorted(found, key=lambda each: (each[1], each[0].num_gpus))[:MOST_PER_KIND]


def _spreads(request: PlanningRequest, units: Sequence[Unit], num_gpus: int) -> list[tuple[float, tuple[UnitLayout, ...]]]:
    """Return every choice of layouts over all ranks, with the seconds for which a rank is busy with average microbatches."""

    def spread(unit: Unit) -> Iterator[tuple[float, UnitLayout]]:
        """Yield replicas of one stage over all ranks, for every tensor and context parallel size; fixed sizes are kept."""
        fixed = request.fixed(unit.name)
        stages = fixed.pipeline_parallel_size or 1
        for size in stage_sizes(request, unit.name):
            data, rest = divmod(num_gpus, size.num_ranks * stages)
            if data and not rest and fixed.data_parallel_size in (None, data):
                layout = even_layout(unit, size, data, stages)
                seconds = max(stage_times(request, unit.name, size, layout.stages))
                yield seconds * request.num_microbatches / data, layout

    choices = product(*map(spread, units))
    return [(sum(seconds for seconds, _ in choice), tuple(layout for _, layout in choice)) for choice in choices]
