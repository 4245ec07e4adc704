"""Simulations of a search: quick ones for ranking, whole ones for judging; each is counted in nominal seconds, and done once.

Microbatch size and balancer of another planner are tuned by them, so that planners are compared as their users would tune them.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from statistics import fmean

from multimodal.cost.layers.layer import Recompute
from multimodal.cost.memoize import memoized
from multimodal.plan.planners.allowed_sizes import micro_batch_sizes
from multimodal.plan.planners.estimate.unit_layout import unit_plan_times
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.plan.planners.search.layout_search import efficient_first
from multimodal.plan.planners.search.plan_to_fit import Planner, PredictedRun, describe, plan_to_fit
from multimodal.plan.planners.search.prediction import Prediction, predict_run
from multimodal.plan.planners.search.run_variants import Placed, other_balances, placements, with_first_balance
from multimodal.plan.planners.search.simulated_part import FINAL, QUICK, RANKING, Fidelity, nominal_seconds
from multimodal.values.errors import BraidError

MISFIT = 1.1
"""Factor on the quick estimate of a run that did not fit when ranked; it also applies to others of its kind."""
CONCAVITY = 0.95
"""Average microbatches may be slower than the mean of different ones by this factor: some have no items of a unit at all."""
HEAVY_BUDGET = 2.0
"""Factor on the time budget where some samples are very heavy."""
OVERHEAD = 1.15
"""Nominal seconds of the whole search over those of its simulations."""
HEAVY = 3.0
"""Ratio of the LLM's heaviest sample to an efficient microbatch, in tokens, from which a part of a step is unreliable."""
OF_HEAVY_SAMPLES = {QUICK: RANKING, RANKING: Fidelity("ranked whole", 1.0, is_checked=False)}
"""Fidelity that replaces another one where some samples are very heavy: part of such a step says little about the whole."""


