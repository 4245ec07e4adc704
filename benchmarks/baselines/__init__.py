"""Planners that only papers' comparisons ask for, by name: no search tries their plans, so that a run needs none of them."""

from collections import ChainMap
from functools import partial

from multimodal.plan.planners import PLANNERS, PlannerRow
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.schedule.builders import fed_encoders
from multimodal.values.deferred import Deferred
from multimodal.values.errors import PlanError


class _WithoutFedEncoders(PlannerRow):
    """A planner that is only for models in which no encoder feeds another one."""

    def __call__(self, request: PlanningRequest) -> PlannedRun:
        """Plan as other rows do; raises PlanError, too, if an encoder feeds another one, even one without work."""
        if fed := fed_encoders(request.graph):
            raise PlanError(
                f"planner '{self.name}': it is for models whose encoders all feed the LLM, but {', '.join(fed)} takes what other "
                "encoders give; choose another planner"
            )
        return PlannerRow.__call__(self, request)


_ROWS = (
    PlannerRow(
        "disttrain",
        Deferred(f"{__name__}.disttrain.plan_disttrain"),
        "GPUs, tp and dp of every unit by the adaptive resource allocation",
        "DistTrain, Alg. 1",
    ),
    PlannerRow(
        "alpa",
        Deferred(f"{__name__}.alpa.plan_alpa"),
        "every unit's stages on meshes of its own, by Alpa's objective of a pipeline's latency",
        "Optimus 5",
    ),
    PlannerRow(
        "megatron-replicated",
        partial(Deferred("multimodal.plan.planners.megatron.plan_megatron"), replicates=True),
        "as `megatron`, but every rank of an encoder's or a generator's tensor parallel group has all of it, for other images",
        "DistTrain 2.1",
    ),
    PlannerRow(
        "megatron-balanced",
        Deferred(f"{__name__}.one_grid.plan_megatron_balanced"),
        "one chain of all layers over the virtual stages of one grid, cut by dynamic programming",
        "Optimus, App. B",
    ),
    PlannerRow(
        "fsdp",
        Deferred(f"{__name__}.one_grid.plan_fsdp"),
        "all units on all ranks, without tensor or pipeline parallelism; weights are sharded",
        "Optimus 5",
    ),
    PlannerRow(
        "cornstarch",
        Deferred(f"{__name__}.cornstarch.plan_cornstarch"),
        "every unit partitioned by itself, coupled by the LLM's stage time; backwards as freezing makes them",
        "Cornstarch 4.2, Alg. 1",
    ),
    PlannerRow(
        "entrain",
        Deferred(f"{__name__}.entrain.plan_entrain"),
        "one dp; a replica's GPUs in proportion to work, from a batch that is shown to be large enough",
        "Entrain, Alg. 2, 3",
    ),
    PlannerRow(
        "flops-ratio",
        Deferred(f"{__name__}.flops_ratio.plan_flops_ratio"),
        "every unit on GPUs of its own, in proportion to FLOPs",
        "DistTrain 4.2",
    ),
    _WithoutFedEncoders(
        "encoders-colocated",
        Deferred(f"{__name__}.encoders_colocated.plan_encoders_colocated"),
        "all encoders fused in the same first stages",
        "Cornstarch 2",
    ),
    _WithoutFedEncoders(
        "encoders-replicated",
        Deferred(f"{__name__}.encoders_replicated.plan_encoders_replicated"),
        "a copy of every encoder in each LLM stage; a baseline that is predicted but cannot be run",
        "Cornstarch 2",
    ),
    PlannerRow(
        "cornstarch-unaware",
        partial(Deferred(f"{__name__}.cornstarch.plan_cornstarch"), is_frozen_aware=False),
        "`cornstarch` with every backward at twice its forward: the paper's baseline",
        "Cornstarch, Table 3",
    ),
)

BASELINES = {row.name: row for row in _ROWS}
WITHOUT_FED_ENCODERS = frozenset(row.name for row in _ROWS if isinstance(row, _WithoutFedEncoders))
"""Those that are only for models in which no encoder feeds another one."""
COMPARED = ChainMap(BASELINES, PLANNERS)
"""Every planner that a comparison can name: those of `PLANNERS`, also added ones, and then these."""
