"""The plan of a set's instances as a run takes it: stages, ranks and shares of the batch."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from multimodal.balance import BALANCERS, Placement
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.plan.planners.templates.template_set import Instance, PipelineTemplate, TemplateSet
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan


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
        template = templates.template(instance.nodes)
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
    """Return the run of a set's instances at the start.

    It uses 1F1B, for which templates are planned, the passes that cost nothing, and a balancer that keeps samples whole.
    """
    run = PlannedRun(
        plan_instances(templates, templates.instances, llm=request.graph.backbone.name),
        planner=planner,
        balance=next(
            name for name, row in BALANCERS.items() if row.keeps_samples_whole and Placement.CHAIN in row.tried_first_on
        ),
        micro_batch_size=templates.micro_batch_size,
        recompute="full" if templates.recompute_granularity == "full" else request.recompute,
        objective_seconds=templates.step_seconds,
    )
    return replace(run, passes=request.passes(run.plan), transformer_impl=request.implementation(run.schedule))


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
