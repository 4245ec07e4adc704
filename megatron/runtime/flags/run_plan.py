"""The plan of a run: the plan file's, or made from the size flags."""

from megatron.runtime.flags.configuration import RunConfig
from multimodal.plan.colocated import plan_colocated
from multimodal.plan.disaggregated import plan_disaggregated
from multimodal.schedule.builders import BUILDERS
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan, read_plan


def build_plan(config: RunConfig, graph: ModelGraph, world_size: int) -> Plan:
    """Build the plan that the flags ask for on `world_size` processes.

    A plan file is taken as it is; `--colocate-units` shares all ranks; else every unit gets ranks of its own. One process and
    sizes of 1 throughout can only be colocated, so that needs no flag. Raises PlanError when the plan does not fit.
    """
    parallelism = config.parallelism
    if parallelism.plan is not None:
        return read_plan(parallelism.plan, graph=graph, world_size=world_size)
    is_alone = world_size == 1 and all(
        sizes.ranks_per_replica == 1 and sizes.data_parallel_size in (None, 1) for sizes in parallelism.units.values()
    )
    planner = plan_colocated if parallelism.colocate_units or is_alone else plan_disaggregated
    return planner(graph, sizes=parallelism.units, world_size=world_size, is_folded=BUILDERS[config.training.schedule].is_folded)
