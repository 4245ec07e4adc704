"""Planners, which make a Plan from a model, a machine and real lengths; a row of facts about each; advice if nothing fits."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from multimodal.plan.planners.allowed_sizes import fewest_enough
from multimodal.plan.planners.estimate.unit_options import list_options
from multimodal.plan.planners.idle_units import place_idle_units, without_idle_units
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.values.deferred import Deferred
from multimodal.values.errors import BraidError, NothingFitsError, PlanError
from multimodal.values.plan import MOST_RANKS

if TYPE_CHECKING:
    from multimodal.plan.planners.search.plan_to_fit import Planner, PredictedRun
    from multimodal.plan.planners.templates.template_set import TemplateSet

MOST_SEARCHED_SIZES = 2
"""Most expert parallel sizes with which a search also tries other planners' plans."""


@dataclass(frozen=True)
class PlannerRow:
    """One planner: its function, and the facts about it for searches and documentation."""

    name: str
    plan: "Planner"
    meaning: str
    source: str = ""
    searches_others: bool = False
    """True if it also judges the other planners' plans, so that none of them is better than its own."""

    def plan_best(self, request: PlanningRequest) -> "PredictedRun":
        """Plan as well as its user would (`plan_tuned`: best microbatch size and balancer); raises PlanError if nothing fits."""
        from multimodal.plan.planners.search.plan_to_fit import plan_to_fit  # behind what lists the names
        from multimodal.plan.planners.search.trials import plan_tuned

        return (plan_to_fit if self.searches_others else plan_tuned)(self, request)

    def __call__(self, request: PlanningRequest) -> PlannedRun:
        """Plan, place units without work (`place_idle_units`), and record name and time; raises PlanError with the name."""
        started = time.perf_counter()
        try:
            run = self._plan_experts(request)
        except PlanError as problem:
            raise type(problem)(f"planner '{self.name}': {problem}") from None
        return replace(run, planner=self.name, planning_seconds=time.perf_counter() - started)

    def _plan_experts(self, request: PlanningRequest) -> PlannedRun:
        """Plan with every allowed expert parallel size, and return the shortest step by the planner's own estimate.

        A search over other planners' plans takes long: it does so only with the sizes that are best, or promising, without them.
        """
        sizes = request.expert_parallel_sizes
        if self.searches_others and len(sizes) > MOST_SEARCHED_SIZES:
            from multimodal.plan.planners.braid import PROMISING

            with suppress(PlanError):  # where nothing fits, other planners' plans may
                own = self._plan_sizes(request, sizes, partial(_PLAN_BRAID, others=()), seconds=request.time_budget_seconds / 2)
                enough = PROMISING * own[0][1].objective_seconds
                sizes = tuple(size for size, run in own[:MOST_SEARCHED_SIZES] if run.objective_seconds <= enough)
        return self._plan_sizes(request, sizes, self.plan, seconds=request.time_budget_seconds)[0][1]

    def _plan_sizes(
        self, request: PlanningRequest, sizes: Sequence[int], plan: "Planner", *, seconds: float
    ) -> list[tuple[int, PlannedRun]]:
        """Return expert parallel sizes and their plans, the shortest step first; raises PlanError if there is none."""
        found, problems = list[tuple[int, PlannedRun]](), list[PlanError]()
        for size in sizes:
            changes = {"expert_parallel_size": size, "time_budget_seconds": seconds / len(sizes)}
            asked = request.changed(**changes) if request.expert_parallel_sizes != (1,) else request
            try:
                run = plan(asked if self.searches_others else without_idle_units(asked))
            except PlanError as problem:
                problems.append(problem)
            else:
                found.append((size, place_idle_units(run, asked)))
        if not found:
            raise problems[0]
        return sorted(found, key=lambda entry: entry[1].objective_seconds)


_PLAN_TEMPLATES: "Callable[..., TemplateSet]" = Deferred(f"{__name__}.templates.plan_templates.plan_templates")
_PLAN_BRAID = Deferred(f"{__name__}.braid.plan_braid")


def _plan_oobleck(request: PlanningRequest, *, fault_tolerance: int, replicas_per_copy: int = 1) -> "TemplateSet":
    """Plan templates (Oobleck 2.4); raises PlanError, which names the planner."""
    try:
        return _PLAN_TEMPLATES(request, fault_tolerance=fault_tolerance, replicas_per_copy=replicas_per_copy)
    except PlanError as problem:
        raise type(problem)(f"planner 'oobleck': {problem}") from None


