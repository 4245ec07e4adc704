"""Braid: searches the union of all layouts with the real lengths, and lets the simulator decide."""

import time
from collections.abc import Sequence
from dataclasses import replace

from multimodal.plan.planners.plan_run import Planner, describe
from multimodal.plan.planners.plan_search import PlanSearch
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest

MEMORY_SCALES = (1.0, 0.85, 0.7)
"""Shares of the memory that estimates may fill, the next one where nothing fits when it is simulated."""
NUM_REPORTED = 5


def plan_braid(request: PlanningRequest, others: Sequence[Planner]) -> PlannedRun:
    """Plan by search: enumerate layouts in closed form, prune by memory and by a lower bound, rank by simulation.

    1. The other planners' plans are simulated on a part of the batch.
    2. So are the best layouts of `best_layouts` (disaggregated, colocated, virtual stages, microbatch sizes, and context parallel
       sizes where sequences are long), with the schedules and balancers that suit them. What comes next is the layout with the
       shortest estimate, corrected by how far off estimates of its kind have been.
    3. On the best ones, overlapped tensor parallelism and all other balancers and schedules are tried whose row says that they
       suit the plan.
    4. The best are judged as `tools/plan.py` judges every plan; and so is every other planner's that did not rank far behind the
       best, so that this planner is not behind them.

    The search ends with `request.time_budget_seconds` of processor time, so that a busy machine finds the same plan later; step 4
    is included as far as it can be foreseen.
    others: the planners of step 1. Raises PlanError when nothing fits.
    """
    began = time.process_time()
    for scale in MEMORY_SCALES:
        search = PlanSearch(request.with_memory_scale(scale * request.memory_scale), began=began)
        search.rank_others(others)
        search.rank_layouts()
        if search.ranked:
            break
    search.vary_best()
    best = search.choose()
    return replace(best.run, objective_seconds=best.prediction.iteration_seconds, notes=_notes(search))


def _notes(search: PlanSearch) -> tuple[str, ...]:
    """Describe the best few, best first."""
    top = sorted(search.final, key=lambda each: each.key)[:NUM_REPORTED]
    counted = f"{search.num_estimated} layouts estimated, {len(search.seen)} runs simulated"
    return (counted, *(describe(each) for each in top))