@dataclass
class Trials:
    """The runs that have been simulated for a request, and the nominal seconds of a search.

    Seconds are counted from the sizes of its work instead of measured by a clock, so a search ends at the same point on any
    machine, fast, slow or busy, with C++ kernels and without.
    """

    request: PlanningRequest
    spent_seconds: float = 0.0
    found: dict[tuple[str, Fidelity], PredictedRun | None] = field(default_factory=dict)
    """Simulated runs; None: the run is impossible, or does not fit the memory."""
    _placed: dict[str, Placed] = field(default_factory=dict, repr=False)

    @cached_property
    def budget_seconds(self) -> float:
        """The request's time budget; more where some samples are very heavy, since every simulation is larger there."""
        return self.request.time_budget_seconds * (HEAVY_BUDGET if self.has_heavy_samples else 1.0)

    def left(self, share: float) -> float:
        """Return the seconds until this share of the budget is used."""
        return share * self.budget_seconds - self.spent_seconds

    def predict(self, run: PlannedRun, request: PlanningRequest, *, fidelity: Fidelity) -> Prediction:
        """Simulate a run, and count it; raises ScheduleError or AssignmentError if the run is impossible."""
        used = OF_HEAVY_SAMPLES.get(fidelity, fidelity) if self.has_heavy_samples else fidelity
        self.spent_seconds += OVERHEAD * nominal_seconds(run, request, used)
        return predict_run(run, request, fidelity=used)

    @cached_property
    def has_heavy_samples(self) -> bool:
        """True if some sample has several times the tokens of a microbatch that makes layers efficient."""
        size = efficient_first(self.request, micro_batch_sizes(self.request))[0]
        tokens = self.request.loads.of_samples[self.request.graph.backbone.name][:, 0]
        return bool(tokens.max() > HEAVY * size * tokens.mean())

    @property
    def cost_of_a_glance(self) -> float:
        """Times that the largest quick simulation is larger than where part of a step says enough about the whole."""
        return OF_HEAVY_SAMPLES[QUICK].share / QUICK.share if self.has_heavy_samples else 1.0

    def least_step_seconds(self, run: PlannedRun) -> float:
        """Return a lower bound of the run's step for all balancers and schedules: the busiest ranks' average work. O(stages)."""
        like_run = self._request_of(run.micro_batch_size, run.recompute, run.tp_comm_overlap)
        per_microbatch = self.request.global_batch_size / run.micro_batch_size
        busy: dict[int, float] = defaultdict(float)
        for name, unit in run.plan.units.items():
            seconds = unit_plan_times(like_run, name, unit)
            for replica in unit.replicas:
                for stage, each in zip(replica.stages, seconds, strict=True):
                    busy[stage.ranks[0]] += each * per_microbatch / unit.data_parallel_size
        return CONCAVITY * max(busy.values())

    @memoized
    def _request_of(self, size: int, recompute: Recompute | None, tp_comm_overlap: bool) -> PlanningRequest:
        return self.request.changed(micro_batch_size=size, recompute=recompute, tp_comm_overlap=tp_comm_overlap)

    def try_run(self, run: PlannedRun, fidelity: Fidelity) -> PredictedRun | None:
        """Simulate a run unless it has been simulated; None if it does not fit the memory, or is impossible."""
        key = run.key, fidelity
        if key not in self.found:
            try:
                self.keep(PredictedRun(run, self.predict(run, self.request, fidelity=fidelity)), fidelity)
            except BraidError:
                self.found[key] = None
        return self.found[key]

    def keep(self, tried: PredictedRun, fidelity: Fidelity) -> None:
        """Record a simulated run; report it if it is better than all others of the same fidelity that fit."""
        fits = tried.prediction.peak_memory_bytes <= self.request.memory_bytes
        fits = fits and self.request.allows_num_gpus(tried.run.num_gpus)
        if fits and self.request.on_progress and all(tried.key < each.key for each in self.fitting(fidelity)):
            spent = f"{self.spent_seconds:.0f} of {self.budget_seconds:g} s"
            self.request.on_progress(f"{spent}: best so far, {fidelity.name}: {describe(tried)}")
        self.found[tried.run.key, fidelity] = tried if fits else None

    def fitting(self, fidelity: Fidelity) -> list[PredictedRun]:
        """Return the simulated runs that fit, the shortest step first."""
        fitting = (each for (_, found_at), each in self.found.items() if found_at == fidelity and each is not None)
        return sorted(fitting, key=lambda each: each.key)

    def placed(self, run: PlannedRun) -> Placed:
        """Return the kind of a run's plan: quick simulations have about the same error for all of a kind."""
        if run.key not in self._placed:
            self._placed[run.key] = placements(run, self.request), run.has_virtual_stages
        return self._placed[run.key]

    def corrections(self) -> dict[Placed, float]:
        """Return, for each kind of plan, the mean ratio of closer simulations to quick ones of the same runs."""
        ratios: dict[Placed, list[float]] = {}
        for (key, fidelity), ranked in self.found.items():
            glance = self.found.get((key, QUICK)) if fidelity == RANKING else None
            if glance is not None:
                ratio = ranked.prediction.iteration_seconds / glance.prediction.iteration_seconds if ranked else MISFIT
                ratios.setdefault(self.placed(glance.run), []).append(ratio)
        return {kind: fmean(found) for kind, found in ratios.items()}

    def is_misfit(self, run: PlannedRun) -> bool:
        """Return True if a run did not fit when it was ranked, whatever the quick simulation said."""
        return (run.key, RANKING) in self.found and self.found[run.key, RANKING] is None

    def expected(self) -> list[PredictedRun]:
        """Return the runs that fit, by their ranked or else corrected quick seconds; misfits as if they took longer."""
        factors, ranked = self.corrections(), {each.run.key: each for each in self.fitting(RANKING)}

        def seconds(glance: PredictedRun) -> float:
            factor = factors.get(self.placed(glance.run), 1.0) * (MISFIT if self.is_misfit(glance.run) else 1.0)
            return factor * glance.prediction.iteration_seconds

        glances = (each for each in self.fitting(QUICK) if each.run.key not in ranked)
        found = [(each.prediction.iteration_seconds, each) for each in ranked.values()]
        return [each for _, each in sorted([*found, *((seconds(each), each) for each in glances)], key=lambda entry: entry[0])]


def simulate_run(run: PlannedRun, request: PlanningRequest) -> tuple[PredictedRun | None, float]:
    """Simulate a run about as runs are ranked; None if it is impossible or does not fit; and the nominal seconds of that."""
    fidelity = RANKING._replace(kept_replicas=1)
    nominal = nominal_seconds(run, request, fidelity)
    try:
        prediction = predict_run(run, request, fidelity=fidelity)
    except BraidError:
        return None, nominal
    return PredictedRun(run, prediction) if prediction.peak_memory_bytes <= request.planned_memory_bytes else None, nominal


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
    return sorted(filter(None, (trials.try_run(each.run, RANKING) for each in promising)), key=lambda each: each.key)


def judge_tuned(planner: Planner, tuned: Sequence[PredictedRun], trials: Trials) -> PredictedRun:
    """Return the first of a planner's tuned runs that fits the memory when it is judged; raises PlanError if none does."""
    found = next(filter(None, (trials.try_run(each.run, FINAL) for each in tuned)), None)
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
