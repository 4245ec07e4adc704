"""The sizes that a planner may give a unit: those that fit its model, machine and data, or the one that the user has fixed."""

import math
from itertools import product

from multimodal.plan.planners.planning_request import (
    BLOCK_SIZE,
    CONTEXT_PARALLEL_SIZES,
    LEAST_PART_TOKENS,
    PlanningRequest,
    StageSize,
)
from multimodal.values.errors import PlanError
from multimodal.values.model_graph import Role


def tensor_parallel_sizes(request: PlanningRequest, unit: str) -> tuple[int, ...]:
    """Return the sizes that divide a node, the unit's heads and widths, and the LLM's vocabulary; raises PlanError."""
    described = request.graph.unit(unit)
    widths = [*described.divided_widths.values()]
    widths += [request.vocab_size] if described.role is Role.BACKBONE else []
    fixed = request.fixed(unit).tensor_parallel_size
    widths += [1] if described.module is not None else []
    sizes = [
        size
        for size in range(1, request.cluster.gpus_per_node + 1)
        if request.cluster.gpus_per_node % size == 0 and not any(width % size for width in widths)
    ]
    if fixed is not None and fixed not in sizes:
        raise PlanError(
            f"unit '{unit}': tensor parallel size {fixed} is fixed, but it must divide the {request.cluster.gpus_per_node} GPUs "
            f"of a node and {', '.join(map(str, widths))}; choose from {', '.join(map(str, sizes))}"
        )
    return (fixed,) if fixed is not None else tuple(size for size in sizes if size <= request.num_gpus)


def pipeline_parallel_sizes(request: PlanningRequest, unit: str) -> tuple[int, ...]:
    """Return 1 up to the unit's number of transformer layers, or the fixed size."""
    fixed = request.fixed(unit).pipeline_parallel_size
    most = request.graph.unit(unit).num_inner_layers
    if fixed is not None and not 1 <= fixed <= most:
        raise PlanError(f"unit '{unit}': {most} transformer layers cannot be cut into {fixed} pipeline stages")
    return (fixed,) if fixed is not None else tuple(range(1, min(most, request.num_gpus) + 1))


def context_parallel_sizes(request: PlanningRequest, unit: str) -> tuple[int, ...]:
    """The fixed size; else 1, and those up to `most_context_parallel` whose ranks get `least_share_tokens` of a large load.

    A large load is a microbatch of average samples or the longest sample; of the former, every rank must get a block, since
    short samples are mixed with long ones. An encoder has 1 if blocks would cut patches that it merges.
    """
    fixed = request.fixed(unit).context_parallel_size
    if request.graph.unit(unit).module is not None:
        return (1,)
    if fixed is not None:
        return (fixed,)
    average = request.default_micro_batch_size * request.loads.mean[unit][0]
    most = min(
        request.most_context_parallel,
        request.num_gpus,
        int(max(average, request.loads.of_samples[unit][:, 0].max()) / request.least_share_tokens),
        int(average / BLOCK_SIZE),
    )
    described = request.graph.unit(unit)
    longest = 0 if described.is_causal else request.loads.longest_items.get(unit, 0)
    parts = min(longest / max(1.0, average), longest / LEAST_PART_TOKENS, request.most_context_parallel, request.num_gpus)
    most = max(most, math.ceil(parts))
    if described.role is Role.ENCODER and BLOCK_SIZE % described.merge_factor:
        most = 1
    return tuple(size for size in CONTEXT_PARALLEL_SIZES if size <= max(1, most))


def stage_sizes(request: PlanningRequest, unit: str) -> list[StageSize]:
    """Return every tp and cp of a unit."""
    return [StageSize(*each) for each in product(tensor_parallel_sizes(request, unit), context_parallel_sizes(request, unit))]


def data_parallel_sizes(request: PlanningRequest, unit: str) -> tuple[int, ...]:
    """Return the divisors of the number of microbatches, so that replicas get equally many; or the fixed size."""
    fixed = request.fixed(unit).data_parallel_size
    count, experts = request.num_microbatches, request.experts_of(unit)
    if fixed is not None:
        return (fixed,)
    return tuple(size for size in range(1, min(count, request.num_gpus) + 1) if count % size == 0 == size % experts)
