"""Tunes microbatch size and balancer for another planner, so that planners are compared as their users would tune them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from multimodal.plan.planners.allowed_sizes import micro_batch_sizes
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.plan.planners.search.layout_search import efficient_first
from multimodal.plan.planners.search.plan_to_fit import Planner, PredictedRun, plan_to_fit
from multimodal.plan.planners.search.prediction import Prediction
from multimodal.plan.planners.search.run_variants import other_balances, with_first_balance
from multimodal.plan.planners.search.simulated_part import FINAL, QUICK, RANKING
from multimodal.plan.planners.search.trials import Trials
from multimodal.values.errors import BraidError

NUM_RANKED = 3
"""Runs of a planner that are simulated more closely, to choose the one that is judged."""
SECONDS_PER_PLANNED_GPU = 0.0005
"""Nominal seconds of planning once, divided by the number of GPUs."""
FAR, PROMISING = 1.4, 1.2
"""Plans that seem this many times as long as a known run are not tried with other balancers; of these, only the best one is
simulated more closely, since a quick simulation may be that inaccurate."""
HOPELESS, SLOWLY = 2.0, 0.8
"""Beyond this many times a known run, nothing is simulated more closely, and the next microbatch size is tried only if the last
one shortened steps to this share."""


class HopelessError(BraidError):
    """No run of this plan can be as short as a known one."""

    def __init__(self, least_seconds: float) -> None:
        super().__init__(f"a step takes at least {least_seconds:g} s")
        self.least_seconds = least_seconds


def plan_tuned(planner: Planner, request: PlanningRequest) -> PredictedRun:
    """Return a planner's plan with the best microbatch size, unless fixed, and balancer, judged; raises PlanError."""
    started = time.perf_counter()
    trials = Trials(request)
    found = judge_tuned(planner, tune(planner, trials), trials)
    return found._replace(run=replace(found.run, planning_seconds=time.perf_counter() - started))


def tune(planner: Planner, trials: Trials, *, below: float = float("inf")) -> list[PredictedRun]:
    """Return a planner's runs from a search over microbatch sizes and balancers, the shortest step first.

    For each size the planner plans anew (`climb`). The best plan is tried with all balancers that suit it, and the best few are
    simulated more closely. below: runs whose step cannot be shorter than this many seconds, or seems far longer, are left out.
    """
    sizes = micro_batch_sizes(trials.request)
    found: dict[int, list[PredictedRun]] = {}
    seconds: dict[int, float] = {}

    def look_at(size: int) -> float:
        found[size], seconds[size] = _runs_of_size(planner, trials, size, below)
        return seconds[size]

    climb(sizes, look_at, first=sizes.index(efficient_first(trials.request, sizes)[0]), below=below)
    best = min((each for runs in found.values() for each in runs), key=lambda each: each.key, default=None)
    if best and best.prediction.iteration_seconds <= FAR * below:
        others = (trials.try_run(run, QUICK) for run in other_balances(best.run, trials.request))
        found[0] = list(filter(None, others))
    ordered = sorted((each for runs in found.values() for each in runs), key=lambda each: each.key)
    near = [each for each in ordered[:NUM_RANKED] if each.prediction.iteration_seconds <= PROMISING * below] or ordered[:1]
    promising = (each for each in near if each.prediction.iteration_seconds <= HOPELESS * below)
    closer = filter(None, (trials.try_run(each.run, RANKING) for each in promising))
    return sorted(closer, key=lambda each: each.key)


def judge_tuned(planner: Planner, tuned: Sequence[PredictedRun], trials: Trials) -> PredictedRun:
    """Return the first of a planner's tuned runs that fits the memory when it is judged; raises PlanError if none does."""
    judged = (trials.try_run(each.run, FINAL) for each in tuned)
    found = next(filter(None, judged), None)
    return found or plan_to_fit(planner, trials.request, predict=partial(trials.predict, fidelity=FINAL))


def climb(sizes: Sequence[int], look_at: Callable[[int], float], *, first: int, below: float) -> None:
    """Try sizes from an efficient one on, larger ones first, while they are better, and not hopelessly far above `below`."""
    best = look_at(sizes[first])
    larger, smaller = sizes[first + 1 :], sizes[:first][::-1]
    for direction in (larger, smaller):
        for size in direction:
            seconds = look_at(size)
            if seconds > (best if best <= HOPELESS * below else SLOWLY * best):
                break
            best = seconds


def _runs_of_size(planner: Planner, trials: Trials, size: int, below: float) -> tuple[list[PredictedRun], float]:
    """Return the planner's plan for a microbatch size with the balancers that are tried first, and the shortest step."""

    def predict(run: PlannedRun, request: PlanningRequest) -> Prediction:
        least = trials.least_step_seconds(run)
        if least > below:
            raise HopelessError(least)
        return trials.predict(run, request, fidelity=QUICK)

    trials.spent_seconds += SECONDS_PER_PLANNED_GPU * trials.request.num_gpus
    try:
        planned = plan_to_fit(planner, trials.request.changed(micro_batch_size=size), predict=predict)
    except HopelessError as problem:
        return [], problem.least_seconds
    except BraidError:
        return [], float("inf")
    trials.spent_seconds += planned.run.nominal_seconds
    trials.keep(planned, QUICK)
    balanced = with_first_balance(planned.run, trials.request)
    runs = [planned, *filter(None, [trials.try_run(balanced, QUICK) if balanced.balance != planned.run.balance else None])]
    return runs, min(each.prediction.iteration_seconds for each in runs)
