"""The plan of a run on the available nodes: replicas of a set's templates, as ranks and layers."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from multimodal.plan.planners.templates.instantiate import share_batch
from multimodal.plan.planners.templates.reconfigure import Pipeline, Reconfigurer
from multimodal.plan.planners.templates.template_plan import plan_instances
from multimodal.plan.planners.templates.template_set import Instance, TemplateSet
from multimodal.values.errors import PlanError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.validate import validate_plan

BYTES_PER_SECOND = 12.5e9
"""Bytes per second that a node is assumed to send where nothing else is known: 100 Gbit/s."""


@dataclass(frozen=True, slots=True)
class NodesPlan:
    """The plan of a run for the nodes that are available."""

    pipelines: tuple[Pipeline, ...]
    plan: Plan
    nodes: tuple[int, ...]
    """The nodes that the plan uses, in the order of their ranks."""
    how: str
    """`Reconfiguration.how`, or `start` for the first plan of a run."""


def plan_nodes(
    templates: TemplateSet,
    nodes: Sequence[int],
    *,
    graph: ModelGraph,
    before: Sequence[Pipeline] = (),
    holding: Collection[int] = (),
) -> NodesPlan:
    """Return the plan for these nodes; a pure function, so that all ranks decide alike.

    nodes: in the order in which their ranks are numbered. before: the replicas that the run had; holding: the nodes that still
    hold the state of these. If not all nodes can be used, all replicas get one template, and the remaining nodes stay out. Raises
    PlanError if there are too few nodes for the replicas that fault tolerance needs.
    """
    reconfigurer = Reconfigurer(templates, BYTES_PER_SECOND)
    try:
        if before:
            known = {node for each in before for node in each.nodes}
            lost, joined = known - set(holding), set(nodes) - (known & set(holding))
            found = reconfigurer.reconfigure(before, lost=lost, joined=joined)
            return _checked(templates, found.pipelines, nodes, graph, found.how)
        is_first = list(nodes) == list(range(templates.num_nodes))
        return _checked(templates, reconfigurer.start() if is_first else reconfigurer.fresh(nodes)[0], nodes, graph, "start")
    except PlanError:
        if len(nodes) < templates.fewest_nodes:
            raise
    return _alike(reconfigurer, nodes, graph)


def _alike(reconfigurer: Reconfigurer, nodes: Sequence[int], graph: ModelGraph) -> NodesPlan:
    """Return replicas of one template, the one with the shortest step."""
    templates = reconfigurer.templates
    found: list[tuple[float, int, tuple[Pipeline, ...]]] = []
    for size in range(templates.least_nodes, templates.most_nodes + 1):
        count = min(len(nodes) // size, templates.num_microbatches)
        if count < templates.fewest_replicas:
            continue
        shared = share_batch(templates.times, [size] * count, num_microbatches=templates.num_microbatches)
        places = [tuple(nodes[first : first + size]) for first in range(0, count * size, size)]
        pipelines = tuple(
            Pipeline(*each) for each in zip(places, (one.num_microbatches for one in shared.instances), strict=True)
        )
        found.append((shared.step_seconds, size, pipelines))
    if not found:
        raise PlanError(
            f"{len(nodes)} nodes cannot hold {templates.fewest_replicas} replicas of one template of {templates.least_nodes} "
            "nodes or more; wait for nodes to return, or plan anew with a lower fault tolerance"
        )
    return _checked(templates, min(found)[2], nodes, graph, "replan")


def _checked(
    templates: TemplateSet, pipelines: tuple[Pipeline, ...], nodes: Sequence[int], graph: ModelGraph, how: str
) -> NodesPlan:
    used = {node for each in pipelines for node in each.nodes}
    ordered = tuple(node for node in nodes if node in used)
    instances = [Instance(len(each.nodes), each.num_microbatches) for each in pipelines]
    places = [[ordered.index(node) for node in each.nodes] for each in pipelines]
    plan = plan_instances(templates, instances, llm=graph.backbone.name, places=places)
    validate_plan(plan, graph=graph, world_size=len(ordered) * templates.gpus_per_node)
    return NodesPlan(pipelines, plan, ordered, how)
