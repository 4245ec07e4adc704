"""Braid: searches the union of all layouts with the real lengths, and lets the simulator decide."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from multimodal.balance import BALANCERS
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
from multimodal.plan.planners.plan_run import plan_run
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import LARGEST_CONTEXT_PARALLEL, PlanningRequest
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
MEMORY_SCALES = (1.0, 0.85, 0.7)
"""Shares of the memory that estimates may fill, the next one where nothing fits when it is simulated."""
OTHERS_SHARE = 0.5
"""Of the time budget, after which only promising plans of other planners are judged."""
PROMISING = 1.3
"""A plan whose planner expects at most so many times the best expected step is judged in any case."""
HOPELESS = 1.6
"""A plan whose planner expects so many times the best expected step is left out."""
NUM_FINALISTS = 4
NUM_REPORTED = 5


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

    1. The other planners' plans are judged as `tools/plan.py` judges every plan, in the order of their expected times: so this
       planner is not behind any that it had time to judge.
    2. The best layouts of `best_layouts` (disaggregated, colocated, virtual stages, microbatch sizes, and context parallel sizes
       where sequences are long) are simulated on a part of the batch, with zero-bubble or, where stages are virtual, interleaved
       schedules.
    3. On the best ones, other schedules and balancers are tried.
    4. The best are judged as in 1.

    The search ends with `request.time_budget_seconds` of processor time, so that a busy machine finds the same plan later; step 4
    is included as far as it can be foreseen.
    Raises PlanError when nothing fits.
    """
    started, clock = time.perf_counter(), time.process_time()
    for scale in MEMORY_SCALES:
        scaled = request.with_memory_scale(scale * request.memory_scale)
        search = _Search(scaled, deadline=clock + request.time_budget_seconds)
        search.rank_others()
        search.rank_layouts()
        if search.ranked or search.final:
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
        self.others_request = request
        self.request = replace(request, most_context_parallel=max(request.most_context_parallel, LARGEST_CONTEXT_PARALLEL))
        self.deadline = deadline
        self.ranked: list[Ranked] = []
        self.final: list[Ranked] = []
        self.seen: set[str] = set()
        self.num_estimated = 0

    def time_left(self) -> float:
        """Seconds until the search should end."""
        return self.deadline - time.process_time()

    def rank_others(self) -> None:
        """Judge the other planners' plans as in the end, shortest expected step first.

        Each plans with less memory, and at last with recomputation, while its plan does not fit (`plan_run`). What a planner
        cannot plan it leaves out. Their plans, and balanced ones where they do not balance, are ranked as starts of the search.
        """
        planned: list[tuple[float, int, Callable[[PlanningRequest], PlannedRun]]] = []
        for planner in OTHER_PLANNERS.values():
            try:
                planned.append((planner(self.others_request).objective_seconds, len(planned), planner))
            except PlanError:
                planned.append((math.inf, len(planned), planner))
        best = min((seconds for seconds, _, _ in planned), default=0.0)
        deadline = self.deadline - (1 - OTHERS_SHARE) * self.request.time_budget_seconds
        for seconds, _, planner in sorted(planned, key=lambda entry: entry[:2]):
            is_late = time.process_time() > deadline and seconds > PROMISING * best
            if self.final and (is_late or HOPELESS * best < seconds < math.inf):
                continue
            try:
                judged = Ranked(
                    *plan_run(
                        planner,
                        self.others_request,
                        max_actions=self.request.max_actions,
                        num_batches=self.request.num_batches,
                    )
                )
            except BraidError:
                continue
            self.final.append(judged)
            self.try_run(judged.run)
            if self.request.lengths_vary and judged.run.balance == "none":
                self.try_run(replace(judged.run, balance=BALANCES[0]))

    def rank_layouts(self) -> None:
        """Simulate the best layouts until half of the time is gone."""
        deadline = self.deadline - 0.4 * self.request.time_budget_seconds
        for layout in best_layouts(self.request, deadline=self.deadline - 0.75 * self.request.time_budget_seconds):
            self.num_estimated += 1
            if time.process_time() > deadline:
                return
            run = replace(layout, balance=BALANCES[0])
            split = () if has_virtual_stages(run) else self._scheduled(run, ("zb-h1",))
            if not any(self.try_run(each) for each in split):
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
        yield from self._scheduled(run, [name for name in names if name != run.schedule])

    def _scheduled(self, run: PlannedRun, names: Sequence[str]) -> Iterator[PlannedRun]:
        """Give a run other schedules, and the implementation that can run them."""
        for name in filter(self.request.allows, names):
            yield replace(run, schedule=name, transformer_impl=self.request.implementation(name))

    def try_run(self, run: PlannedRun) -> bool:
        """Simulate a part of the batch; say whether it fits the memory. A schedule that a layout does not allow does not."""
        key = _key(run)
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
        """Judge the best of the search as every planner's plan is judged in the end, and return the best plan of all that fit.

        At least one is judged, and more while one more can be expected to be done in time, or none has fitted.
        """
        judged = {_key(each.run) for each in self.final}
        slowest = 0.0
        for each in self.best(len(self.ranked)):
            if _key(each.run) in judged:
                continue
            if slowest and self.final and self.time_left() < slowest:
                break
            began = time.process_time()
            self._judge(each)
            slowest = max(slowest, time.process_time() - began)
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


def _key(run: PlannedRun) -> str:
    how = run.schedule, run.passes, run.balance, run.micro_batch_size, run.recompute, run.transformer_impl
    return repr((run.plan.units, *how))


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
    """Sizes as error messages show them: `tp 2 x pp 4 x dp 3`; cp where it is not 1."""
    stages = len(unit.replicas[0].stages)
    virtual = f" (v {unit.num_virtual_stages / stages:g})" if unit.num_virtual_stages > stages else ""
    context = f"cp {unit.context_parallel_size} x " if unit.context_parallel_size > 1 else ""
    return f"tp {unit.tensor_parallel_size} x {context}pp {stages}{virtual} x dp {unit.data_parallel_size}"
