"""Runs a planner until its plan's simulated peak of memory fits, and returns the plan with what it will reach."""

from collections.abc import Callable
from dataclasses import replace

from multimodal.cost.layer_costs import Recompute
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.plan.planners.simulate_run import Prediction, predict_run
from multimodal.values.errors import PlanError
from multimodal.values.plan import validate_plan

MOST_ROUNDS = 5
RECOMPUTES: tuple[Recompute | None, ...] = (None, "full")
MARGIN = 0.98
"""Aim a little below the limit in the next round."""


def plan_run(
    planner: Callable[[PlanningRequest], PlannedRun], request: PlanningRequest, *, max_actions: int | None, num_batches: int = 1
) -> tuple[PlannedRun, Prediction]:
    """Plan, simulate, and plan again with less memory to count on while the simulated peak does not fit.

    Planners estimate activations in closed form; real batches and schedules can need more. Where nothing fits, whole layers are
    computed again in their backward, unless the request says what is. max_actions, num_batches: as for `predict_run`.
    Raises PlanError, saying what would fit, when nothing does.
    """
    problem: PlanError | None = None
    for recompute in (request.recompute,) if request.recompute else RECOMPUTES:
        try:
            return _plan_in_memory(
                planner, replace(request, recompute=recompute), max_actions=max_actions, num_batches=num_batches
            )
        except PlanError as found:
            problem = problem or found
    assert problem is not None
    raise problem


def _plan_in_memory(
    planner: Callable[[PlanningRequest], PlannedRun], request: PlanningRequest, *, max_actions: int | None, num_batches: int
) -> tuple[PlannedRun, Prediction]:
    scaled, seconds = request, 0.0
    for _ in range(MOST_ROUNDS):
        run = planner(scaled)
        seconds += run.planning_seconds
        validate_plan(run.plan, graph=request.graph, world_size=run.num_gpus)
        prediction = predict_run(run, request, max_actions=max_actions, num_batches=num_batches)
        if prediction.peak_memory_bytes <= request.memory_bytes:
            return replace(run, planning_seconds=seconds), prediction
        excess = prediction.peak_memory_bytes / request.memory_bytes
        scaled = scaled.with_memory_scale(scaled.memory_scale * MARGIN / excess)
    raise PlanError(
        f"planner '{run.planner}': its plans need {prediction.peak_memory_bytes / 1e9:.3g} GB on some GPU where "
        f"{request.memory_bytes / 1e9:.3g} GB may be used, after {MOST_ROUNDS} attempts with less; use more GPUs, a smaller "
        "microbatch, or lower the memory headroom"
    )
