"""The sizes that a planner may give a unit, or units together, and microbatches.

They are those that fit the model, the machine and the data, or the one that the user has fixed.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import product

from multimodal.cost.token_shares import DEFAULT_BLOCK_SIZE
from multimodal.plan.planners.planning_request import CONTEXT_PARALLEL_SIZES, PlanningRequest, StageSize
from multimodal.values.errors import PlanError
from multimodal.values.model_graph import Role

MICRO_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Microbatch sizes that a planner may choose from if the user leaves the size open."""
MOST_MICRO_BATCH_TOKENS = 32_768
"""Most average tokens of a unit for microbatches of several samples; beyond, efficiency no longer improves."""
LEAST_PART_TOKENS = 8 * DEFAULT_BLOCK_SIZE


def tensor_parallel_sizes(request: PlanningRequest, unit: str) -> tuple[int, ...]:
    """Return the sizes that divide a node, the unit's heads and widths, and the LLM's vocabulary; raises PlanError."""
    described = request.graph.unit(unit)
    widths = [*described.divided_widths.values()]
    widths += [request.vocab_size] if described.role is Role.BACKBONE else []
    fixed = request.fixed(unit).tensor_parallel_size
    widths += [1] if described.module is not None else []
    per_node = request.cluster.gpus_per_node
    sizes = [size for size in range(1, per_node + 1) if not (per_node % size or any(width % size for width in widths))]
    if fixed is not None and fixed not in sizes:
        raise PlanError(
            f"unit '{unit}': tensor parallel size {fixed} is fixed, but it must divide the {per_node} GPUs of a node and "
            f"{', '.join(map(str, widths))}; choose from {', '.join(map(str, sizes))}"
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
    largest = max(average, request.loads.of_samples[unit][:, 0].max())
    shares = int(largest / request.least_share_tokens), int(average / DEFAULT_BLOCK_SIZE)
    most = min(request.most_context_parallel, request.num_gpus, *shares)
    described = request.graph.unit(unit)
    longest = 0 if described.is_causal else request.loads.longest_items.get(unit, 0)
    parts = min(longest / max(1.0, average), longest / LEAST_PART_TOKENS, request.most_context_parallel, request.num_gpus)
    most = max(most, math.ceil(parts))
    if described.role is Role.ENCODER and DEFAULT_BLOCK_SIZE % described.merge_factor:
        most = 1
    return tuple(size for size in CONTEXT_PARALLEL_SIZES if size <= max(1, most))


def stage_sizes(request: PlanningRequest, unit: str) -> list[StageSize]:
    """Return every tp and cp of a unit."""
    return [StageSize(*each) for each in product(tensor_parallel_sizes(request, unit), context_parallel_sizes(request, unit))]


def data_parallel_sizes(request: PlanningRequest, unit: str) -> tuple[int, ...]:
    """Return the divisors of the number of microbatches, so that replicas get equally many; or the fixed size.

    They are multiples of the copies of sharded state.
    """
    fixed = request.fixed(unit).data_parallel_size
    count, multiple_of = request.num_microbatches, math.lcm(request.experts_of(unit), request.num_state_copies or 1)
    if fixed is not None:
        return (fixed,)
    return _divisors(count, most=min(count, request.num_gpus), multiple_of=multiple_of)


@cache
def _divisors(count: int, *, most: int, multiple_of: int) -> tuple[int, ...]:
    return tuple(size for size in range(multiple_of, most + 1, multiple_of) if count % size == 0)


def shared_data_parallel_sizes(request: PlanningRequest, units: Sequence[str]) -> tuple[int, ...]:
    """Return the data parallel sizes that all units allow; raises PlanError if fixed sizes leave none."""
    return _shared({unit: data_parallel_sizes(request, unit) for unit in units}, flag="data-parallel-size")


def shared_stage_sizes(
    request: PlanningRequest, units: Sequence[str], *, context_of: Sequence[str] | None = None
) -> list[StageSize]:
    """Return every tp that units share with a cp that `context_of` (default: they) fix, or that suits any; raises PlanError.

    A module of transformers or diffusers is one piece, and so fixes it to 1.
    """
    tensor = _shared({unit: tensor_parallel_sizes(request, unit) for unit in units}, flag="tensor-model-parallel-size")
    units, unit_of = context_of or units, request.graph.unit
    fixed = [unit for unit in units if request.fixed(unit).context_parallel_size is not None or unit_of(unit).module is not None]
    sizes = {unit: context_parallel_sizes(request, unit) for unit in fixed or units}
    context = _shared(sizes, flag="context-parallel-size") if fixed else sorted(set().union(*sizes.values()))
    return [StageSize(*each) for each in product(tensor, context)]


def _shared(sizes: Mapping[str, Sequence[int]], *, flag: str) -> tuple[int, ...]:
    """Return the sizes that all units have."""
    common = sorted(set.intersection(*map(set, sizes.values())))
    if not common:
        found = ", ".join(f"'{unit}' {list(each)}" for unit, each in sizes.items())
        raise PlanError(
            f"this planner gives {' and '.join(sizes)} one {flag.replace('-', ' ').replace(' model', '')}, but they allow none "
            f"together ({found}); fix the same --UNIT-{flag} for all, or choose a planner that gives every unit its own"
        )
    return tuple(common)


def micro_batch_sizes(request: PlanningRequest) -> list[int]:
    """Return the fixed microbatch size, or those that divide the global batch and make no overlong microbatches."""
    if request.micro_batch_size is not None:
        return [request.micro_batch_size]
    batch, longest = request.global_batch_size, max(loads[0] for loads in request.loads.mean.values())
    return [size for size in MICRO_BATCH_SIZES if size == 1 or (batch % size == 0 and size * longest <= MOST_MICRO_BATCH_TOKENS)]


def largest_fitting(sizes: Sequence[int], *, gpus_per_replica: int, num_gpus: int) -> Sequence[int]:
    """Return the two largest data parallel sizes that fit, ascending: the largest may lose a little by reducing gradients."""
    return [size for size in sizes if size * gpus_per_replica <= num_gpus][-2:]


def fewest_enough(works: Callable[[int], bool], *, too_few: int, first: int, most: int) -> int | None:
    """Return a number that works while the one before does not, by doubling and halving; None if none up to `most` does."""
    enough = first
    while not works(enough):
        too_few, enough = enough, 2 * enough
        if enough > most:
            return None
    return too_few + 1 + bisect_left(range(too_few + 1, enough), True, key=works)
