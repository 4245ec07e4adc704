"""Planners that only papers' comparisons ask for, by name: no search tries their plans, so that a run needs none of them."""

from collections import ChainMap
from functools import partial

from benchmarks.baselines.alpa import plan_alpa
from benchmarks.baselines.cornstarch import plan_cornstarch
from benchmarks.baselines.disttrain import plan_disttrain
from benchmarks.baselines.encoders_colocated import plan_encoders_colocated
from benchmarks.baselines.encoders_replicated import plan_encoders_replicated
from benchmarks.baselines.entrain import plan_entrain
from benchmarks.baselines.flops_ratio import plan_flops_ratio
from benchmarks.baselines.one_grid import plan_fsdp, plan_megatron_balanced
from multimodal.plan.planners import PLANNERS, PlannerRow
from multimodal.plan.planners.megatron import plan_megatron
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.schedule.builders import fed_encoders
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
        "disttrain", plan_disttrain, "GPUs, tp and dp of every unit by the adaptive resource allocation", "DistTrain, Alg. 1"
    ),
    PlannerRow(
        "alpa", plan_alpa, "every unit's stages on meshes of its own, by Alpa's objective of a pipeline's latency", "Optimus 5"
    ),
    PlannerRow(
        "megatron-replicated",
        partial(plan_megatron, replicates=True),
        "as `megatron`, but every rank of an encoder's or a generator's tensor parallel group has all of it, for other images",
        "DistTrain 2.1",
    ),
    PlannerRow(
        "megatron-balanced",
        plan_megatron_balanced,
        "one chain of all layers over the virtual stages of one grid, cut by dynamic programming",
        "Optimus, App. B",
    ),
    PlannerRow(
        "fsdp", plan_fsdp, "all units on all ranks, without tensor or pipeline parallelism; weights are sharded", "Optimus 5"
    ),
    PlannerRow(
        "cornstarch",
        plan_cornstarch,
        "every unit partitioned by itself, coupled by the LLM's stage time; backwards as freezing makes them",
        "Cornstarch 4.2, Alg. 1",
    ),
    PlannerRow(
        "entrain",
        plan_entrain,
        "one dp; a replica's GPUs in proportion to work, from a batch that is shown to be large enough",
        "Entrain, Alg. 2, 3",
    ),
    PlannerRow("flops-ratio", plan_flops_ratio, "every unit on GPUs of its own, in proportion to FLOPs", "DistTrain 4.2"),
    _WithoutFedEncoders(
        "encoders-colocated", plan_encoders_colocated, "all encoders fused in the same first stages", "Cornstarch 2"
    ),
    _WithoutFedEncoders(
        "encoders-replicated",
        plan_encoders_replicated,
        "a copy of every encoder in each LLM stage; a baseline that is predicted but cannot be run",
        "Cornstarch 2",
    ),
    PlannerRow(
        "cornstarch-unaware",
        partial(plan_cornstarch, is_frozen_aware=False),
        "`cornstarch` with every backward at twice its forward: the paper's baseline",
        "Cornstarch, Table 3",
    ),
)

BASELINES = {row.name: row for row in _ROWS}
WITHOUT_FED_ENCODERS = frozenset(row.name for row in _ROWS if isinstance(row, _WithoutFedEncoders))
"""Those that are only for models in which no encoder feeds another one."""
COMPARED = ChainMap(BASELINES, PLANNERS)
"""Every planner that a comparison can name: those of `PLANNERS`, also added ones, and then these."""
