"""Braid: searches the union of all layouts with the real lengths, and lets the simulator decide."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from multimodal.balance import BALANCERS
from multimodal.cost.layer_costs import Recompute
from multimodal.plan.planners.cornstarch import plan_cornstarch, plan_cornstarch_unaware
from multimodal.plan.planners.disttrain import plan_disttrain
from multimodal.plan.planners.encoders_colocated import plan_encoders_colocated
from multimodal.plan.planners.encoders_replicated import plan_encoders_replicated
from multimodal.plan.planners.entrain import plan_entrain
from multimodal.plan.planners.flops_ratio import plan_flops_ratio
from multimodal.plan.planners.infeasible import infeasible
from multimodal.plan.planners.layout_search import best_layouts
from multimodal.plan.planners.megatron import plan_megatron
from multimodal.plan.planners.megatron_balanced import plan_megatron_balanced
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.plan.planners.simulate_run import Prediction, predict_run
from multimodal.values.errors import BraidError, PlanError
from multimodal.values.plan import UnitPlan

OTHER_PLANNERS: Mapping[str, Callable[[PlanningRequest], PlannedRun]] = {
    "megatron": plan_megatron,
    "megatron-balanced": plan_megatron_balanced,
    "flops-ratio": plan_flops_ratio,
    "encoders-colocated": plan_encoders_colocated,
    "encoders-replicated": plan_encoders_replicated,
    "disttrain": plan_disttrain,
    "cornstarch": plan_cornstarch,
    "cornstarch-unaware": plan_cornstarch_unaware,
    "entrain": plan_entrain,
}
"""Their plans are candidates, too."""
SCHEDULES = ("zb-h1", "1f1b", "eager-1f1b", "dip")
"""Tried on the best layouts besides the schedule that they come with."""
BALANCES = tuple(name for name in ("orchmllm", "disttrain", "entrain", "none") if name in BALANCERS)
"""Tried on the best layouts; all are what --balance auto chooses from."""
RANKING_SHARE = 0.1
"""Of `max_actions`: how large a simulation may be that only ranks."""
RECOMPUTES: tuple[Recompute | None, ...] = (None, "full")
"""Planners that find nothing that fits recompute whole layers."""
MEMORY_SCALES = (1.0, 0.85, 0.7)
"""Shares of the memory that estimates may fill, the next one where nothing fits when it is simulated."""
OTHERS_SHARE = 0.4
"""Of the time budget, after which no further plan of another planner is simulated."""
HOPELESS = 1.6
"""A plan whose planner expects so many times the best expected step is not simulated."""
NUM_FINALISTS = 4
NUM_REPORTED = 5


MOST_SURE = 3
"""So many of the other planners' runs are finalists in any case."""
CLOSE = 1.25
"""Plans of other planners that rank within this factor of the best are finalists, even if the time is over."""


@dataclass(frozen=True)
class Ranked:
    """A run with the prediction that it is ranked by."""

    run: PlannedRun
    prediction: Prediction

    @property
    def key(self) -> tuple[float, int]:
        """Shorter steps first; of equals, fewer GPUs."""
        return self.prediction.iteration_seconds, self.run.num_gpus


def plan_braid(request: PlanningRequest) -> PlannedRun:
    """Plan by search: enumerate layouts in closed form, prune by memory and by a lower bound, rank by simulation.

    1. Every other planner's plan, and the best layouts of `best_layouts` (disaggregated, colocated, virtual stages, microbatch
       sizes), in the order of their estimated time.
    2. Each is simulated on a part of the batch: zero-bubble or, with virtual stages, interleaved schedules.
    3. On the best ones, other schedules and balancers are tried.
    4. Finalists are simulated as `tools/plan.py` simulates every planner's plan, over `request.num_batches` batches, the best
       other planner's plan among them: so this planner is never behind them.

    The search ends with `request.time_budget_seconds`, step 4 included as far as it can be foreseen.
    Raises PlanError when nothing fits.
    """
    started = time.perf_counter()
    for scale in MEMORY_SCALES:
        scaled = request.with_memory_scale(scale * request.memory_scale)
        search = _Search(scaled, deadline=started + request.time_budget_seconds)
        search.rank_others()
        search.rank_layouts()
        if search.ranked:
            break
    search.vary_best()
    best = search.choose()
    return replace(
        best.run,
        planner="braid",
        objective_seconds=best.prediction.iteration_seconds,
        planning_seconds=time.perf_counter() - started,
        notes=search.notes(),
    )


