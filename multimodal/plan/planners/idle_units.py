"""Units without work in the data: planners leave them out, and they are placed afterwards on ranks of the others."""

from collections.abc import Mapping
from dataclasses import replace

from multimodal.plan.planners.allowed_sizes import tensor_parallel_sizes
from multimodal.plan.planners.estimate.memory_estimate import stage_bytes
from multimodal.plan.planners.estimate.unit_layout import UnitLayout, build_unit, even_layout
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import FixedSizes, PlanningRequest, StageSize
from multimodal.schedule.builders import BUILDERS
from multimodal.values.errors import PlanError
from multimodal.values.model_graph import Role, Unit
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan, split_layers

MOST_MEMORY_SHARE = 0.05
"""Share of a GPU's memory that such a unit may take: it is cut into more stages until it takes less."""


def without_idle_units(request: PlanningRequest) -> PlanningRequest:
    """Return the request for the units with work in the data."""
    idle = request.loads.idle_units
    if not idle:
        return request
    units = tuple(unit for unit in request.graph.units if unit.name not in idle)
    edges = tuple(edge for edge in request.graph.edges if idle.isdisjoint(edge))
    fixed = {name: sizes for name, sizes in request.fixed_sizes.items() if name not in idle}
    return replace(request, graph=replace(request.graph, units=units, edges=edges), fixed_sizes=fixed)


def place_idle_units(run: PlannedRun, request: PlanningRequest) -> PlannedRun:
    """Add the units without work to a plan for the others: one replica each on the LLM's first ranks, in few stages.

    There they only cost memory and the update of their weights. Encoders that a schedule requires side by side are laid out as
    the others are. Where a schedule requires one chain over a grid, they continue it, or the run takes the schedule that this one
    equals without. Fixed sizes are kept. Raises PlanError if these need more GPUs than there are.
    """
    missing = [unit for unit in request.graph.units if unit.name not in run.plan.units]
    if not missing:
        return run
    row = BUILDERS[run.schedule]
    busy = next((name for name in run.plan.units if request.graph.unit(name).role is Role.ENCODER), None)
    pattern = run.plan.units[busy] if busy and (not run.can_run or row.fewest_encoders > 1) else None
    units = dict(run.plan.units)
    for unit in missing:
        is_beside = unit.role is Role.ENCODER
        units[unit.name] = _beside(pattern, unit) if pattern and is_beside else _on_first_ranks(run.plan, unit, request)
    placed = replace(run, plan=_in_order(units, request))
    if row.layout is None or row.layout.is_met(request.graph, placed.plan):
        return placed
    in_chain = {unit.name: _in_chain(run.plan, unit, request) or units[unit.name] for unit in missing}
    continued = _in_order({**units, **in_chain}, request)
    if row.layout.is_met(request.graph, continued):
        return replace(run, plan=continued)
    return replace(placed, schedule=row.otherwise)


def _in_order(units: Mapping[str, UnitPlan], request: PlanningRequest) -> Plan:
    return Plan({name: units[name] for name in request.graph.unit_names})


def _in_chain(plan: Plan, unit: Unit, request: PlanningRequest) -> UnitPlan | None:
    """Lay a unit out so that a chain of all layers, dealt to the stages of one grid in turn, stays one.

    The unit is either whole on the stage where the next unit begins (or the last one ends), or cut over one round of all stages;
    None if neither is small, or the unit cannot have the grid's sizes.
    """
    names, place = request.graph.unit_names, request.graph.unit_names.index(unit.name)
    before, after = ([name for name in part if name in plan.units] for part in (names[:place], names[place:]))
    busy = [stage.ranks for name in (*before, *after) for stage in plan.units[name].replicas[0].virtual_stages]
    sizes = plan.units[request.graph.backbone.name]
    tensor, context = sizes.tensor_parallel_size, sizes.context_parallel_size
    if request.fixed(unit.name) != FixedSizes() or tensor not in tensor_parallel_sizes(request, unit.name) or context > 1:
        return None
    turn = list(dict.fromkeys(busy))
    here = plan.units[after[0]].replicas[0].virtual_stages[0].ranks if after else busy[-1]
    first = turn.index(here) if after else turn.index(here) + 1
    for ranks in ([here], turn[first:] + turn[:first]):
        if len(ranks) <= unit.num_inner_layers and _is_small(request, unit, even_layout(unit, StageSize(tensor), 1, len(ranks))):
            ranges = split_layers(unit.layers, num_stages=len(ranks))
            stages = (Stage(each, (layers,)) for each, layers in zip(ranks, ranges, strict=True))
            return UnitPlan((Replica(tuple(stages)),), tensor)
    return None


def _beside(pattern: UnitPlan, unit: Unit) -> UnitPlan:
    """Cut a unit's layers over the ranks of another unit's stages."""
    ranges = split_layers(unit.layers, num_stages=len(pattern.replicas[0].stages))
    replicas = (
        Replica(tuple(Stage(stage.ranks, (each,)) for stage, each in zip(replica.stages, ranges, strict=True)))
        for replica in pattern.replicas
    )
    return UnitPlan(tuple(replicas), pattern.tensor_parallel_size, pattern.context_parallel_size)


def _on_first_ranks(plan: Plan, unit: Unit, request: PlanningRequest) -> UnitPlan:
    """Lay out one replica, with the LLM's tp if possible, in as few stages as its share of the memory allows."""
    llm, fixed = plan.units[request.graph.backbone.name], request.fixed(unit.name)
    sizes = tensor_parallel_sizes(request, unit.name)
    tensor = max((size for size in sizes if llm.tensor_parallel_size % size == 0), default=sizes[0])
    size, data = StageSize(tensor, fixed.context_parallel_size or 1), fixed.data_parallel_size or 1
    most_stages = max(1, min(unit.num_inner_layers, plan.num_ranks // (size.num_ranks * data)))
    counts = (fixed.pipeline_parallel_size,) if fixed.pipeline_parallel_size else range(1, most_stages + 1)
    layouts = [even_layout(unit, size, data, count) for count in counts]
    layout = next((layout for layout in layouts if _is_small(request, unit, layout)), layouts[-1])
    if layout.num_ranks > request.num_gpus:
        raise PlanError(
            f"unit '{unit.name}' is asked for nothing by these lengths, but its fixed sizes take {layout.num_ranks} GPUs of "
            f"{request.num_gpus}; unfix them"
        )
    first = min(min(llm.ranks), max(0, plan.num_ranks - layout.num_ranks))
    return build_unit(layout, first_rank=first - first % tensor)  # a whole number of groups per node


def _is_small(request: PlanningRequest, unit: Unit, layout: UnitLayout) -> bool:
    stages = range(layout.pipeline_parallel_size)
    largest = max(stage_bytes(request, unit.name, layout, stage, num_samples=0) for stage in stages)
    return largest <= MOST_MEMORY_SHARE * request.memory_bytes
