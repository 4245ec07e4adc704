"""Planners: from a model, a machine and real lengths to a Plan, one file each, and what others ask about each."""

import time
from dataclasses import dataclass, replace
from typing import Protocol

from multimodal.plan.planners.braid import plan_braid
from multimodal.plan.planners.cornstarch import plan_cornstarch, plan_cornstarch_unaware
from multimodal.plan.planners.disttrain import plan_disttrain
from multimodal.plan.planners.encoders_colocated import plan_encoders_colocated
from multimodal.plan.planners.encoders_replicated import plan_encoders_replicated
from multimodal.plan.planners.entrain import plan_entrain
from multimodal.plan.planners.flops_ratio import plan_flops_ratio
from multimodal.plan.planners.megatron import plan_megatron
from multimodal.plan.planners.megatron_balanced import plan_megatron_balanced
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.values.errors import PlanError


class Planner(Protocol):
    """A function that plans."""

    def __call__(self, request: PlanningRequest) -> PlannedRun:
        """Plan; raises PlanError, saying what would fit, when nothing does."""


@dataclass(frozen=True, kw_only=True)
class PlannerRow:
    """One planner: its function, and what the search and pages ask about it."""

    name: str
    plan: Planner
    meaning: str
    """What it does, in one line."""
    source: str = ""
    """The paper that it comes from, or is the baseline of."""
    searches_others: bool = False
    """True if it judges the other planners' plans beside its own, so that none of them is better."""

    def __call__(self, request: PlanningRequest) -> PlannedRun:
        """Plan, and sign the plan with the planner's name and time; raises PlanError, which names it, when nothing fits."""
        started = time.perf_counter()
        try:
            run = self.plan(request)
        except PlanError as problem:
            raise PlanError(f"planner '{self.name}': {problem}") from None
        return replace(run, planner=self.name, planning_seconds=time.perf_counter() - started)


def _plan_braid(request: PlanningRequest) -> PlannedRun:
    return plan_braid(request, [row for row in PLANNERS.values() if not row.searches_others])


_ROWS = (
    PlannerRow(
        name="megatron",
        plan=plan_megatron,
        meaning="one grid: the same tp, cp and dp for all units; encoders and generators are extra stages; LLM stages as tuning "
        "finds best",
        source="DistTrain 2.1",
    ),
    PlannerRow(
        name="megatron-balanced",
        plan=plan_megatron_balanced,
        meaning="one chain of all layers over the virtual stages of one grid, cut by dynamic programming",
        source="Optimus, App. B",
    ),
    PlannerRow(
        name="flops-ratio",
        plan=plan_flops_ratio,
        meaning="every unit on GPUs of its own, in proportion to FLOPs",
        source="DistTrain 4.2",
    ),
    PlannerRow(
        name="encoders-colocated",
        plan=plan_encoders_colocated,
        meaning="all encoders fused in the same first stages",
        source="Cornstarch 2",
    ),
    PlannerRow(
        name="encoders-replicated",
        plan=plan_encoders_replicated,
        meaning="a copy of every encoder in each LLM stage; a baseline that is predicted but cannot be run",
        source="Cornstarch 2",
    ),
    PlannerRow(
        name="disttrain",
        plan=plan_disttrain,
        meaning="GPUs, tp and dp of every unit by the adaptive resource allocation",
        source="DistTrain, Alg. 1",
    ),
    PlannerRow(
        name="cornstarch",
        plan=plan_cornstarch,
        meaning="every unit partitioned by itself, coupled by the LLM's stage time; backwards as freezing makes them",
        source="Cornstarch 4.2, Alg. 1",
    ),
    PlannerRow(
        name="cornstarch-unaware",
        plan=plan_cornstarch_unaware,
        meaning="the same with every backward at twice its forward: the paper's baseline",
        source="Cornstarch, Table 3",
    ),
    PlannerRow(
        name="entrain",
        plan=plan_entrain,
        meaning="one dp; a replica's GPUs in proportion to work, from a batch that is shown to be large enough",
        source="Entrain, Alg. 2, 3",
    ),
    PlannerRow(
        name="braid",
        plan=_plan_braid,
        meaning="searches the union of these layouts, except those that cannot be run, by simulation",
        searches_others=True,
    ),
)

PLANNERS: dict[str, PlannerRow] = {row.name: row for row in _ROWS}
"""Every planner by the name that `--planner` chooses it by. What reads it reads it when called."""