class _Search:
    """What has been simulated so far."""

    def __init__(self, request: PlanningRequest, *, deadline: float) -> None:
        self.request = request
        self.deadline = deadline
        self.ranked: list[Ranked] = []
        self.final: list[Ranked] = []
        self.seen: set[str] = set()
        self.num_estimated = 0

    def time_left(self) -> float:
        """Seconds until the search should end."""
        return self.deadline - time.perf_counter()

    def rank_others(self) -> None:
        """Simulate the other planners' plans, shortest expected step first, for at most a part of the time.

        A planner whose plan does not fit when it is simulated plans again, counting on less memory, and at last with whole layers
        computed again; what it cannot plan it leaves out.
        """
        planned = []
        for planner in OTHER_PLANNERS.values():
            forms = self._forms()
            run = self._next_plan(planner, forms)
            if run is not None:
                planned.append((run, planner, forms))
        best = min((run.objective_seconds for run, _, _ in planned), default=0.0)
        deadline = self.deadline - (1 - OTHERS_SHARE) * self.request.time_budget_seconds
        for first, planner, forms in sorted(planned, key=lambda entry: entry[0].objective_seconds):
            if self.ranked and (first.objective_seconds > HOPELESS * best or time.perf_counter() > deadline):
                return
            candidate: PlannedRun | None = first
            while candidate is not None and not self._try_balanced(candidate):
                candidate = self._next_plan(planner, forms)

    def _forms(self) -> Iterator[PlanningRequest]:
        """Yield the request with ever less memory to count on, then with recomputation."""
        for recompute in (self.request.recompute,) if self.request.recompute else RECOMPUTES:
            for scale in MEMORY_SCALES:
                yield replace(self.request, recompute=recompute, memory_scale=scale * self.request.memory_scale)

    def _next_plan(self, planner: Callable[[PlanningRequest], PlannedRun], forms: Iterator[PlanningRequest]) -> PlannedRun | None:
        for form in forms:
            try:
                return planner(form)
            except PlanError:
                continue
        return None

    def _try_balanced(self, run: PlannedRun) -> bool:
        """Simulate a plan as it is and, where its planner does not balance, balanced; say whether either fits."""
        is_balanced = self.request.lengths_vary and run.balance == "none" and self.try_run(replace(run, balance=BALANCES[0]))
        return self.try_run(run) or is_balanced

    def rank_layouts(self) -> None:
        """Simulate the best layouts until half of the time is gone."""
        deadline = self.deadline - 0.4 * self.request.time_budget_seconds
        for layout in best_layouts(self.request, deadline=self.deadline - 0.75 * self.request.time_budget_seconds):
            self.num_estimated += 1
            if time.perf_counter() > deadline:
                return
            run = replace(layout, balance=BALANCES[0])
            if has_virtual_stages(run) or not self.try_run(replace(run, schedule="zb-h1")):
                self.try_run(run)

    def vary_best(self) -> None:
        """Try balancers, then schedules, on the best layouts, while a quarter of the time is left for the finalists."""
        reserve = self.request.time_budget_seconds / 4
        for vary in (self._balances, self._schedules):
            for each in self.best(NUM_FINALISTS):
                for run in vary(each.run):
                    if self.time_left() < reserve:
                        return
                    self.try_run(run)

    def _balances(self, run: PlannedRun) -> Iterator[PlannedRun]:
        if self.request.lengths_vary:
            yield from (replace(run, balance=name) for name in BALANCES if name != run.balance)

    def _schedules(self, run: PlannedRun) -> Iterator[PlannedRun]:
        names = ("interleaved-1f1b", "zb-h1") if has_virtual_stages(run) else SCHEDULES
        yield from (replace(run, schedule=name) for name in names if name != run.schedule)

    def try_run(self, run: PlannedRun) -> bool:
        """Simulate a part of the batch; say whether it fits the memory. A schedule that a layout does not allow does not."""
        key = repr((run.plan.units, run.schedule, run.passes, run.balance, run.micro_batch_size, run.recompute))
        if key in self.seen:
            return True
        self.seen.add(key)
        try:
            prediction = predict_run(
                run, self.request, max_actions=int(self.request.max_actions * RANKING_SHARE), is_checked=False
            )
        except BraidError:
            return False
        if prediction.peak_memory_bytes > self.request.memory_bytes:
            return False
        self.ranked.append(Ranked(run, prediction))
        return True

    def best(self, count: int) -> list[Ranked]:
        """Return the best runs of those simulated so far."""
        return sorted(self.ranked, key=lambda each: each.key)[:count]

    def choose(self) -> Ranked:
        """Simulate finalists as every planner's plan is judged in the end, and return the best one that fits."""
        ranked = self.best(len(self.ranked))
        others = [each for each in ranked if each.run.planner != "braid"]
        closest = ranked[0].prediction.iteration_seconds * CLOSE if ranked else 0.0
        close = [each for index, each in enumerate(others) if index < MOST_SURE or each.key[0] <= closest]
        must = [*ranked[:1], *(each for each in close if each is not ranked[0])]
        rest = [each for each in ranked[:NUM_FINALISTS] if each not in must]
        slowest = 0.0
        for each in (*must, *rest):
            if self.final and each not in must and self.time_left() < slowest:
                break
            began = time.perf_counter()
            self._judge(each)
            slowest = max(slowest, time.perf_counter() - began)
        if not self.final:
            raise infeasible(self.request, planner="braid")
        return min(self.final, key=lambda each: each.key)

    def _judge(self, ranked: Ranked) -> None:
        try:
            prediction = predict_run(
                ranked.run, self.request, max_actions=self.request.max_actions, num_batches=self.request.num_batches
            )
        except BraidError:
            return
        if prediction.peak_memory_bytes <= self.request.memory_bytes:
            self.final.append(Ranked(ranked.run, prediction))

    def notes(self) -> tuple[str, ...]:
        """Describe the best few, best first."""
        top = sorted(self.final, key=lambda each: each.key)[:NUM_REPORTED]
        counted = f"{self.num_estimated} layouts estimated, {len(self.seen)} runs simulated"
        return (counted, *(describe(each) for each in top))


