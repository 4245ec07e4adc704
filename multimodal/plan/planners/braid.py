"""Braid: searches over all kinds of layouts with the real lengths, and lets the simulator decide."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from statistics import fmean

from multimodal.balance import Placement
from multimodal.plan.planners.estimate.unit_options import infeasible
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import LARGEST_CONTEXT_PARALLEL, PlanningRequest
from multimodal.plan.planners.search import run_variants
from multimodal.plan.planners.search.layout_search import best_layouts
from multimodal.plan.planners.search.plan_to_fit import Planner, PredictedRun, describe
from multimodal.plan.planners.search.run_variants import Form, Placed, formed
from multimodal.plan.planners.search.simulated_part import FINAL, QUICK, RANKING, Fidelity
from multimodal.plan.planners.search.trials import Trials, judge_tuned, tune
from multimodal.schedule.builders import BUILDERS

PROMISING = 1.25
"""Another planner's plan is judged, within the budget, if its ranked step is at most this many times as long as the best."""
CLOSE = 1.1
"""Such a plan is judged even beyond the budget if its step is at most this many times as long as the best."""
PENALTY = 1.1
"""Factor on a kind's expected seconds for each of its layouts that did not fit, or could not be better."""
FAR = 1.5
"""Layouts that are expected to be this many times as long as the best are not simulated."""
ESTIMATES_UNTIL = 0.3
"""Share of the budget after which layouts of no further microbatch size are estimated."""
SECONDS_PER_ESTIMATE, SECONDS_PER_ESTIMATED_GPU = 0.15, 0.0008
"""Nominal seconds of estimating all layouts at one microbatch size, and additional ones for each GPU."""
LAYOUTS_UNTIL, RANKED_UNTIL, VARIANTS_UNTIL = 0.4, 0.5, 0.8
"""Shares of the time budget after which no further layout, closer simulation or variant is tried."""
LEAST_VARIANTS = 0.15
"""Share of the time budget for variants, even if other planners' plans have used up the rest; more where glances cost more."""
NUM_RANKED = 12
"""Layouts that are simulated more closely."""
NUM_OVERLAPPED = 16
"""Layouts that are tried with overlapped tensor parallel collectives, as layouts differ in the time that these take."""
NUM_FINALISTS = 4
NUM_CLOSER = 2
"""Variants of one kind of a run that are simulated more closely."""
NUM_OTHER_LAYOUTS = 6
"""Plans that are tried with the schedule and balancer of the best run."""
CHANCE = 1.02
"""Such plans may, at a glance, be this many times as long as the run."""
MOST_JUDGED = 12
MEMORY_SCALES = (1.0, 0.85, 0.7)
"""Shares of the memory that estimates may fill; the next one is tried if nothing fits in simulation."""
NUM_REPORTED = 5


def plan_braid(request: PlanningRequest, others: Sequence[Planner]) -> PlannedRun:
    """Plan by search: enumerate layouts in closed form, prune by memory and by a lower bound, rank by simulation.

    1. The best layouts of `best_layouts` are simulated quickly, with the schedules and balancers that suit them, and the best few
    more closely (`rank_layouts`).
    2. The best are varied: balancer, schedule, passes, microbatch size, overlap, partition of microbatches (`vary_best`).
    3. The other planners' plans are tuned, unless nothing could bring them below the best; then the best are varied again.
    4. The best are judged, and other planners' plans that ranked close to them, so that this planner is not behind (`choose`).
    5. One flag, layer or unit of the winner is changed at a time until no neighbour is better (`settle`).

    The search ends when `request.time_budget_seconds` of nominal work are used up (`Trials`): the same inputs give the same plan
    on every machine. Steps 3 and 5 are always done. When interrupted from the keyboard (Ctrl-C), it returns the best plan so far;
    a second interrupt aborts it. others: the planners of step 3; without them no step 5, either. Raises PlanError if none fits.
    """
    search = PlanSearch(request)
    try:
        search.rank_layouts()
        search.vary_best()
        search.rank_others(others)
        search.vary_best()
    except KeyboardInterrupt:
        if not search.trials.expected():
            raise
        search.is_interrupted = True
    best = search.choose()
    if others and not search.is_interrupted:
        best = search.settle(best)
    num_simulated = len({key for key, _ in search.trials.found})
    extent = f"{search.num_estimated} layouts estimated, {num_simulated} runs simulated"
    extent += ", interrupted: the best so far" * search.is_interrupted
    extent += f"; no neighbour is better ({search.num_neighbours} tried)" if search.num_neighbours else ""
    described = dict.fromkeys(map(describe, search.trials.fitting(FINAL)))  # runs may differ only in what is not told
    notes = (extent, *islice(described, NUM_REPORTED))
    return replace(best.run, objective_seconds=best.prediction.iteration_seconds, notes=notes, second=search.second(best.run))


