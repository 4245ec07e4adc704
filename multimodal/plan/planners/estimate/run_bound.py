"""A lower bound of a run's step for all balancers and schedules."""

from collections import defaultdict

from multimodal.plan.planners.estimate.layer_times import PlanningTimes, stage_times
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import StageSize

CONCAVITY = 0.95
"""Average microbatches may be slower than the mean of different ones by this factor: some have no items of a unit at all."""


def least_step_seconds(run: PlannedRun, times: PlanningTimes) -> float:
    """Return the busiest ranks' work on average microbatches: balancers move it between replicas, schedules in time. O(stages).

    times: for the run's microbatch size, recomputation and overlap of tensor parallelism.
    """
    per_microbatch = times.request.global_batch_size / run.micro_batch_size
    busy: dict[int, float] = defaultdict(float)
    for name, unit in run.plan.units.items():
        size = StageSize(unit.tensor_parallel_size, unit.context_parallel_size)
        seconds = stage_times(times.of_unit(name, size), [stage.layer_ranges for stage in unit.replicas[0].stages])
        for replica in unit.replicas:
            for stage, each in zip(replica.stages, seconds, strict=True):
                busy[stage.ranks[0]] += each * per_microbatch / unit.data_parallel_size
    return CONCAVITY * max(busy.values())
