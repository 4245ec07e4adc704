"""The plan of a set's instances as a run takes it: stages, ranks and shares of the batch."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from multimodal.balance import BALANCERS, Placement
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.plan.planners.templates.reconfigure import Pipeline, Reconfigurer, share_batch
from multimodal.plan.planners.templates.template_set import Instance, PipelineTemplate, TemplateSet
from multimodal.values.errors import PlanError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from multimodal.values.validate import validate_plan


def plan_instances(
    templates: TemplateSet, instances: Sequence[Instance], *, llm: str, places: Sequence[Sequence[int]] | None = None
) -> Plan:
    """Return the plan of some replicas; ranks are numbered consecutively from node to node.

    places: the place of each replica's nodes among all nodes; by default they come one after another.

    A stage with layers of two units becomes a stage of each, on the same ranks. On a node, larger stages come first, so tensor
    parallel groups of one size lie side by side. llm: the unit whose replicas have the instances' shares of the batch.
    """
    replicas: dict[str, list[list[Stage]]] = {unit.name: [] for unit in templates.chain}
    count = iter(range(sum(instance.nodes for instance in instances)))
    for index, instance in enumerate(instances):
        template = templates.templates[instance.nodes - templates.least_nodes]
        nodes = places[index] if places is not None else [next(count) for _ in range(instance.nodes)]
        ranks = _ranks(template, [place * templates.gpus_per_node for place in nodes])
        first = 0
        for unit in templates.chain:
            stages, end = [], first + unit.num_layers
            for stage, own in zip(template.stages, ranks, strict=True):
                held = max(stage.first_layer, first) - first, min(stage.last_layer + 1, end) - first
                if held[0] < held[1]:
                    stages.append(Stage(own, (held,)))
            replicas[unit.name].append(stages)
            first = end
    shares = tuple(instance.num_microbatches for instance in instances)
    return Plan({name: _build_unit(found, shares if name == llm else ()) for name, found in replicas.items()})


def run_of_templates(templates: TemplateSet, request: PlanningRequest, *, planner: str) -> PlannedRun:
    """Return the run of a set's first instances: 1F1B, passes that cost nothing, a balancer that keeps samples whole."""
    whole = (name for name, row in BALANCERS.items() if row.keeps_samples_whole and Placement.CHAIN in row.tried_first_on)
    plan = plan_instances(templates, templates.instances, llm=request.graph.backbone.name)
    run = PlannedRun(plan, planner=planner, balance=next(whole), micro_batch_size=templates.micro_batch_size)
    recompute = "full" if templates.recompute_granularity == "full" else request.recompute
    run = replace(run, recompute=recompute, objective_seconds=templates.step_seconds)
    return replace(run, passes=request.passes(plan), transformer_impl=request.implementation(run.schedule))


def _ranks(template: PipelineTemplate, first_ranks: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the ranks of every stage; first_ranks: of the template's nodes."""
    used = Counter[int]()
    found: list[tuple[int, ...]] = [()] * len(template.stages)
    for index in sorted(range(len(template.stages)), key=lambda index: (-template.stages[index].gpus, index)):
        stage = template.stages[index]
        first = first_ranks[stage.node] + used[stage.node]
        found[index] = tuple(range(first, first + stage.gpus))
        used[stage.node] += stage.gpus
    return found


def _build_unit(replicas: Sequence[Sequence[Stage]], shares: tuple[int, ...]) -> UnitPlan:
    """Return a unit with the tensor parallel size of most of its stages; the other stages have their own."""
    size = Counter(len(stage.ranks) for stages in replicas for stage in stages).most_common(1)[0][0]
    sized = (
        (stage if len(stage.ranks) == size else replace(stage, tensor_parallel_size=len(stage.ranks)) for stage in stages)
        for stages in replicas
    )
    return UnitPlan(tuple(Replica(tuple(stages)) for stages in sized), size, microbatch_shares=shares)


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
        pipelines = tuple(map(Pipeline, places, (each.num_microbatches for each in shared.instances)))
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
