"""Planners: from a model, a machine and real lengths to a Plan, one file each."""

from collections.abc import Mapping
from typing import Protocol

from multimodal.plan.planners.braid import OTHER_PLANNERS, plan_braid
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest


class Planner(Protocol):
    """What every planner looks like."""

    def __call__(self, request: PlanningRequest) -> PlannedRun:
        """Plan; raises PlanError, saying what would fit, when nothing does."""


PLANNERS: Mapping[str, Planner] = {**OTHER_PLANNERS, "braid": plan_braid}
"""Every planner by the name that `--planner` chooses it by."""
