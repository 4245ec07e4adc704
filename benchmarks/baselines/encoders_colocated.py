"""All encoders fused in the same first stages (Cornstarch 2 compares with it)."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

from benchmarks.baselines.one_grid import with_replicas
from multimodal.plan.planners.allowed_sizes import (
    pipeline_parallel_sizes,
    shared_data_parallel_sizes,
    shared_stage_sizes,
)
from multimodal.plan.planners.estimate.candidate import Candidate
from multimodal.plan.planners.estimate.step_estimate import choose_candidates
from multimodal.plan.planners.estimate.unit_layout import even_layout
from multimodal.plan.planners.megatron import MOST_EXTRA_STAGES
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest, StageSize
from multimodal.plan.planners.search.run_variants import with_first_balance
from multimodal.plan.planners.search.trials import simulate_run

NEAR = 1.02
"""Factor of the shortest estimate within which the formula is unreliable: the best of each number of replicas is simulated."""


def plan_encoders_colocated(request: PlanningRequest) -> PlannedRun:
    """Plan one pipeline whose first stages hold a part of every encoder, and whose others hold the LLM, then generators.

    All units have the same dp, the encoders the same tp, cp and pp, the others the same tp and cp. If the formula cannot decide
    between numbers of replicas, simulation does. Raises PlanError if nothing fits.
    """
    best: dict[int, tuple[Candidate, float]] = {}
    for candidate, seconds in choose_candidates(request, _with_encoder_stages(request), within=NEAR):
        best.setdefault(candidate.layouts[request.graph.backbone.name].data_parallel_size, (candidate, seconds))
    schedule = "encoders-colocated" if len(request.graph.encoders) > 1 else "1f1b"
    runs = (candidate.to_run(request, seconds=seconds, schedule=schedule) for candidate, seconds in best.values())
    return shortest_run(runs, request)


def shortest_run(runs: Iterable[PlannedRun], request: PlanningRequest) -> PlannedRun:
    """Return the run with the shortest simulated step, of several with their first balancers; the first if none fits."""
    waiting = list(runs)
    if len(waiting) == 1:
        return waiting[0]
    found = [simulate_run(with_first_balance(run, request), request) for run in waiting]
    ranked = [(predicted.key, index) for index, (predicted, _) in enumerate(found) if predicted is not None]
    _, chosen = min(ranked, default=((0.0, 0), 0))
    return replace(waiting[chosen], nominal_seconds=sum(nominal for _, nominal in found))


def _with_encoder_stages(request: PlanningRequest) -> Iterator[Candidate]:
    graph = request.graph
    encoders = tuple(unit.name for unit in graph.encoders)
    rest = [unit for unit in graph.units if unit.name not in encoders]
    data_sizes = shared_data_parallel_sizes(request, graph.unit_names)
    encoder_sizes = shared_stage_sizes(request, encoders) if encoders else [StageSize(1)]
    rest_sizes = shared_stage_sizes(request, [unit.name for unit in rest])
    encoder_stages = {1}
    if encoders:
        allowed = set.intersection(*(set(pipeline_parallel_sizes(request, unit)) for unit in encoders))
        encoder_stages = {stages for stages in allowed if stages <= MOST_EXTRA_STAGES} or {min(allowed)}
    for stages, encoder_size, size in product(sorted(encoder_stages), encoder_sizes, rest_sizes):
        for pipeline in pipeline_parallel_sizes(request, graph.backbone.name):
            layouts = {
                unit.name: even_layout(unit, encoder_size, 1, stages)
                if unit.name in encoders
                else even_layout(unit, size, 1, pipeline if unit.name == graph.backbone.name else 1)
                for unit in graph.units
            }
            yield from with_replicas(request, layouts, data_sizes, groups=(encoders,) if encoders else ())
