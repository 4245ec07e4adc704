"""Lay one unit out on consecutive ranks, in Megatron's default order (tp fastest, then cp, then dp, then pp)."""

from multimodal.plan.unit_sizes import UnitSizes
from multimodal.values.errors import PlanError
from multimodal.values.model_graph import Unit
from multimodal.values.plan import Replica, Stage, UnitPlan, split_layers


def build_unit_plan(unit: Unit, *, sizes: UnitSizes, first_rank: int) -> UnitPlan:
    """Build the unit's plan on ranks `first_rank` and up.

    Stage p of replica d holds the ranks `first_rank + (p * dp + d) * (cp * tp) + 0 .. cp * tp - 1`, so the peers of one tensor
    parallel group are neighbours and replicas of one stage are close, as with Megatron's order tp-cp-ep-dp-pp.
    Transformer layers are divided evenly over the stages. Raises PlanError when there are more stages than layers.
    """
    assert sizes.data_parallel_size is not None
    try:
        layer_ranges = split_layers(unit.layers, num_stages=sizes.pipeline_parallel_size)
    except PlanError as problem:
        raise PlanError(f"unit '{unit.name}': {problem} (--{unit.name}-pipeline-model-parallel-size)") from None
    group_size = sizes.tensor_parallel_size * sizes.context_parallel_size

    def stage(replica_index: int, stage_index: int) -> Stage:
        first = first_rank + (stage_index * data_parallel_size + replica_index) * group_size
        return Stage(tuple(range(first, first + group_size)), (layer_ranges[stage_index],))

    data_parallel_size = sizes.data_parallel_size
    replicas = tuple(Replica(tuple(stage(d, p) for p in range(len(layer_ranges)))) for d in range(data_parallel_size))
    return UnitPlan(replicas, sizes.tensor_parallel_size, sizes.context_parallel_size)
