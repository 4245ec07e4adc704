"""Runs a planner until its plan's simulated memory peak fits, and compares the predictions of runs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from multimodal.cost.layers.layer import Recompute
from multimodal.cost.token_shares import DEFAULT_BLOCK_SIZE
from multimodal.plan.planners.allowed_sizes import context_parallel_sizes
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import LARGEST_CONTEXT_PARALLEL, PlanningRequest
from multimodal.plan.planners.search.prediction import Prediction, judge_run
from multimodal.values.errors import NothingFitsError, PlanError
from multimodal.values.validate import validate_plan

MOST_ROUNDS = 5
RECOMPUTES: tuple[Recompute | None, ...] = (None, "full")
FALLBACK_SHARE_TOKENS = 8 * DEFAULT_BLOCK_SIZE
"""Fewest tokens of context parallel ranks if nothing fits otherwise."""
MARGIN = 0.98
"""Factor on the next round's limit, to end slightly below it."""
Planner = Callable[[PlanningRequest], PlannedRun]
"""Plans; raises PlanError, with advice on what would fit, if nothing does."""


class PredictedRun(NamedTuple):
    """A run with its prediction."""

    run: PlannedRun
    prediction: Prediction

    @property
    def key(self) -> tuple[float, int, int]:
        """The order of runs: shorter steps first; of equals, which differ by rounding at most, fewer GPUs, then less memory."""
        return float(f"{self.prediction.iteration_seconds:.9g}"), self.run.num_gpus, self.prediction.peak_memory_bytes


def plan_to_fit(
    planner: Planner, request: PlanningRequest, *, predict: Callable[[PlannedRun, PlanningRequest], Prediction] = judge_run
) -> PredictedRun:
    """Plan, simulate, and plan again with less memory while the simulated peak does not fit.

    Planners estimate activations in closed form; real batches and schedules can need more. If nothing fits, full recomputation is
    tried, unless the request chooses; if that is not enough, context parallelism is allowed, even for planners that otherwise do
    not use it. predict: simulates a run. Raises the PlanError of the last attempt if nothing fits.
    """
    *attempts, last = memory_concessions(request)
    for attempt in attempts:
        try:
            return _plan_attempt(planner, attempt, predict)
        except PlanError:
            pass
    return _plan_attempt(planner, last, predict)


def memory_concessions(request: PlanningRequest) -> Iterator[PlanningRequest]:
    """Yield the request with increasing concessions to memory."""
    recomputes = (request.recompute,) if request.recompute else RECOMPUTES
    spread = request.changed(most_context_parallel=LARGEST_CONTEXT_PARALLEL, least_share_tokens=FALLBACK_SHARE_TOKENS)
    units = request.graph.unit_names
    differs = any(context_parallel_sizes(spread, unit) != context_parallel_sizes(request, unit) for unit in units)
    for given, recompute in product((request, spread) if differs else (request,), recomputes):
        yield given.changed(recompute=recompute)


def _plan_attempt(
    planner: Planner, request: PlanningRequest, predict: Callable[[PlannedRun, PlanningRequest], Prediction]
) -> PredictedRun:
    scaled, seconds = request, 0.0
    for _ in range(MOST_ROUNDS):
        run = planner(scaled)
        seconds += run.planning_seconds
        validate_plan(run.plan, graph=request.graph, world_size=run.num_gpus)
        prediction = predict(run, request)
        if prediction.peak_memory_bytes <= request.memory_bytes:
            return PredictedRun(replace(run, planning_seconds=seconds), prediction)
        excess = prediction.peak_memory_bytes / request.memory_bytes
        scaled = scaled.changed(memory_scale=scaled.memory_scale * MARGIN / excess)
    raise NothingFitsError(
        f"planner '{run.planner}': its plans need {prediction.peak_memory_bytes / 1e9:.3g} GB on some of {request.num_gpus} GPUs "
        f"after {MOST_ROUNDS} attempts with less, beyond {request.memory_text}"
    )


def describe(planned: PredictedRun) -> str:
    """Return one line: time, MFU, memory, distance to the ideal and to the floor, by kind, and the units' sizes."""
    run, prediction = planned
    seconds, least = prediction.iteration_seconds, (prediction.ideal_seconds, prediction.floor_seconds)
    ideal, floor = (seconds / each - 1 if each else 0.0 for each in least)
    return (
        f"{prediction.iteration_seconds:.4g} s, MFU {prediction.mfu:.1%}, {prediction.peak_memory_bytes / 1e9:.3g} GB, "
        f"{ideal:.1%} above ideal, {floor:.1%} above floor ({describe_kinds(prediction)}): {run.plan.describe_sizes()}; "
        f"{run.schedule}{'' if run.can_run else ' with more work, never run'}, --balance {run.balance}, "
        f"microbatch {run.micro_batch_size}"
        + "".join(f", of {unit} {size} items" for unit, size in run.encoder_micro_batch_sizes)
        + (f", recomputing {run.recompute}" if run.recompute else "")
        + (", overlapped tensor parallelism" if run.tp_comm_overlap else "")
        + (", weights sharded" if run.sharding != "optim" else "")
        + (f" (found by {run.planner})" if run.planner else "")
    )


def describe_kinds(prediction: Prediction) -> str:
    """Return the share of the step's time of each kind of time above the floor, if it is not negligible."""
    shares = (f"{kind} {share:.1%}" for kind, share in prediction.above_floor.items() if share >= 0.0005)
    return ", ".join(shares) or "nothing"


NUM_STEPS = 8
"""Number of sizes that are tried: eighths of the GPUs."""


def plan_per_gpu(plan: Callable[[PlanningRequest], PredictedRun], request: PlanningRequest) -> PredictedRun:
    """Return the plan for 8/8, ..., 1/8 of the GPUs, the first with most tokens per second and GPU; raises PlanError."""
    sizes = sorted({max(1, request.num_gpus * step // NUM_STEPS) for step in range(1, NUM_STEPS + 1)}, reverse=True)
    return plan_sizes(plan, request, sizes, worth=lambda each: float(f"{each.prediction.tokens_per_second_per_gpu:.9g}"))


def plan_sizes(
    plan: Callable[[PlanningRequest], PredictedRun],
    request: PlanningRequest,
    sizes: Sequence[int],
    *,
    worth: Callable[[PredictedRun], float],
) -> PredictedRun:
    """Return the plan that is worth most of those for several numbers of GPUs, which share the time budget; the first of equals.

    Sizes for which nothing fits are left out. Raises the PlanError of the first size if nothing fits at any.
    """
    budget = request.time_budget_seconds / len(sizes)
    found, problems = list[PredictedRun](), list[PlanError]()
    for size in sizes:
        try:
            found.append(plan(request.changed(num_gpus=size, time_budget_seconds=budget)))
        except PlanError as problem:
            problems.append(problem)
    if not found:
        raise problems[0]
    best = max(found, key=worth)
    return best._replace(run=replace(best.run, planning_seconds=sum(each.run.planning_seconds for each in found)))
