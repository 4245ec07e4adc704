"""Braid: searches the union of all layouts with the real lengths, and lets the simulator decide."""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

from multimodal.balance import BALANCERS, UNBALANCED, Placement, placements_of
from multimodal.plan.planners.layout_search import best_layouts
from multimodal.plan.planners.plan_to_fit import Planner, PredictedRun, describe, has_virtual_stages, plan_to_fit, run_key
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import LARGEST_CONTEXT_PARALLEL, PlanningRequest
from multimodal.plan.planners.prediction import FILLING, Prediction, nominal_seconds, predict_run
from multimodal.plan.planners.unit_layout import fold_stages
from multimodal.plan.planners.unit_options import infeasible
from multimodal.schedule.builders import BUILDERS, ScheduleRow
from multimodal.values.errors import BraidError

RANKING_SHARE = 0.1
"""The largest simulation that only ranks, as a share of `max_actions`."""
RANKING_FILLING = 2.0
"""Fewest times that such a simulation fills the pipelines."""
PROMISING = 1.25
"""Another planner's plan is judged in any case if its ranked step is at most this many times as long as the best one's."""
HOPELESS = 2.0
"""A plan whose step is this many times as long is not tried with another balancer."""
ESTIMATES_UNTIL = 0.3
"""Share of the budget after which layouts of no further microbatch size are estimated."""
SECONDS_PER_ESTIMATED_GPU = 0.01
"""Nominal seconds of estimating all layouts at one microbatch size, over the number of GPUs."""
OVERHEAD = 1.15
"""Nominal seconds of the whole search over those of its simulations."""
LAYOUTS_UNTIL, VARIANTS_UNTIL = 0.55, 0.75
"""Shares of the time budget after which no further layout, and no further variant of the best ones, is simulated."""
NUM_FINALISTS = 4
MOST_JUDGED = 12
"""Most runs that are judged, whatever the budget."""
MEMORY_SCALES = (1.0, 0.85, 0.7)
"""Shares of the memory that estimates may fill, the next one where nothing fits when it is simulated."""
NUM_REPORTED = 5
Form = tuple[str, str]
"""A schedule and a balancer."""