_ROWS = (
    PlannerRow(
        "megatron",
        Deferred(f"{__name__}.megatron.plan_megatron"),
        "one grid: the same tp, cp and dp for all units; encoders and generators are extra stages; LLM stages as tuned",
        "DistTrain 2.1",
    ),
    PlannerRow(
        "optimus",
        Deferred(f"{__name__}.optimus.plan_optimus"),
        "encoders with sizes of their own on the LLM's ranks, computing in the bubbles of its pipeline",
        "Optimus 4.1, Alg. 1",
    ),
    PlannerRow(
        "braid",
        lambda request: _PLAN_BRAID(request, [row for row in PLANNERS.values() if not row.searches_others]),
        "searches the union of these layouts by simulation",
        searches_others=True,
    ),
)

PLANNERS: dict[str, PlannerRow] = {row.name: row for row in _ROWS}
"""Every planner by its name for `--planner`. Rows can be added at any time; `benchmarks/baselines` has those of comparisons."""

TEMPLATE_PLANNERS: dict[str, "Callable[..., TemplateSet]"] = {"oobleck": _plan_oobleck}
"""Planners, by their name for `--planner`, of pipeline templates for every number of nodes, whose replicas differ."""
LARGEST_SEARCH = 1 << 14
"""Most GPUs up to which a sufficient number is searched."""
SEARCH_BUDGET_SECONDS = 1.0
"""Nominal seconds that a planner that simulates may use for one number of GPUs."""


def plan_or_advise(
    planner: PlannerRow, request: PlanningRequest, *, plan: "Callable[[PlanningRequest], PredictedRun] | None" = None
) -> "PredictedRun":
    """Plan (by default `plan_to_fit`); if nothing fits, raise PlanError with enough GPUs, or with the unit that never fits."""
    from multimodal.plan.planners.search.plan_to_fit import memory_concessions, plan_to_fit

    try:
        return plan(request) if plan else plan_to_fit(planner, request)
    except NothingFitsError as problem:
        # A unit that does not fit on any number of GPUs by itself, with every concession to memory.
        *_, last = memory_concessions(without_idle_units(replace(request, num_gpus=LARGEST_SEARCH)))
        forms = [last, replace(last, sharding="optim_grads_params")] if request.sharding is None else [last]
        for stuck in last.graph.unit_names:
            if any(len(list_options(form, stuck, max_gpus=LARGEST_SEARCH)) for form in forms):
                continue
            raise PlanError(
                f"{problem}; unit '{stuck}' does not fit at any tensor, pipeline or data parallel size that is allowed; use GPUs "
                "with more memory, freeze it, lower the memory headroom, or unfix its sizes"
            ) from None
        # More GPUs do not help every planner, so smaller sufficient numbers may exist.
        too_few, works = request.num_gpus, partial(_works, planner, request)
        enough = fewest_enough(works, too_few=too_few, first=2 * too_few, most=LARGEST_SEARCH)
        if enough is None:
            raise PlanError(
                f"{problem}; nor do up to {LARGEST_SEARCH:,} GPUs under this planner's rules and the fixed sizes; use GPUs with "
                "more memory, another planner (disttrain, braid), or fewer fixed sizes"
            ) from None
        raise PlanError(f"{problem}; {enough} GPUs would be enough") from None


def _works(planner: PlannerRow, request: PlanningRequest, num_gpus: int) -> bool:
    """Return True if the planner finds a plan.

    A planner that searches by simulation is asked for a plan with the least memory, one sample per microbatch and full
    recomputation; it also counts as successful if any other planner has a plan.
    """
    from multimodal.plan.planners.search.plan_to_fit import memory_concessions, plan_to_fit

    def find(row: PlannerRow, asked: PlanningRequest) -> "PredictedRun | None":
        try:
            return plan_to_fit(row, asked)
        except BraidError:
            return None

    if num_gpus > MOST_RANKS:
        return False
    asked = replace(request, num_gpus=num_gpus)
    if not planner.searches_others:
        return find(planner, asked) is not None
    *_, least = memory_concessions(replace(asked, micro_batch_size=request.default_micro_batch_size))
    if any(find(row, least) is not None for row in PLANNERS.values() if not row.searches_others):
        return True
    budget = min(request.time_budget_seconds, SEARCH_BUDGET_SECONDS)
    return find(planner, replace(least, time_budget_seconds=budget, on_progress=None)) is not None
