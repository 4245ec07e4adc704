"""Keeps tensor parallel groups inside nodes: they communicate several times per layer, and links between nodes are slow."""

from collections.abc import Iterator

from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan


def split_units(plan: Plan, *, ranks_per_node: int) -> dict[str, tuple[int, ...]]:
    """Return the units with tensor parallel groups on several nodes -> the first such group.

    Ranks are numbered node by node, as launchers number them.
    """
    found: dict[str, tuple[int, ...]] = {}
    for name, unit in plan.units.items():
        for stage in (stage for replica in unit.replicas for stage in replica.stages):
            for group in unit.tensor_parallel_groups(stage):
                if group[0] // ranks_per_node != group[-1] // ranks_per_node:
                    found.setdefault(name, group)
    return found


def describe_placement(graph: ModelGraph, plan: Plan, *, ranks_per_node: int, is_given: bool) -> Iterator[str]:
    """Yield notes for the user: units that are not in the model's order, and groups that are split over nodes.

    is_given: True if the plan comes from a file.
    """
    order = sorted(graph.unit_names, key=lambda name: min(plan.units[name].ranks))
    if not is_given and order != list(graph.unit_names):
        yield f"ranks go to {', '.join(order)}, in this order, so that fewer tensor parallel groups lie across two nodes"
    for name, group in split_units(plan, ranks_per_node=ranks_per_node).items():
        yield (
            f"warning: unit '{name}': the tensor parallel group of ranks {group[0]}-{group[-1]} lies across nodes of "
            f"{ranks_per_node} ranks, and its layers will wait for the network; "
            + ("let the plan's groups begin at multiples of their size" if is_given else "use a size that divides a node's ranks")
        )
