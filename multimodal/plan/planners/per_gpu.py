"""Uses fewer GPUs than there are where each of them then trains more tokens a second."""

from collections.abc import Callable
from dataclasses import replace

from multimodal.plan.planners.plan_run import plan_run
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.plan.planners.simulate_run import Prediction
from multimodal.values.errors import PlanError

NUM_STEPS = 8
"""Eighths of the GPUs are tried."""


def plan_per_gpu(
    planner: Callable[[PlanningRequest], PlannedRun], request: PlanningRequest, *, max_actions: int | None
) -> tuple[PlannedRun, Prediction]:
    """Plan for 8/8, 7/8, ... 1/8 of the GPUs, and return the plan with most tokens per second and GPU.

    Of equals, the one with more GPUs. A search by simulation gets its share of the time budget for each.
    Raises PlanError when no number of GPUs is enough.
    """
    sizes = sorted({max(1, request.num_gpus * step // NUM_STEPS) for step in range(1, NUM_STEPS + 1)}, reverse=True)
    budget = request.time_budget_seconds / len(sizes)
    best: tuple[PlannedRun, Prediction] | None = None
    problem: PlanError | None = None
    seconds = 0.0
    for size in sizes:
        smaller = replace(request, num_gpus=size, time_budget_seconds=budget)
        try:
            run, prediction = plan_run(planner, smaller, max_actions=max_actions)
        except PlanError as found:
            problem = problem or found
            break
        seconds += run.planning_seconds
        if best is None or prediction.tokens_per_second_per_gpu > best[1].tokens_per_second_per_gpu * (1 + 1e-9):
            best = run, prediction
    if best is None:
        assert problem is not None
        raise problem
    return replace(best[0], planning_seconds=seconds), best[1]
