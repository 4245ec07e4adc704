"""Planners that only papers' comparisons ask for by name: importing this adds their rows to `PLANNERS`.

Rows of your own are added alike (docs/write_your_own.md). tools/plan.py and runs that plan for themselves import it, as `braid`
judges all rows' plans, and theirs are the best now and then.
"""

from functools import partial

from benchmarks.baselines.encoders_colocated import plan_encoders_colocated
from benchmarks.baselines.encoders_replicated import plan_encoders_replicated
from benchmarks.baselines.flops_ratio import plan_flops_ratio
from multimodal.plan.planners import PLANNERS, PlannerRow
from multimodal.plan.planners.cornstarch import plan_cornstarch

BASELINES = (
    PlannerRow("flops-ratio", plan_flops_ratio, "every unit on GPUs of its own, in proportion to FLOPs", "DistTrain 4.2"),
    PlannerRow(
        "encoders-colocated",
        plan_encoders_colocated,
        "all encoders fused in the same first stages",
        "Cornstarch 2",
        takes_fed_encoders=False,
    ),
    PlannerRow(
        "encoders-replicated",
        plan_encoders_replicated,
        "a copy of every encoder in each LLM stage; a baseline that is predicted but cannot be run",
        "Cornstarch 2",
        takes_fed_encoders=False,
    ),
    PlannerRow(
        "cornstarch-unaware",
        partial(plan_cornstarch, is_frozen_aware=False),
        "`cornstarch` with every backward at twice its forward: the paper's baseline",
        "Cornstarch, Table 3",
    ),
)

PLANNERS.update((row.name, row) for row in BASELINES)
