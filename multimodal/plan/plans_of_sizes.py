"""Plans of given sizes: every unit on ranks of its own (DistTrain, Cornstarch), or all units on the same ranks (Optimus, DIP).

A unit lies on consecutive ranks, in Megatron's default order (tp fastest, then cp, then dp, then pp). On ranks of their own, the
encoders come first, in the graph's order, then the LLM; the order changes if it would split tensor parallel groups over nodes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

from multimodal.values.errors import PlanError
from multimodal.values.model_graph import ModelGraph, Unit
from multimodal.values.plan import MOST_RANKS, Plan, Replica, Stage, UnitPlan, split_layers
from multimodal.values.typed_reader import shown


@dataclass(frozen=True, slots=True)
class UnitSizes:
    """The parallel sizes of one unit; raises PlanError if one is below 1, or beyond any run."""

    tensor_parallel_size: int = 1
    """Ranks that share every layer's weights (tensor parallelism)."""
    pipeline_parallel_size: int = 1
    """Pipeline stages that the unit's layers are cut into."""
    context_parallel_size: int = 1
    """Ranks that share the tokens of every microbatch (context parallelism)."""
    data_parallel_size: int | None = None
    """Replicas of the unit. May be left out for one unit, and then follows from the number of processes."""
    virtual_pipeline_size: int = 1
    """Virtual stages (layer ranges) that each pipeline rank holds, dealt in turn; --schedule zb-v folds two into a V."""
    layers_per_virtual_stage: int | None = None
    """The same, as transformer layers in each virtual stage; these must come out even."""

    expert_parallel_size: int = 1
    """Neighbouring replicas that share the LLM's experts, each with as many; all else every replica has (expert parallelism)."""

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if size is not None and size < 1:
                raise PlanError(f"{field.name} must be at least 1, found {size}")
            if size is not None and size > MOST_RANKS:
                raise PlanError(f"{field.name} must be at most {MOST_RANKS:,}, found {shown(size)}")
        if self.virtual_pipeline_size > 1 and self.layers_per_virtual_stage is not None:
            raise PlanError("virtual_pipeline_size and layers_per_virtual_stage say the same in two ways; keep one")

    @property
    def ranks_per_replica(self) -> int:
        """Ranks of one replica: tp x cp x pp."""
        return self.tensor_parallel_size * self.context_parallel_size * self.pipeline_parallel_size

    @property
    def num_ranks(self) -> int | None:
        """Ranks of the unit; None while its data parallel size is open."""
        return None if self.data_parallel_size is None else self.ranks_per_replica * self.data_parallel_size

    def __str__(self) -> str:
        """Show the arithmetic as in error messages: `tp 1 x pp 3 x dp ?`."""
        context = f"cp {self.context_parallel_size} x " if self.context_parallel_size != 1 else ""
        replicas = "?" if self.data_parallel_size is None else self.data_parallel_size
        experts = f" (ep {self.expert_parallel_size})" if self.expert_parallel_size != 1 else ""
        return f"tp {self.tensor_parallel_size} x {context}pp {self.pipeline_parallel_size} x dp {replicas}{experts}"


def complete_sizes(sizes: Mapping[str, UnitSizes], units: Sequence[str]) -> dict[str, UnitSizes]:
    """Return the sizes of all units, 1 in everything for units without given sizes; raises PlanError for an unknown unit."""
    if unknown := [name for name in sizes if name not in units]:
        raise PlanError(f"sizes were given for a unit '{unknown[0]}'; the model's units are {', '.join(units)}")
    return {name: sizes.get(name, UnitSizes()) for name in units}


def describe_sizes(sizes: Mapping[str, UnitSizes]) -> str:
    """Show the arithmetic of all units, for error messages: `vision tp 1 x pp 1 x dp 2 = 2 ranks, llm tp 1 x pp 3 x dp ?`."""
    return ", ".join(
        f"{name} {size}" + ("" if size.num_ranks is None else f" = {size.num_ranks} rank{'s' * (size.num_ranks != 1)}")
        for name, size in sizes.items()
    )


LayerSeconds = Mapping[str, Sequence[float]]
"""Unit -> the seconds of each of its layers, forward and backward."""
EVEN: LayerSeconds = MappingProxyType({})
"""No seconds: all stages get equally many transformer layers."""
LEAST_GAIN = 0.01
"""Part of the slowest range's seconds that uneven ranges must save."""
V_SHAPE_RANGES = 2
"""Layer ranges of a stage that is folded into a V."""


