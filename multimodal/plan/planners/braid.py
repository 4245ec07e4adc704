"""Braid: searches the union of all layouts with the real lengths, and lets the simulator decide."""

import time
from collections.abc import Mapping
from dataclasses import replace

from multimodal.plan.planners.cornstarch import plan_cornstarch, plan_cornstarch_unaware
from multimodal.plan.planners.disttrain import plan_disttrain
from multimodal.plan.planners.encoders_colocated import plan_encoders_colocated
from multimodal.plan.planners.encoders_replicated import plan_encoders_replicated
from multimodal.plan.planners.entrain import plan_entrain
from multimodal.plan.planners.flops_ratio import plan_flops_ratio
from multimodal.plan.planners.megatron import plan_megatron
from multimodal.plan.planners.megatron_balanced import plan_megatron_balanced
from multimodal.plan.planners.plan_search import Planner, PlanSearch
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.plan.planners.ranked_run import describe

OTHER_PLANNERS: Mapping[str, Planner] = {
    "megatron": plan_megatron,
    "megatron-balanced": plan_megatron_balanced,
    "flops-ratio": plan_flops_ratio,
    "encoders-colocated": plan_encoders_colocated,
    "encoders-replicated": plan_encoders_replicated,
    "disttrain": plan_disttrain,
    "cornstarch": plan_cornstarch,
    "cornstarch-unaware": plan_cornstarch_unaware,
    "entrain": plan_entrain,
}
"""Their plans are candidates, too."""
MEMORY_SCALES = (1.0, 0.85, 0.7)
"""Shares of the memory that estimates may fill, the next one where nothing fits when it is simulated."""
NUM_REPORTED = 5


def plan_braid(request: PlanningRequest) -> PlannedRun:
    """Plan by search: enumerate layouts in closed form, prune by memory and by a lower bound, rank by simulation.

    1. The other planners' plans are simulated on a part of the batch.
    2. So are the best layouts of `best_layouts` (disaggregated, colocated, virtual stages, microbatch sizes, and context parallel
       sizes where sequences are long), with the schedules and balancers that suit them. What comes next is the layout with the
       shortest estimate, corrected by how far off estimates of its kind have been.
    3. On the best ones, overlapped tensor parallelism, other balancers and other schedules are tried.
    4. The best are judged as `tools/plan.py` judges every plan; and so is every other planner's that did not rank far behind the
       best, so that this planner is not behind them.

    The search ends with `request.time_budget_seconds` of processor time, so that a busy machine finds the same plan later; step 4
    is included as far as it can be foreseen.
    Raises PlanError when nothing fits.
    """
    started, clock = time.perf_counter(), time.process_time()
    for scale in MEMORY_SCALES:
        search = PlanSearch(request.with_memory_scale(scale * request.memory_scale), began=clock)
        search.rank_others(tuple(OTHER_PLANNERS.values()))
        search.rank_layouts()
        if search.ranked:
            break
    search.vary_best()
    best = search.choose()
    return replace(
        best.run,
        planner="braid",
        objective_seconds=best.prediction.iteration_seconds,
        planning_seconds=time.perf_counter() - started,
        notes=_notes(search),
    )


def _notes(search: PlanSearch) -> tuple[str, ...]:
    """Describe the best few, best first."""
    top = sorted(search.final, key=lambda each: each.key)[:NUM_REPORTED]
    counted = f"{search.num_estimated} layouts estimated, {len(search.seen)} runs simulated"
    return (counted, *(describe(each) for each in top))