class PlanSearch:
    """A search: chooses the next runs to simulate."""

    def __init__(self, request: PlanningRequest) -> None:
        most = max(request.most_context_parallel, LARGEST_CONTEXT_PARALLEL)
        self.request = request.changed(most_context_parallel=most)
        self.trials = Trials(request)
        self.tuned: list[tuple[Planner, list[PredictedRun]]] = []
        self.judged: set[str] = set()
        self.varied: dict[str, Placed] = {}
        self.num_estimated = 0
        self.is_interrupted = False
        self.num_neighbours = 0
        """Neighbours of the result that have been tried."""

    def rank_layouts(self) -> None:
        """Simulate the most promising layouts quickly while the budget lasts, and the best of them more closely."""
        for scale in MEMORY_SCALES:
            self._look_at_layouts(self.request.changed(memory_scale=scale * self.request.memory_scale))
            if self.trials.expected():
                break
        for each in self.trials.expected()[:NUM_OVERLAPPED]:
            for variant in run_variants.overlapped(each.run, self.request):
                self._glance(variant)
        for _ in range(NUM_RANKED):
            waiting = (each for each in self.trials.expected() if (each.run.key, RANKING) not in self.trials.found)
            chosen = next(waiting, None)
            if chosen is None or (self.trials.fitting(RANKING) and self.trials.left(RANKED_UNTIL) < 0):
                return
            self.trials.try_run(chosen.run, RANKING)

    def _look_at_layouts(self, request: PlanningRequest) -> None:
        """Simulate layouts quickly with their placement's best form, or else each, unless their bounds are above the best.

        Estimates are corrected by the mean ratio of their kind, or the least of their placement.
        """
        trials = self.trials

        def takes_more() -> bool:
            is_open = trials.left(ESTIMATES_UNTIL) > 0
            trials.spent_seconds += is_open * (SECONDS_PER_ESTIMATE + SECONDS_PER_ESTIMATED_GPU * request.num_gpus)
            return is_open

        kinds = best_layouts(request, takes_more=takes_more)
        self.num_estimated += sum(map(len, kinds))
        position = dict.fromkeys(range(len(kinds)), 0)
        ratios: dict[int, list[float]] = {}
        least: dict[object, float] = {}
        forms: dict[Placed, Form] = {}
        penalties = dict.fromkeys(position, 1.0)
        best = math.inf

        def expected(index: int) -> float:
            layout = kinds[index][position[index]]
            ratio = fmean(ratios[index]) if index in ratios else least.get(layout.placement, 1.0)
            return penalties[index] * layout.seconds * ratio

        while position and trials.left(LAYOUTS_UNTIL) > 0:
            index = min(position, key=expected)
            if expected(index) > FAR * best:
                break
            layout, found = kinds[index][position[index]], None
            run = layout.to_run(request)
            if trials.least_step_seconds(run) <= best:
                kind = trials.placed(run)
                known = self._best_of_forms(run, (forms[kind],)) if kind in forms else None
                found = known or self._best_of_forms(run, self._forms(run))
            if found:
                forms.setdefault(kind, (found.run.schedule, found.run.balance))
                placed, seconds = trials.placed(found.run), found.prediction.iteration_seconds
                if seconds < best and placed not in trials.corrections():  # the first of its kind that seems to be the best
                    trials.try_run(found.run, RANKING)
                seconds *= trials.corrections().get(placed, 1.0)
                best = min(best, seconds)
                ratio, placement = seconds / layout.seconds, layout.placement
                ratios.setdefault(index, []).append(ratio)
                least[placement] = min(least.get(placement, math.inf), ratio)
            else:
                penalties[index] *= PENALTY
            position[index] += 1
            if position[index] == len(kinds[index]):
                del position[index]

    def _best_of_forms(self, run: PlannedRun, forms: Iterable[Form]) -> PredictedRun | None:
        runs = map(partial(formed, run, request=self.request), forms)
        return min(filter(None, map(self._glance, filter(None, runs))), key=lambda each: each.key, default=None)

    def _glance(self, run: PlannedRun) -> PredictedRun | None:
        return self.trials.try_run(run, QUICK)

    def _forms(self, run: PlannedRun) -> Iterator[Form]:
        """Return the schedules and balancers to try on the first layout of a placement; later layouts get the best of them.

        Rows say which suit: if units share ranks and have equally many replicas, a sample's items can stay with it, and ranks
        only meet at the end of the step; otherwise units are balanced separately and run in phases, so that they rarely meet.
        """
        for placement in run_variants.placements(run, self.request):
            balances = run_variants.first_balances(placement, self.request)
            if placement is Placement.PHASES:
                yield from ((self._phased(run, balance), balance) for balance in balances)
                continue
            is_apart = placement is Placement.OWN_RANKS
            fitting = run_variants.fitting_schedules(run, self.request)
            first = [name for name, row in fitting if is_apart and row.is_tried_first]
            yield from ((schedule, balance) for balance in balances for schedule in (*first, run.schedule))

    def _phased(self, run: PlannedRun, balance: str) -> str:
        """Return the phased schedule with the fewest rounds that fits: fewer rounds wait less and keep more."""
        phased = sorted((row.num_rounds, name) for name, row in BUILDERS.items() if row.num_rounds)
        names = [name for _, name in phased]

        def fits(name: str) -> bool:
            other = formed(run, (name, balance), self.request)
            return other is not None and self._glance(other) is not None

        return next(filter(fits, names)) if fits(names[-1]) else names[-1]

    def rank_others(self, planners: Sequence[Planner]) -> None:
        """Tune the other planners' plans that can get below the best (`tune`)."""
        below = self._least_seconds(RANKING)
        for planner in planners:
            if tuned := tune(planner, self.trials, below=below):
                self.tuned.append((planner, tuned))

    def vary_best(self) -> None:
        """Try variants of the best runs, and of the best variants, while the budget lasts and that helps."""
        trials = self.trials
        least = LEAST_VARIANTS * trials.cost_of_a_glance * trials.budget_seconds
        until = max(VARIANTS_UNTIL * trials.budget_seconds, trials.spent_seconds + least)
        while (chosen := self.next_to_vary()) is not None:
            run = chosen
            self.trials.try_run(run, RANKING)
            forms = run_variants.overlapped, run_variants.other_sizes, run_variants.other_balances, run_variants.other_schedules
            for kind in (*forms, self._other_layouts, run_variants.other_passes, run_variants.other_partitions):
                glances = []
                for variant in kind(run, self.request):
                    if trials.spent_seconds > until:
                        return
                    glances.append(self._glance(variant))
                better = self.closer_variant(run, filter(None, glances))
                run = better.run if better else run
            self.varied[chosen.key] = self.trials.placed(chosen)

    def next_to_vary(self) -> PlannedRun | None:
        """Return the best run of a kind of plan without varied runs, if it is close to the best run; else one of the best."""
        best = self.trials.expected()
        waiting = [each.run for each in best[:NUM_FINALISTS] if each.run.key not in self.varied]
        close = (each.run for each in best if each.prediction.iteration_seconds <= CLOSE * best[0].prediction.iteration_seconds)
        others = (run for run in close if self.trials.placed(run) not in self.varied.values())
        return next(chain(others, waiting), None)

    def _other_layouts(self, run: PlannedRun, request: PlanningRequest) -> Iterator[PlannedRun]:
        """Yield the best runs of other plans with the schedule and balancer of the best run, which a variant may have found."""
        best = next(iter(self.trials.expected()), None)
        if best is None or best.run.plan != run.plan:
            return
        form = best.run.schedule, best.run.balance
        seen = {repr(run.plan)}
        for other in self.trials.fitting(QUICK):
            if len(seen) < NUM_OTHER_LAYOUTS and repr(other.run.plan) not in seen:
                seen.add(repr(other.run.plan))
                changed = formed(other.run, form, request)
                if changed is not None and changed != other.run:
                    yield changed

    def closer_variant(self, run: PlannedRun, glances: Iterable[PredictedRun]) -> PredictedRun | None:
        """Simulate the best variants of a run more closely, unless they are no better at a glance, or only by chance.

        Variants of a run that does not fit need only be as good as the best run that does. Returns the best variant if it is
        better than the run, or the run does not fit.
        """
        known = self._glance(run)
        seconds = self._least_seconds(RANKING) / self.trials.corrections().get(self.trials.placed(run), 1.0)
        if known and not self.trials.is_misfit(run):
            seconds = known.prediction.iteration_seconds
        near = (each for each in glances if each.prediction.iteration_seconds <= CHANCE * seconds)
        better = [each for each in near if each.prediction != (known and known.prediction)]
        closer = [self.trials.try_run(each.run, RANKING) for each in sorted(better, key=lambda each: each.key)[:NUM_CLOSER]]
        ranked = self.trials.found.get((run.key, RANKING))
        found = min(filter(None, closer), key=lambda each: each.key, default=None)
        return found if found and (ranked is None or found.key < ranked.key) else None

    def second(self, best: PlannedRun) -> PlannedRun | None:
        """Return the best run of another plan for the same processes, whose weights lie alike, so that a run can change to it."""
        others = (each.run for each in self.trials.expected() if each.run.plan != best.plan)
        alike = (best.num_gpus, best.sharding, best.transformer_impl)
        return next((run for run in others if (run.num_gpus, run.sharding, run.transformer_impl) == alike), None)

    def choose(self) -> PredictedRun:
        """Judge the best runs as every planner's plan is judged in the end, and return the best plan of all that fit.

        At least one is judged, then promising plans of other planners, then more of the search as long as another one is expected
        to fit the budget, or none has fitted.
        """
        while not self.trials.fitting(FINAL) and self._judge_next():
            pass
        if not self.is_interrupted:
            self._judge_others()
            slowest = 0.0
            while not self.trials.fitting(FINAL) or self._is_undecided() or self.trials.left(1.0) > slowest:
                before = self.trials.spent_seconds
                if not self._judge_next():
                    break
                slowest = max(slowest, self.trials.spent_seconds - before)
        if not self.trials.fitting(FINAL):
            raise infeasible(self.request)
        return self.trials.fitting(FINAL)[0]

    def settle(self, best: PredictedRun) -> PredictedRun:
        """Change one thing of the best run at a time until no neighbour that ranks well is judged better, whatever the budget."""

        def judge(run: PlannedRun, best: PredictedRun) -> PredictedRun | None:
            ranked = self.trials.try_run(best.run, RANKING)
            enough = CHANCE * ranked.prediction.iteration_seconds if ranked else math.inf
            if self.trials.least_step_seconds(run) > best.prediction.iteration_seconds:
                return None
            near = self.trials.try_run(run, RANKING)
            is_near = near is not None and near.prediction.iteration_seconds <= enough
            return self.trials.try_run(run, FINAL) if is_near else None

        near = partial(run_variants.neighbours, request=self.request)
        settled, self.num_neighbours = run_variants.climb(best, near=near, judge=judge)
        return settled

    def _least_seconds(self, fidelity: Fidelity) -> float:
        """Return the shortest step of these runs."""
        return next((each.prediction.iteration_seconds for each in self.trials.fitting(fidelity)), math.inf)

    def _judge_others(self) -> None:
        """Judge the other planners' tuned plans that ranked close to the best and, within the budget, promising ones."""
        least = self._least_seconds(FINAL)
        for planner, tuned in sorted(self.tuned, key=lambda entry: entry[1][0].key):
            behind = tuned[0].prediction.iteration_seconds / least
            if behind > PROMISING or (behind > CLOSE and self.trials.left(1.0) < 0):
                break
            if self.trials.least_step_seconds(tuned[0].run) <= least:
                judge_tuned(planner, tuned, self.trials)

    def _is_undecided(self) -> bool:
        """Return True if the best plan so far is clearly behind the ranked seconds of the next one."""
        waiting = [each for each in self.trials.fitting(RANKING) if each.run.key not in self.judged]
        is_behind = bool(waiting) and self._least_seconds(FINAL) > PROMISING * waiting[0].prediction.iteration_seconds
        return is_behind and len(self.judged) < MOST_JUDGED

    def _judge_next(self) -> bool:
        """Judge the search's best run that has not been judged; False if none is left that may be better than the best judged."""
        waiting = (each for each in self.trials.expected() if each.run.key not in self.judged)
        found = min(waiting, key=lambda each: self.trials.found.get((each.run.key, RANKING)) is None, default=None)
        if found is None or found.prediction.iteration_seconds > CLOSE * self._least_seconds(FINAL):
            return False
        self.judged.add(found.run.key)
        self.trials.try_run(found.run, FINAL)
        return True