def build_unit_plan(unit: Unit, *, sizes: UnitSizes, first_rank: int, seconds: Sequence[float] | None = None) -> UnitPlan:
    """Build the unit's plan on ranks `first_rank` and up.

    Layers are cut so that the slowest range is as fast as possible. They are divided evenly without their seconds, if cutting
    gains little, or if a number of transformer layers is requested. With several ranges per stage, stage p of P holds every P-th
    from p on, as Megatron deals model chunks. seconds: of each of the unit's layers. Raises PlanError if there are more ranges
    than layers, and for virtual stages without a pipeline.
    """
    assert sizes.data_parallel_size is not None
    num_stages = sizes.pipeline_parallel_size
    num_chunks = count_virtual_stages(unit, sizes=sizes)
    try:
        ranges = split_layers(unit.layers, num_stages=num_stages * num_chunks)
    except PlanError as problem:
        raise PlanError(f"unit '{unit.name}': {_explain(problem, unit, sizes=sizes, num_chunks=num_chunks)}") from None
    if seconds is not None and sizes.layers_per_virtual_stage is None:
        from multimodal.plan.partition_layers import partition_unit, range_seconds

        # Cuts with equal slowest ranges fill pipelines differently, so even ones are kept where little is gained.
        best = partition_unit(unit, seconds, num_stages=len(ranges))
        if max(range_seconds(seconds, best)) < (1 - LEAST_GAIN) * max(range_seconds(seconds, ranges)):
            ranges = best
    held = {p: ranges[p::num_stages] for p in range(num_stages)}
    tensor, context, data = sizes.tensor_parallel_size, sizes.context_parallel_size, sizes.data_parallel_size
    plan = place_stages(held, tensor=tensor, context=context, data=data, first_rank=first_rank)
    return replace(plan, expert_parallel_size=sizes.expert_parallel_size)


def place_stages(
    held: Mapping[int, Sequence[tuple[int, int]]], *, tensor: int, context: int, data: int, first_rank: int = 0
) -> UnitPlan:
    """Give each stage of each replica its ranks, in Megatron's order tp-cp-ep-dp-pp.

    Stage p of replica d holds the ranks `first_rank + (p * data + d) * (context * tensor) + 0 .. context * tensor - 1`. held:
    position p of a stage -> its layer ranges; tensor, context, data: parallel sizes.
    """
    size = tensor * context

    def stage(position: int, replica: int) -> Stage:
        first = first_rank + (position * data + replica) * size
        return Stage(tuple(range(first, first + size)), tuple(held[position]))

    return UnitPlan(tuple(Replica(tuple(stage(each, replica) for each in held)) for replica in range(data)), tensor, context)


def fold_stages(plan: Plan) -> Plan:
    """Return the plan with stages of two ranges folded into a V (ZB-V): p of P holds p and 2 P - 1 - p instead of p and P + p."""

    def folded(replica: Replica) -> Replica:
        ranges = sorted(each for stage in replica.stages for each in stage.layer_ranges)
        pairs = zip(ranges, reversed(ranges), strict=True)
        return Replica(tuple(replace(stage, layer_ranges=pair) for stage, pair in zip(replica.stages, pairs, strict=False)))

    units = dict(plan.units)
    for name, unit in plan.units.items():
        if all(len(stage.layer_ranges) == V_SHAPE_RANGES for replica in unit.replicas for stage in replica.stages):
            units[name] = replace(unit, replicas=tuple(map(folded, unit.replicas)))
    return Plan(units)


