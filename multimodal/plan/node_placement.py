"""Keeps tensor parallel groups inside nodes: they communicate several times per layer, and links between nodes are slow."""

from collections.abc import Iterator

from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan, UnitPlan


def find_split_group(unit: UnitPlan, *, ranks_per_node: int) -> tuple[int, ...] | None:
    """Return the first tensor parallel group of a unit with ranks on two nodes; None if there is none.

    Ranks are numbered node by node, as launchers number them.
    """
    groups = (group for replica in unit.replicas for stage in replica.stages for group in unit.tensor_parallel_groups(stage))
    return next((group for group in groups if len({rank // ranks_per_node for rank in group}) > 1), None)


def split_units(plan: Plan, *, ranks_per_node: int) -> list[str]:
    """Return the units with tensor parallel groups on several nodes."""
    return [name for name, unit in plan.units.items() if find_split_group(unit, ranks_per_node=ranks_per_node) is not None]


def describe_placement(graph: ModelGraph, plan: Plan, *, ranks_per_node: int, is_given: bool) -> Iterator[str]:
    """Yield notes for the user: units that are not in the model's order, and groups that are split over nodes.

    is_given: True if the plan comes from a file.
    """
    order = sorted(graph.unit_names, key=lambda name: min(plan.units[name].ranks))
    if not is_given and order != list(graph.unit_names):
        yield f"ranks go to {', '.join(order)}, in this order, so that fewer tensor parallel groups lie across two nodes"
    for name in split_units(plan, ranks_per_node=ranks_per_node):
        group = find_split_group(plan.units[name], ranks_per_node=ranks_per_node)
        assert group is not None
        yield (
            f"warning: unit '{name}': the tensor parallel group of ranks {group[0]}-{group[-1]} lies across nodes of "
            f"{ranks_per_node} ranks, and its layers will wait for the network; "
            + ("let the plan's groups begin at multiples of their size" if is_given else "use a size that divides a node's ranks")
        )
