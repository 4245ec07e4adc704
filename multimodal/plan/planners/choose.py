"""Picks the candidate with the shortest expected step among those that fit."""

from collections.abc import Iterable

from multimodal.plan.planners.candidate import Candidate, fits
from multimodal.plan.planners.infeasible import infeasible
from multimodal.plan.planners.layer_times import PlanningTimes
from multimodal.plan.planners.memory_estimate import MemoryEstimate
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.plan.planners.step_estimate import estimate_seconds, lower_bound_seconds


def choose_candidate(
    request: PlanningRequest, candidates: Iterable[Candidate], *, times: PlanningTimes, memory: MemoryEstimate, planner: str
) -> tuple[Candidate, float]:
    """Return the best candidate and its estimated seconds; of equals the one with fewer GPUs, then the earlier one.

    A candidate whose busiest lane alone works longer than the best step found is not looked at any further.
    Raises PlanError when none fits GPUs and memory.
    """
    best: tuple[float, int] | None = None
    chosen: Candidate | None = None
    for candidate in candidates:
        if candidate.num_gpus > request.num_gpus:
            continue
        if best is not None and lower_bound_seconds(request, times, candidate) > best[0]:
            continue
        rank = (estimate_seconds(request, times, candidate), candidate.num_gpus)
        if (best is None or rank < best) and fits(request, memory, candidate):
            best, chosen = rank, candidate
    if best is None or chosen is None:
        raise infeasible(request, planner=planner)
    return chosen, best[0]
