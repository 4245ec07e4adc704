"""All units on the same ranks (Optimus, DIP): each spans every rank with its own tp, pp and dp."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from multimodal.plan.unit_grid import EVEN, LayerSeconds, build_unit_plan
from multimodal.plan.unit_sizes import UnitSizes, complete_sizes
from multimodal.values.errors import PlanError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.validate import validate_plan


def plan_colocated(
    graph: ModelGraph, *, sizes: Mapping[str, UnitSizes], world_size: int, layer_seconds: LayerSeconds = EVEN
) -> Plan:
    """Lay every unit over all ranks, with dp `world_size / (tp x cp x pp)`; arguments, errors: as in `plan_disaggregated`."""
    spread = {
        name: _spread(name, sizes=each, world_size=world_size) for name, each in complete_sizes(sizes, graph.unit_names).items()
    }
    build = partial(build_unit_plan, first_rank=0)
    plan = Plan({unit.name: build(unit, sizes=spread[unit.name], seconds=layer_seconds.get(unit.name)) for unit in graph.units})
    validate_plan(plan, graph=graph, world_size=world_size)
    return plan


def _spread(name: str, *, sizes: UnitSizes, world_size: int) -> UnitSizes:
    replica = sizes.ranks_per_replica
    where = f"unit '{name}' ({sizes}), colocated on {world_size} rank{'s' * (world_size != 1)}"
    if world_size % replica:
        raise PlanError(
            f"{where}: a replica takes {replica} ranks, which does not divide {world_size}; change its tp, cp or pp, or launch "
            f"{replica * max(1, world_size // replica)} or {replica * (world_size // replica + 1)} processes"
            if world_size > replica
            else f"{where}: a replica takes {replica} ranks; launch {replica} processes or lower its tp, cp or pp"
        )
    if sizes.data_parallel_size not in (None, world_size // replica):
        raise PlanError(
            f"{where}: a unit that spans all ranks has dp {world_size} / {replica} = {world_size // replica}, "
            f"not {sizes.data_parallel_size}; leave --{name.replace('_', '-')}-data-parallel-size out"
        )
    return replace(sizes, data_parallel_size=world_size // replica)
