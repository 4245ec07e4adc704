"""Runs a planner until its plan's simulated peak of memory fits, and returns the plan with what it will reach."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product

from multimodal.cost.layers.layer import Recompute
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import BLOCK_SIZE, LARGEST_CONTEXT_PARALLEL, PlanningRequest
from multimodal.plan.planners.simulate_run import FILLING, Prediction, predict_run
from multimodal.values.errors import PlanError
from multimodal.values.plan import validate_plan

MOST_ROUNDS = 5
RECOMPUTES: tuple[Recompute | None, ...] = (None, "full")
FALLBACK_SHARE_TOKENS = 8 * BLOCK_SIZE
"""Where nothing fits, context parallel ranks may get as few tokens."""
MARGIN = 0.98
"""Aim a little below the limit in the next round."""


def plan_run(
    planner: Callable[[PlanningRequest], PlannedRun],
    request: PlanningRequest,
    *,
    max_actions: int | None,
    num_batches: int | None = None,
    filling: float = FILLING,
    is_checked: bool = True,
) -> tuple[PlannedRun, Prediction]:
    """Plan, simulate, and plan again with less memory to count on while the simulated peak does not fit.

    Planners estimate activations in closed form; real batches and schedules can need more. Where nothing fits, whole layers are
    computed again in their backward, unless the request says what is; and where that is not enough, context parallelism is
    allowed, also to planners that do not look at it else. Keywords: as for `predict_run`;
    num_batches: the request's unless given.
    Raises PlanError, saying what would fit, when nothing does.
    """
    count = request.num_batches if num_batches is None else num_batches
    predict = partial(predict_run, max_actions=max_actions, num_batches=count, filling=filling, is_checked=is_checked)
    problem: PlanError | None = None
    for attempt in _attempts(request):
        try:
            return _plan_in_memory(planner, attempt, predict)
        except PlanError as found:
            problem = problem or found
    assert problem is not None
    raise problem


def _attempts(request: PlanningRequest) -> Iterator[PlanningRequest]:
    """Yield the request with what may be given up for memory, the least first."""
    recomputes = (request.recompute,) if request.recompute else RECOMPUTES
    spread = replace(request, most_context_parallel=LARGEST_CONTEXT_PARALLEL, least_share_tokens=FALLBACK_SHARE_TOKENS)
    requests = (request, spread) if _context_sizes(spread) != _context_sizes(request) else (request,)
    for given, recompute in product(requests, recomputes):
        yield replace(given, recompute=recompute)


def _context_sizes(request: PlanningRequest) -> list[tuple[int, ...]]:
    size = request.default_micro_batch_size
    return [request.context_parallel_sizes(unit, micro_batch_size=size) for unit in request.graph.unit_names]


def _plan_in_memory(
    planner: Callable[[PlanningRequest], PlannedRun],
    request: PlanningRequest,
    predict: Callable[[PlannedRun, PlanningRequest], Prediction],
) -> tuple[PlannedRun, Prediction]:
    scaled, seconds = request, 0.0
    for _ in range(MOST_ROUNDS):
        run = planner(scaled)
        seconds += run.planning_seconds
        validate_plan(run.plan, graph=request.graph, world_size=run.num_gpus)
        prediction = predict(run, request)
        if prediction.peak_memory_bytes <= request.memory_bytes:
            return replace(run, planning_seconds=seconds), prediction
        excess = prediction.peak_memory_bytes / request.memory_bytes
        scaled = scaled.with_memory_scale(scaled.memory_scale * MARGIN / excess)
    raise PlanError(
        f"planner '{run.planner}': its plans need {prediction.peak_memory_bytes / 1e9:.3g} GB on some GPU where "
        f"{request.memory_bytes / 1e9:.3g} GB may be used, after {MOST_ROUNDS} attempts with less; use more GPUs, a smaller "
        "microbatch, or lower the memory headroom"
    )
