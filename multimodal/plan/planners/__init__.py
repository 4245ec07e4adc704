"""Planners: from a model, a machine and real lengths to a Plan, one file each."""

from collections.abc import Mapping
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


class Planner(Protocol):
    """What every planner looks like."""

    def __call__(self, request: PlanningRequest) -> PlannedRun:
        """Plan; raises PlanError, saying what would fit, when nothing does."""


PLANNERS: Mapping[str, Planner] = {
    "megatron": plan_megatron,
    "megatron-balanced": plan_megatron_balanced,
    "flops-ratio": plan_flops_ratio,
    "encoders-colocated": plan_encoders_colocated,
    "encoders-replicated": plan_encoders_replicated,
    "disttrain": plan_disttrain,
    "cornstarch": plan_cornstarch,
    "cornstarch-unaware": plan_cornstarch_unaware,
    "entrain": plan_entrain,
    "braid": plan_braid,
}
"""Every planner by the name that `--planner` chooses it by."""