def has_virtual_stages(run: PlannedRun) -> bool:
    """Whether some stage holds several layer ranges."""
    return any(len(stage.layer_ranges) > 1 for unit in run.plan.units.values() for stage in unit.replicas[0].stages)


def describe(ranked: Ranked) -> str:
    """One line: time, MFU, memory, bubbles by kind, distance to the ideal, and the units' sizes."""
    run, found = ranked.run, ranked.prediction
    bubbles = ", ".join(f"{kind} {share:.1%}" for kind, share in found.bubble.items() if share >= 0.0005)
    units = ", ".join(f"{unit} {describe_sizes(plan)}" for unit, plan in run.plan.units.items())
    above = found.iteration_seconds / found.ideal_seconds - 1 if found.ideal_seconds else 0.0
    return (
        f"{found.iteration_seconds:.4g} s, MFU {found.mfu:.1%}, {found.peak_memory_bytes / 1e9:.3g} GB, {above:.1%} above ideal "
        f"({bubbles}): {units}; {run.schedule}, --balance {run.balance}, microbatch {run.micro_batch_size}"
        + (f", recomputing {run.recompute}" if run.recompute else "")
        + (f" (found by {run.planner})" if run.planner != "braid" else "")
    )


def describe_sizes(unit: UnitPlan) -> str:
    """Sizes as error messages show them: `tp 2 x pp 4 x dp 3`."""
    stages = len(unit.replicas[0].stages)
    virtual = f" (v {unit.num_virtual_stages / stages:g})" if unit.num_virtual_stages > stages else ""
    return f"tp {unit.tensor_parallel_size} x pp {stages}{virtual} x dp {unit.data_parallel_size}"