def count_virtual_stages(unit: Unit, *, sizes: UnitSizes) -> int:
    """Return the number of layer ranges of each of the unit's stages; raises PlanError if sizes and layers do not match."""
    num_stages, num_layers, each = sizes.pipeline_parallel_size, unit.num_inner_layers, sizes.layers_per_virtual_stage
    flags = f"--{unit.name.replace('_', '-')}"
    flag, other = f"{flags}-num-layers-per-virtual-pipeline-stage", f"{flags}-virtual-pipeline-model-parallel-size"
    if each is not None and num_layers % (num_stages * each):
        fitting = [str(count) for count in range(1, num_layers + 1) if num_layers % (num_stages * count) == 0]
        advice = f"choose {' or '.join(fitting)}" if fitting else f"{num_stages} stages cannot hold equally many"
        raise PlanError(
            f"unit '{unit.name}': {flag} {each} does not divide its {num_layers} transformer layers over {num_stages} pipeline "
            f"stage{'s' * (num_stages != 1)}; {advice}, or use {other} N, which allows uneven ranges"
        )
    count = num_layers // (num_stages * each) if each is not None else sizes.virtual_pipeline_size
    if count > 1 and num_stages == 1:
        given = f"{flag} {each}" if each is not None else f"{other} {count}"
        raise PlanError(
            f"unit '{unit.name}': {given} would be ignored: with one pipeline stage there is nothing to interleave; raise "
            f"{flags}-pipeline-model-parallel-size or leave it out"
        )
    return count


def _explain(problem: PlanError, unit: Unit, *, sizes: UnitSizes, num_chunks: int) -> str:
    flags = f"--{unit.name.replace('_', '-')}"
    if unit.module is not None:
        return (
            f"a module of transformers is one piece, which cannot be cut into {sizes.pipeline_parallel_size} pipeline stages; "
            f"give it replicas instead ({flags}-data-parallel-size)"
        )
    if num_chunks == 1:
        return f"{problem} ({flags}-pipeline-model-parallel-size)"
    num_layers, num_stages = unit.num_inner_layers, sizes.pipeline_parallel_size
    most = num_layers // num_stages
    advice = f"use at most {most}" if most > 1 else "leave virtual stages out"
    return (
        f"{num_layers} transformer layers cannot be cut into {num_stages * num_chunks} layer ranges, {num_chunks} for each of "
        f"{num_stages} pipeline stages ({flags}-virtual-pipeline-model-parallel-size); {advice}, or lower "
        f"{flags}-pipeline-model-parallel-size"
    )


def plan_disaggregated(
    graph: ModelGraph,
    *,
    sizes: Mapping[str, UnitSizes],
    world_size: int,
    ranks_per_node: int | None = None,
    layer_seconds: LayerSeconds = EVEN,
) -> Plan:
    """Give each unit `tp x cp x pp x dp` ranks of its own, one unit after the other.

    If that would split tensor parallel groups over nodes, units with large groups come first. sizes: of units; those without an
    entry have size 1 in everything but their data parallel size, which is open. At most one unit may leave it open: it takes all
    ranks that the others leave. world_size: processes, all of which must be used. ranks_per_node: None if unknown, or if there is
    one node. layer_seconds: units without an entry are cut evenly. Raises PlanError, with the arithmetic, if ranks do not add up.
    """
    complete = _fill_open_size(complete_sizes(sizes, graph.unit_names), world_size=world_size)

    def place(order: Sequence[str]) -> Plan:
        units, first_rank = {}, 0
        for name in order:
            seconds = layer_seconds.get(name)
            units[name] = build_unit_plan(graph.unit(name), sizes=complete[name], first_rank=first_rank, seconds=seconds)
            first_rank += len(units[name].ranks)
        return Plan({name: units[name] for name in graph.unit_names})

    plan = place(graph.unit_names)
    if ranks_per_node is not None and split_units(plan, ranks_per_node=ranks_per_node):
        order = sorted(graph.unit_names, key=lambda name: -complete[name].tensor_parallel_size)
        plan = min(plan, place(order), key=lambda each: len(split_units(each, ranks_per_node=ranks_per_node)))
    return _valid(plan, graph, world_size)


