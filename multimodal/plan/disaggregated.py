"""Every unit on ranks of its own (DistTrain, Cornstarch): the encoders' first, in the graph's order, then the LLM's.

The order changes if it would split tensor parallel groups over nodes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from multimodal.plan.unit_grid import EVEN, LayerSeconds, build_unit_plan
from multimodal.plan.unit_sizes import UnitSizes, complete_sizes, describe_sizes
from multimodal.values.errors import PlanError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.validate import validate_plan


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
    one node. layer_seconds: units without an entry are cut evenly. Raises PlanError, with the arithmetic, if the numbers of ranks
    do not add up.
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
    validate_plan(plan, graph=graph, world_size=world_size)
    return plan


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
