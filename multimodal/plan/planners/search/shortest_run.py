"""Simulates runs for planners whose formula cannot decide between them."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.plan.planners.search.plan_to_fit import PredictedRun
from multimodal.plan.planners.search.prediction import predict_run
from multimodal.plan.planners.search.run_variants import first_balances, placements
from multimodal.plan.planners.search.simulated_part import nominal_seconds
from multimodal.plan.planners.search.trials import RANKING
from multimodal.values.errors import BraidError


class Simulated(NamedTuple):
    """The result of simulating a run, and the nominal seconds that the simulation took."""

    predicted: PredictedRun | None
    """None if the run is impossible, or does not fit the memory."""
    nominal_seconds: float


def simulate_run(run: PlannedRun, request: PlanningRequest) -> Simulated:
    """Simulate a run with the fidelity by which runs are ranked."""
    size: dict[str, Any] = {
        "max_actions": int(request.max_actions * RANKING.share),
        "filling": RANKING.filling,
        "kept_replicas": 1,
    }
    nominal = nominal_seconds(run, request, **size, num_batches=1)
    try:
        prediction = predict_run(run, request, **size, is_checked=False)
    except BraidError:
        return Simulated(None, nominal)
    is_fitting = prediction.peak_memory_bytes <= request.planned_memory_bytes
    return Simulated(PredictedRun(run, prediction) if is_fitting else None, nominal)


def shortest_run(runs: Iterable[PlannedRun], request: PlanningRequest) -> PlannedRun:
    """Return the run with the shortest step, each simulated with the balancer that is tried first on its plan.

    A single run is not simulated; the first is returned if none fits the memory.
    """
    waiting = list(runs)
    if len(waiting) == 1:
        return waiting[0]
    found = [simulate_run(with_first_balance(run, request), request) for run in waiting]
    ranked = [(each.predicted.key, index) for index, each in enumerate(found) if each.predicted is not None]
    _, chosen = min(ranked, default=((0.0, 0), 0))
    return replace(waiting[chosen], nominal_seconds=sum(each.nominal_seconds for each in found))


def with_first_balance(run: PlannedRun, request: PlanningRequest) -> PlannedRun:
    """Return the run with the balancer that is tried first on plans of its placement."""
    return replace(run, balance=next(iter(first_balances(placements(run, request)[0], request)), run.balance))