@dataclass
class SearchBudget:
    """The nominal seconds that a search may use up, counted from the sizes of what it looks at instead of by a clock.

    So a search ends at the same place on a fast machine and on a slow or busy one, with C++ kernels and without.
    """

    seconds: float
    spent_seconds: float = 0.0

    def left(self, share: float) -> float:
        """Return the seconds until this share of the budget is used."""
        return share * self.seconds - self.spent_seconds

    def predict(
        self, run: PlannedRun, request: PlanningRequest, *, max_actions: int | None, num_batches: int = 1, **options: Any
    ) -> Prediction:
        """Simulate a run as `predict_run` does, and count it, whether it fits or not."""
        filling = options.get("filling", FILLING)
        self.spent_seconds += OVERHEAD * nominal_seconds(
            run, request, max_actions=max_actions, num_batches=num_batches, filling=filling
        )
        return predict_run(run, request, max_actions=max_actions, num_batches=num_batches, **options)


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

    The search ends when `request.time_budget_seconds` of nominal work are used up (`SearchBudget`): the same inputs give the same
    plan on every machine, sooner or later. Step 4 is included as far as it can be foreseen.
    Interrupted from the keyboard (Ctrl-C), it returns the best plan so far; a second time, nothing.
    others: the planners of step 1. Raises PlanError when nothing fits.
    """
    budget = SearchBudget(request.time_budget_seconds)
    try:
        for scale in MEMORY_SCALES:
            search = PlanSearch(replace(request, memory_scale=scale * request.memory_scale), budget=budget)
            search.rank_others(others)
            search.rank_layouts()
            if search.ranked:
                break
        search.vary_best()
    except KeyboardInterrupt:
        if not search.ranked:
            raise
        search.is_interrupted = True
    best = search.choose()
    top = sorted(search.final, key=lambda each: each.key)[:NUM_REPORTED]
    counted = f"{search.num_estimated} layouts estimated, {len(search.seen)} runs simulated"
    counted += ", interrupted: the best so far" * search.is_interrupted
    notes = (counted, *map(describe, top))
    return replace(best.run, objective_seconds=best.prediction.iteration_seconds, notes=notes)


class PlanSearch:
    """A search: keeps the simulated runs, and chooses the next ones to simulate."""

    def __init__(self, request: PlanningRequest, *, budget: SearchBudget) -> None:
        self.others_request = request
        self.request = replace(request, most_context_parallel=max(request.most_context_parallel, LARGEST_CONTEXT_PARALLEL))
        self.budget = budget
        self.ranked: list[PredictedRun] = []
        self.others: list[tuple[float, Planner]] = []
        self.final: list[PredictedRun] = []
        self.judged: set[str] = set()
        self.seen: dict[str, PredictedRun | None] = {}
        self.num_estimated = 0
        self.is_interrupted = False

    def rank_others(self, planners: Sequence[Planner]) -> None:
        """Simulate the other planners' plans, and balanced ones where they do not balance.

        Each plans with less memory, and at last with recomputation, while its plan does not fit (`plan_to_fit`). What a planner
        cannot plan is left out, and so is a plan that no run could follow.
        """
        for planner in planners:
            try:
                planned = plan_to_fit(
                    planner,
                    self.others_request,
                    max_actions=self._ranking_actions // 3,
                    num_batches=1,
                    filling=RANKING_FILLING,
                    is_checked=False,
                    predict=self.budget.predict,
                )
            except BraidError:
                continue
            run, prediction = planned
            if not BUILDERS[run.schedule].can_train:
                continue
            self.others.append((prediction.iteration_seconds, planner))
            self._keep(planned)
            best = min(each.prediction.iteration_seconds for each in self.ranked) if self.ranked else math.inf
            if self.request.lengths_vary and run.balance == UNBALANCED and prediction.iteration_seconds < HOPELESS * best:
                placement = Placement.CHAIN if has_virtual_stages(run) else Placement.OWN_RANKS
                self.try_run(replace(run, balance=_first_balances(placement)[0]))

    def rank_layouts(self) -> None:
        """Simulate the most promising layouts while the budget lasts.

        A kind's estimates are corrected by the mean ratio of its simulations to them, those of a kind that has not been simulated
        by the smallest such ratio of any kind.
        """
        kinds = best_layouts(self.request, takes_more=self._takes_more_layouts)
        self.num_estimated = sum(map(len, kinds))
        position = dict.fromkeys(range(len(kinds)), 0)
        ratios: dict[int, list[float]] = {}
        forms: dict[int, Form] = {}
        while position and self.budget.left(LAYOUTS_UNTIL) > 0:
            least = min((min(found) for found in ratios.values()), default=1.0)
            expected = {
                index: kinds[index][place].objective_seconds * (fmean(ratios[index]) if index in ratios else least)
                for index, place in position.items()
            }
            index = min(position, key=lambda each: (expected[each], each))
            layout = kinds[index][position[index]]
            ranked = self._try_layout(layout, forms.get(index))
            if ranked:
                forms[index] = ranked.run.schedule, ranked.run.balance
                ratios.setdefault(index, []).append(ranked.prediction.iteration_seconds / layout.objective_seconds)
            position[index] += 1
            if position[index] == len(kinds[index]):
                del position[index]

    def _try_layout(self, layout: PlannedRun, form: Form | None) -> PredictedRun | None:
        """Rank a layout with a form, or with each that suits it; return the best."""
        runs = map(partial(self._formed, layout), self._forms(layout) if form is None else (form,))
        return min(filter(None, map(self.try_run, filter(None, runs))), key=lambda each: each.key, default=None)

    def _forms(self, layout: PlannedRun) -> Iterator[Form]:
        """Return the schedules and balancers to try on the first layout of a kind; the other layouts get the best of them.

        Those whose rows say so: where units share ranks and have equally many replicas, a sample's items can stay with it, and
        ranks meet in the end only; else units are balanced each by itself and run in phases, so that they meet seldom.
        """
        busy = [unit for name, unit in layout.plan.units.items() if name not in self.request.idle_units]
        for placement in placements_of(busy):
            balances = _first_balances(placement) if self.request.lengths_vary else (UNBALANCED,)
            if placement is Placement.PHASES:
                yield from ((self._phased(layout, balance), balance) for balance in balances)
                continue
            is_apart = placement is Placement.OWN_RANKS
            first = [name for name, row in self._fitting(layout) if is_apart and row.is_tried_first]
            yield from ((schedule, balance) for balance in balances for schedule in (*first, layout.schedule))

    def _fitting(self, run: PlannedRun) -> list[tuple[str, ScheduleRow]]:
        """List the schedules that are meant for a run's plan, those that keep least first."""
        has_several = has_virtual_stages(run)
        rows = [
            (name, row)
            for name, row in BUILDERS.items()
            if row.can_train and row.is_for(self.request.graph, has_virtual_stages=has_several)
        ]
        return sorted(rows, key=lambda entry: (not entry[1].is_tried_first, entry[1].in_flight))

    def _phased(self, layout: PlannedRun, balance: str) -> str:
        """Return the phased schedule with the fewest rounds that fits: the fewer, the less waits, and the more is kept."""
        phased = sorted((row.num_rounds, name) for name, row in BUILDERS.items() if row.num_rounds and row.can_train)
        names = [name for _, name in phased]
        if self._fits(layout, (names[-1], balance)):
            return next((name for name in names if self._fits(layout, (name, balance))), names[-1])
        return names[-1]

    def _fits(self, layout: PlannedRun, form: Form) -> bool:
        run = self._formed(layout, form)
        return run is not None and self.try_run(run) is not None

    def _formed(self, layout: PlannedRun, form: Form) -> PlannedRun | None:
        """Give a run a schedule, layers that run it, and a balancer; None if these do not suit the plan or the implementation."""
        schedule, balance = form
        row, plan = BUILDERS[schedule], layout.plan
        request = replace(self.request, sharding=layout.sharding)
        if row.is_folded:
            plan = fold_stages(plan)
        if not request.allows(schedule) or (row.layout is not None and not row.layout.is_met(request.graph, plan)):
            return None
        implementation = request.implementation(schedule)
        return replace(layout, plan=plan, schedule=schedule, balance=balance, transformer_impl=implementation)

    def _takes_more_layouts(self) -> bool:
        is_over = self.budget.left(ESTIMATES_UNTIL) <= 0
        if not is_over:
            self.budget.spent_seconds += SECONDS_PER_ESTIMATED_GPU * self.request.num_gpus
        return not is_over

    @property
    def _ranking_actions(self) -> int:
        return int(self.request.max_actions * RANKING_SHARE)

    def vary_best(self) -> None:
        """Try overlapped tensor parallelism, then balancers, then schedules, on the best layouts, while the budget lasts."""
        for vary in (self._overlapped, self._balances, self._schedules):
            for each in self.best(NUM_FINALISTS):
                for run in vary(each.run):
                    if self.budget.left(VARIANTS_UNTIL) < 0:
                        return
                    self.try_run(run)

    def _overlapped(self, run: PlannedRun) -> Iterator[PlannedRun]:
        """Local layers can hide tensor parallel collectives, which pays where products are large; and they keep more."""
        if run.has_tensor_parallelism and self.request.transformer_impl != "transformer_engine":
            yield replace(run, transformer_impl="local", tp_comm_overlap=True)

    def _balances(self, run: PlannedRun) -> Iterator[PlannedRun]:
        if not self.request.lengths_vary:
            return
        placements = placements_of([unit for name, unit in run.plan.units.items() if name not in self.request.idle_units])
        for name, row in sorted(BALANCERS.items(), key=lambda entry: not entry[1].tried_first_on):
            is_whole = row.keeps_samples_whole or not has_virtual_stages(run)
            if name != run.balance and is_whole and row.suits(placements):
                yield replace(run, balance=name)

    def _schedules(self, run: PlannedRun) -> Iterator[PlannedRun]:
        others = (self._formed(run, (name, run.balance)) for name, _ in self._fitting(run) if name != run.schedule)
        for other in filter(None, others):
            yield replace(other, transformer_impl="local", tp_comm_overlap=True) if run.tp_comm_overlap else other

    def try_run(self, run: PlannedRun) -> PredictedRun | None:
        """Simulate a part of the batch; None where it does not fit the memory, or the schedule not the layout."""
        key = run_key(run)
        if key not in self.seen:
            try:
                prediction = self.budget.predict(
                    run, self.request, max_actions=self._ranking_actions, filling=RANKING_FILLING, is_checked=False
                )
            except BraidError:
                self.seen[key] = None
            else:
                self._keep(PredictedRun(run, prediction))
        return self.seen[key]

    def _keep(self, ranked: PredictedRun) -> None:
        fits = ranked.prediction.peak_memory_bytes <= self.request.memory_bytes
        self.seen[run_key(ranked.run)] = ranked if fits else None
        if not fits:
            return
        if self.request.on_progress and all(ranked.key < each.key for each in self.ranked):
            self.request.on_progress(
                f"{self.budget.spent_seconds:.0f} of {self.budget.seconds:g} s: best so far {describe(ranked)}"
            )
        self.ranked.append(ranked)

    def best(self, count: int) -> list[PredictedRun]:
        """Return the best runs of those simulated so far."""
        return sorted(self.ranked, key=lambda each: each.key)[:count]

    def choose(self) -> PredictedRun:
        """Judge the best as every planner's plan is judged in the end, and return the best plan of all that fit.

        At least one is judged, then promising plans of other planners, then more of the search while one more can be expected to
        fit the budget, or none has fitted.
        """
        while self.is_interrupted and not self.final and self._judge_next():
            pass
        if self.is_interrupted and self.final:
            return min(self.final, key=lambda each: each.key)
        self._judge_next()
        least = min((each.prediction.iteration_seconds for each in self.ranked), default=math.inf)
        for seconds, planner in sorted(self.others, key=lambda entry: entry[0]):
            if self.final and seconds > PROMISING * least:
                break
            self._judge_planner(planner)
        slowest = 0.0
        while not self.final or self._is_undecided() or self.budget.left(1.0) > slowest:
            before = self.budget.spent_seconds
            if not self._judge_next():
                break
            slowest = max(slowest, self.budget.spent_seconds - before)
        if not self.final:
            raise infeasible(self.request)
        return min(self.final, key=lambda each: each.key)

    def _is_undecided(self) -> bool:
        """Return True if the best plan so far is clearly behind the seconds that the next one was ranked at."""
        waiting = [each.prediction.iteration_seconds for each in self.ranked if run_key(each.run) not in self.judged]
        best = min((each.prediction.iteration_seconds for each in self.final), default=math.inf)
        return bool(waiting) and len(self.judged) < MOST_JUDGED and best > PROMISING * min(waiting)

    def _judge_next(self) -> bool:
        """Judge the best of the search that has not been; False where none is left."""
        run = next((each.run for each in self.best(len(self.ranked)) if run_key(each.run) not in self.judged), None)
        if run is None:
            return False
        self.judged.add(run_key(run))
        with suppress(BraidError):
            prediction = self.budget.predict(
                run, self.request, max_actions=self.request.max_actions, num_batches=self.request.num_batches
            )
            if prediction.peak_memory_bytes <= self.request.memory_bytes:
                self.final.append(PredictedRun(run, prediction))
        return True

    def _judge_planner(self, planner: Planner) -> None:
        try:
            planned = plan_to_fit(planner, self.others_request, max_actions=self.request.max_actions, predict=self.budget.predict)
        except BraidError:
            return
        if BUILDERS[planned.run.schedule].can_train and run_key(planned.run) not in self.judged:
            self.judged.add(run_key(planned.run))
            self.final.append(planned)


def _first_balances(placement: Placement) -> tuple[str, ...]:
    """List the balancers that are tried at once on such plans."""
    return tuple(name for name, row in BALANCERS.items() if placement in row.tried_first_on)