def _fill_open_size(sizes: dict[str, UnitSizes], *, world_size: int) -> dict[str, UnitSizes]:
    found = describe_sizes(sizes)
    open_units = [name for name, size in sizes.items() if size.num_ranks is None]
    num_taken = sum(size.num_ranks or 0 for size in sizes.values())
    if len(open_units) > 1:
        flags = [f"--{name.replace('_', '-')}-dp" for name in open_units[:-1]]
        raise PlanError(
            f"{found}: the data parallel sizes of {' and '.join(open_units)} are left out, but only one can follow from the "
            f"number of processes ({world_size}); give {' and '.join(flags)}, "
            "or let the units share ranks with --colocate-units"
        )
    if not open_units:
        if num_taken != world_size:
            raise PlanError(
                f"{found}: together {num_taken} ranks, but the run has {_processes(world_size)}; launch {num_taken}, change a "
                "size, or leave one unit's data parallel size out so that it follows"
            )
        return sizes
    name = open_units[0]
    replica = sizes[name].ranks_per_replica
    num_left = world_size - num_taken
    if num_left < replica or num_left % replica:
        enough = num_taken + replica * max(1, num_left // replica)
        counts = [enough, enough + replica] if num_left > 0 else [enough]
        share = ", or let the units share ranks with --colocate-units" if len(sizes) > 1 else ""
        raise PlanError(
            f"{found}: of {_processes(world_size)} the other units leave {max(0, num_left)} for '{name}', whose replicas take "
            f"{replica} rank{'s' * (replica != 1)} each; launch {' or '.join(map(str, counts))}, or change a size{share}"
        )
    return {**sizes, name: replace(sizes[name], data_parallel_size=num_left // replica)}


def _processes(count: int) -> str:
    return f"{count} process{'es' * (count != 1)}"


def split_units(plan: Plan, *, ranks_per_node: int) -> dict[str, tuple[int, ...]]:
    """Return the units with tensor parallel groups on several nodes -> the first such group; ranks are numbered node by node."""
    found: dict[str, tuple[int, ...]] = {}
    for name, unit in plan.units.items():
        for stage in (stage for replica in unit.replicas for stage in replica.stages):
            for group in unit.tensor_parallel_groups(stage):
                if group[0] // ranks_per_node != group[-1] // ranks_per_node:
                    found.setdefault(name, group)
    return found


def describe_placement(graph: ModelGraph, plan: Plan, *, ranks_per_node: int, is_given: bool) -> Iterator[str]:
    """Yield notes on units that are not in the model's order (unless the plan comes from a file) and groups split over nodes."""
    order = sorted(graph.unit_names, key=lambda name: min(plan.units[name].ranks))
    if not is_given and order != list(graph.unit_names):
        yield f"ranks go to {', '.join(order)}, in this order, so that fewer tensor parallel groups lie across two nodes"
    for name, group in split_units(plan, ranks_per_node=ranks_per_node).items():
        yield (
            f"warning: unit '{name}': the tensor parallel group of ranks {group[0]}-{group[-1]} lies across nodes of "
            f"{ranks_per_node} ranks, and its layers will wait for the network; "
            + ("let the plan's groups begin at multiples of their size" if is_given else "use a size that divides a node's ranks")
        )


def plan_colocated(
    graph: ModelGraph, *, sizes: Mapping[str, UnitSizes], world_size: int, layer_seconds: LayerSeconds = EVEN
) -> Plan:
    """Lay every unit over all ranks, with dp `world_size / (tp x cp x pp)`; arguments, errors: as in `plan_disaggregated`."""
    units = {}
    for name, each in complete_sizes(sizes, graph.unit_names).items():
        replica = each.ranks_per_replica
        where = f"unit '{name}' ({each}), colocated on {world_size} rank{'s' * (world_size != 1)}"
        if world_size % replica:
            raise PlanError(
                f"{where}: a replica takes {replica} ranks, which does not divide {world_size}; change its tp, cp or pp, or "
                f"launch {replica * max(1, world_size // replica)} or {replica * (world_size // replica + 1)} processes"
                if world_size > replica
                else f"{where}: a replica takes {replica} ranks; launch {replica} processes or lower its tp, cp or pp"
            )
        if each.data_parallel_size not in (None, world_size // replica):
            raise PlanError(
                f"{where}: a unit that spans all ranks has dp {world_size} / {replica} = {world_size // replica}, "
                f"not {each.data_parallel_size}; leave --{name.replace('_', '-')}-data-parallel-size out"
            )
        spread = replace(each, data_parallel_size=world_size // replica)
        units[name] = build_unit_plan(graph.unit(name), sizes=spread, first_rank=0, seconds=layer_seconds.get(name))
    plan = Plan(units)
    return _valid(plan, graph, world_size)


def _valid(plan: Plan, graph: ModelGraph, world_size: int) -> Plan:
    from multimodal.values.validate import validate_plan  # behind what lists the sizes

    validate_plan(plan, graph=graph, world_size=world_size)
    return plan
