"""Plans a set of pipeline templates (Oobleck 2.4): numbers of nodes, the stages of each, and the instances at the start."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile

from multimodal.cost.step_memory import GRADIENT_BYTES
from multimodal.plan.planners.allowed_sizes import fewest_enough, micro_batch_sizes
from multimodal.plan.planners.estimate.memory_estimate import layer_memory
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.plan.planners.search.layout_search import efficient_first
from multimodal.plan.planners.templates.chain import Chain, StageMapping, StageTables, list_chain, map_stages
from multimodal.plan.planners.templates.reconfigure import instantiate
from multimodal.plan.planners.templates.template_set import ChainUnit, PipelineTemplate, TemplateSet, TemplateStage, Tolerance
from multimodal.values.errors import NothingFitsError, PlanError

MOST_NODES = 4096
"""Most nodes up to which a sufficient number is searched."""
MOST_MICROBATCHES = 2**20
"""Most microbatches of a step that a template is planned for: beyond, filling and draining are negligible."""


def plan_templates(request: PlanningRequest, *, fault_tolerance: int, replicas_per_copy: int = 1) -> TemplateSet:
    """Plan templates of n_0, n_0 + 1, ... nodes, and the replicas that use all nodes at first with the shortest step.

    n_0 is the fewest nodes that hold a whole replica with all of its optimizer state (1 / g of it with g replicas_per_copy); the
    largest template has the nodes that f other replicas of n_0 nodes leave, or as many as there are layers for. Each is the best
    mapping of the chain of layers to its GPUs for its share of the batch (`map_stages`). An open microbatch size is halved from
    the size that makes layers efficient as long as n_0 gets smaller or steps get shorter; if nothing fits, layers are fully
    recomputed. Raises PlanError, with advice, if the nodes or their memory cannot give the fault tolerance.
    """
    tolerance = Tolerance(fault_tolerance, replicas_per_copy)
    num_nodes = _count_nodes(request, tolerance)
    sizes = micro_batch_sizes(request)
    first = sizes.index(efficient_first(request, sizes)[0])
    best: tuple[tuple[int, float], TemplateSet] | None = None
    problem: PlanError | None = None
    for size in sizes[first::-1]:
        try:
            found, seconds = _plan_size(request.changed(micro_batch_size=size), num_nodes, tolerance)
        except PlanError as failure:
            problem = failure
            continue
        if best is not None and best[0] <= (found.least_nodes, seconds):
            break
        best = (found.least_nodes, seconds), found
    if best is None:
        assert problem is not None
        raise problem
    return best[1]


def _count_nodes(request: PlanningRequest, tolerance: Tolerance) -> int:
    per_node, gpus = request.cluster.gpus_per_node, request.num_gpus
    num_nodes, rest = divmod(gpus, per_node)
    if rest:
        fewer = f"{num_nodes * per_node} or " if num_nodes else ""
        raise PlanError(
            f"templates use whole nodes, but {gpus} GPUs are no multiple of the {per_node} of a node; use {fewer}"
            f"{(num_nodes + 1) * per_node}"
        )
    if tolerance.fault_tolerance < 0 or tolerance.replicas_per_copy < 1:
        raise PlanError(f"fault tolerance must be at least 0, and replicas per copy at least 1, found {tolerance}")
    wanted = tolerance.fewest_replicas
    if wanted > num_nodes:
        most = num_nodes // tolerance.replicas_per_copy - 1
        lower = f"use a fault tolerance of at most {most}" if most >= 0 else "use fewer replicas per copy"
        raise PlanError(
            f"{tolerance} asks for {wanted} replicas on nodes of their own, but {gpus} GPUs make {num_nodes} of {per_node}; "
            f"{lower}, or at least {wanted * per_node} GPUs"
        )
    return num_nodes


def _plan_size(request: PlanningRequest, num_nodes: int, tolerance: Tolerance) -> tuple[TemplateSet, float]:
    """Plan with a given microbatch size; return the set and the seconds of a step of its first instances."""
    problem: PlanError | None = None
    for recompute in (request.recompute,) if request.recompute else (None, "full"):
        chain = list_chain(request.changed(recompute=recompute), tolerance)
        # Of n_0 nodes and more; none if there are too few nodes for the required number of the smallest.
        num_others = tolerance.fewest_replicas - 1
        counts = list(range(1, num_nodes - num_others + 1))
        mapped = _map_nodes(chain, counts, num_nodes)
        least = next((nodes for nodes, template in zip(counts, mapped, strict=True) if template), num_nodes + 1)
        templates = tuple(filter(None, takewhile(bool, mapped[least - 1 : max(0, num_nodes - num_others * least)])))
        if templates:
            _check_coverage(templates, num_nodes, tolerance.fewest_replicas)
            times = {each.nodes: each.times for each in templates}
            start = instantiate(times, num_nodes, request.num_microbatches, tolerance.fewest_replicas)
            found = TemplateSet(
                num_nodes=num_nodes,
                gpus_per_node=request.cluster.gpus_per_node,
                tolerance=tolerance,
                micro_batch_size=request.default_micro_batch_size,
                num_microbatches=request.num_microbatches,
                recompute_granularity=recompute,
                chain=tuple(ChainUnit(unit.name, len(unit.layers)) for unit in request.graph.units),
                layer_bytes=layer_bytes(chain.request),
                instances=start.instances,
                templates=templates,
            )
            return found, start.step_seconds
        problem = problem or _too_few_nodes(chain, num_nodes)
    assert problem is not None
    raise problem


def _check_coverage(templates: Sequence[PipelineTemplate], num_nodes: int, fewest_replicas: int) -> None:
    """Raise if the templates, for lack of layers, are too small to make up any number of nodes with the fewest replicas."""
    least, most = templates[0].nodes, templates[-1].nodes
    for nodes in range(fewest_replicas * least, num_nodes + 1):
        if not any(count * least <= nodes <= count * most for count in range(fewest_replicas, nodes // least + 1)):
            raise PlanError(
                f"{nodes} nodes cannot all be used: replicas need {least} nodes at least, and the model has layers for at most "
                f"{most}; use fewer GPUs, or a higher fault tolerance"
            )


def _map_nodes(chain: Chain, counts: Sequence[int], num_nodes: int) -> list[PipelineTemplate | None]:
    """Return the best template of each number of nodes; None if none fits."""
    per_node = chain.request.cluster.gpus_per_node
    shares = [min(MOST_MICROBATCHES, -(-chain.request.num_microbatches * nodes // num_nodes)) for nodes in counts]
    best: list[PipelineTemplate | None] = [None] * len(counts)
    for sizes in size_chains(chain.sizes):
        rows = [chain.sizes.index(size) for size in sizes]
        tables = StageTables(*(table[rows] for table in chain.tables))
        mapped = map_stages(tables, num_gpus=[per_node * nodes for nodes in counts], num_microbatches=shares)
        for index, mapping in enumerate(mapped):
            if mapping is not None:
                template = _template(chain, mapping, counts[index], shares[index])
                known = best[index]
                if known is None or template.iteration_seconds < known.iteration_seconds:
                    best[index] = template
    return best


def size_chains(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the longest sequences of sizes in which each divides the next: of 1, 2, 3, 6 two. Their stages fill nodes."""

    def extend(run: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        later = [size for size in sizes if not run or (size > run[-1] and size % run[-1] == 0)]
        nearest = [size for size in later if not any(size > other and size % other == 0 for other in later)]
        for size in nearest:
            yield from extend((*run, size))
        if not nearest:
            yield run

    return list(extend(()))


def _template(chain: Chain, mapping: StageMapping, nodes: int, num_microbatches: int) -> PipelineTemplate:
    stages, first = [], 0
    nodes_of_stages = place_stages(mapping.gpus, chain.request.cluster.gpus_per_node)
    for end, gpus, node in zip(mapping.ends, mapping.gpus, nodes_of_stages, strict=True):
        forward, backward = chain.seconds[:, chain.sizes.index(gpus), first:end].sum(axis=1).tolist()
        stages.append(TemplateStage(int(chain.bounds[first]), int(chain.bounds[end]) - 1, gpus, node, forward, backward))
        first = end
    template = PipelineTemplate(nodes, num_microbatches, 0.0, tuple(stages))
    return replace(template, iteration_seconds=template.times.seconds(num_microbatches))


def place_stages(gpus: Sequence[int], gpus_per_node: int) -> tuple[int, ...]:
    """Return the node of each stage: large stages first, in pipeline order, each on the first node with room."""
    free: list[int] = []
    placed: dict[int, int] = {}
    for stage in sorted(range(len(gpus)), key=lambda stage: -gpus[stage]):
        node = next((node for node, room in enumerate(free) if room >= gpus[stage]), len(free))
        if node == len(free):
            free.append(gpus_per_node)
        free[node] -= gpus[stage]
        placed[stage] = node
    numbers = {node: number for number, node in enumerate(dict.fromkeys(placed[stage] for stage in range(len(gpus))))}
    return tuple(numbers[placed[stage]] for stage in range(len(gpus)))


def layer_bytes(request: PlanningRequest) -> tuple[int, ...]:
    """Return the bytes of weights and optimizer state of every layer of the chain, all tensor parallel ranks together."""
    found = []
    for unit in request.graph.units:
        for kind in unit.layers:
            layer = layer_memory(request, unit.name, kind)
            gradients = layer.num_trained * max(GRADIENT_BYTES, layer.bytes_per_element)
            found.append(round(layer.static_bytes(1) - gradients))
    return tuple(found)


def _too_few_nodes(chain: Chain, num_nodes: int) -> PlanError:
    """Return the error for nodes that cannot hold the required number of replicas, with advice."""

    def holds(nodes: int) -> bool:
        return _map_nodes(chain, [nodes], max(num_nodes, nodes))[0] is not None

    least = fewest_enough(holds, too_few=0, first=1, most=min(MOST_NODES, 2 * len(chain.pieces)))
    memory = chain.request.memory_text
    if least is None:
        return NothingFitsError(
            f"no number of nodes up to {MOST_NODES} holds a whole replica in {memory}, at microbatch size "
            f"{chain.request.default_micro_batch_size}; use GPUs with more memory, freeze units, or make microbatches smaller"
        )
    replicas, per_node = chain.tolerance.fewest_replicas, chain.request.cluster.gpus_per_node
    wanted, lower = replicas * least, num_nodes // (least * chain.tolerance.replicas_per_copy) - 1
    instead = f", or a fault tolerance of at most {lower}" if lower >= 0 else ""
    return NothingFitsError(
        f"one replica needs {least} nodes in {memory}, so {chain.tolerance} needs {replicas} x "
        f"{least} = {wanted} nodes, but there are {num_nodes}; use {wanted * per_node} GPUs{instead}"
    )
