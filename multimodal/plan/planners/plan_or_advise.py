"""Runs a planner and, if nothing fits, searches for a sufficient number of GPUs by planning with it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from multimodal.plan.planners import PLANNERS, PlannerRow
from multimodal.plan.planners.allowed_sizes import fewest_enough
from multimodal.plan.planners.estimate.unit_options import list_options
from multimodal.plan.planners.idle_units import without_idle_units
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.plan.planners.search.plan_to_fit import PredictedRun, memory_concessions, plan_to_fit
from multimodal.values.errors import BraidError, NothingFitsError, PlanError
from multimodal.values.plan import MOST_RANKS

LARGEST_SEARCH = 1 << 14
"""Most GPUs up to which a sufficient number is searched."""
SEARCH_BUDGET_SECONDS = 1.0
"""Nominal seconds that a planner that simulates may use for one number of GPUs."""


def plan_or_advise(
    planner: PlannerRow, request: PlanningRequest, *, plan: Callable[[PlanningRequest], PredictedRun] | None = None
) -> PredictedRun:
    """Plan (by default `plan_to_fit`); if nothing fits, raise PlanError with enough GPUs, or with the unit that never fits."""
    try:
        return plan(request) if plan else plan_to_fit(planner, request)
    except NothingFitsError as problem:
        if stuck := _stuck_unit(request):
            raise PlanError(
                f"{problem}; unit '{stuck}' does not fit at any tensor, pipeline or data parallel size that is allowed; use GPUs "
                "with more memory, freeze it, lower the memory headroom, or unfix its sizes"
            ) from None
        # More GPUs do not help every planner, so smaller sufficient numbers may exist.
        too_few, works = request.num_gpus, partial(_works, planner, request)
        enough = fewest_enough(works, too_few=too_few, first=2 * too_few, most=LARGEST_SEARCH)
        if enough is None:
            raise PlanError(
                f"{problem}; nor do up to {LARGEST_SEARCH:,} GPUs under this planner's rules and the fixed sizes; use GPUs with "
                "more memory, another planner (disttrain, braid), or fewer fixed sizes"
            ) from None
        raise PlanError(f"{problem}; {enough} GPUs would be enough") from None


def _stuck_unit(request: PlanningRequest) -> str | None:
    """Return a unit that does not fit on any number of GPUs by itself, with every concession to memory."""
    *_, last = memory_concessions(without_idle_units(replace(request, num_gpus=LARGEST_SEARCH)))
    forms = [last, replace(last, sharding="optim_grads_params")] if request.sharding is None else [last]
    fitting = {unit for form in forms for unit in last.graph.unit_names if len(list_options(form, unit, max_gpus=LARGEST_SEARCH))}
    return next((unit for unit in last.graph.unit_names if unit not in fitting), None)


def _works(planner: PlannerRow, request: PlanningRequest, num_gpus: int) -> bool:
    """Return True if the planner finds a plan.

    A planner that searches by simulation is asked for a plan with the least memory, one sample per microbatch and full
    recomputation; it also counts as successful if any other planner has a plan that can be run.
    """

    def find(row: PlannerRow, asked: PlanningRequest) -> PredictedRun | None:
        try:
            return plan_to_fit(row, asked)
        except BraidError:
            return None

    if num_gpus > MOST_RANKS:
        return False
    asked = replace(request, num_gpus=num_gpus)
    if not planner.searches_others:
        return find(planner, asked) is not None
    *_, least = memory_concessions(replace(asked, micro_batch_size=request.default_micro_batch_size))
    others = (find(row, least) for row in PLANNERS.values() if not row.searches_others)
    if any(found is not None and not found.run.repeats_encoders for found in others):
        return True
    budget = min(request.time_budget_seconds, SEARCH_BUDGET_SECONDS)
    return find(planner, replace(least, time_budget_seconds=budget, on_progress=None)) is not None
