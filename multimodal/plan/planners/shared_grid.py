"""Sizes that several units can share, for planners that put all units on one grid."""

from collections.abc import Iterable, Iterator, Sequence

from multimodal.plan.planners.planning_request import MOST_MICRO_BATCH_TOKENS, PlanningRequest
from multimodal.values.errors import PlanError


def shared_tensor_parallel_sizes(request: PlanningRequest, units: Sequence[str]) -> tuple[int, ...]:
    """Return the tensor parallel sizes that all units allow; raises PlanError when fixed sizes leave none."""
    return _shared(
        [request.tensor_parallel_sizes(unit) for unit in units],
        units=units,
        what="tensor parallel size",
        flag="tensor-model-parallel-size",
    )


def shared_data_parallel_sizes(request: PlanningRequest, units: Sequence[str], *, micro_batch_size: int) -> tuple[int, ...]:
    """Return the data parallel sizes that all units allow; raises PlanError when fixed sizes leave none."""
    return _shared(
        [request.data_parallel_sizes(unit, micro_batch_size=micro_batch_size) for unit in units],
        units=units,
        what="data parallel size",
        flag="data-parallel-size",
    )


def shared_context_parallel_sizes(request: PlanningRequest, units: Sequence[str], *, micro_batch_size: int) -> tuple[int, ...]:
    """Return the context parallel sizes of units that share one: the fixed one, else all that suit any of them.

    Raises PlanError when several are fixed.
    """
    fixed = [unit for unit in units if request.fixed(unit).context_parallel_size is not None]
    sizes = {unit: request.context_parallel_sizes(unit, micro_batch_size=micro_batch_size) for unit in fixed or units}
    if fixed:
        return _shared(list(sizes.values()), units=fixed, what="context parallel size", flag="context-parallel-size")
    return tuple(sorted(set.union(*map(set, sizes.values()))))


def _shared(sizes: Sequence[Iterable[int]], *, units: Sequence[str], what: str, flag: str) -> tuple[int, ...]:
    common = sorted(set.intersection(*map(set, sizes)))
    if not common:
        found = ", ".join(f"'{unit}' {list(each)}" for unit, each in zip(units, sizes, strict=True))
        raise PlanError(
            f"this planner gives {' and '.join(units)} one {what}, but they allow none together ({found}); fix the same "
            f"--UNIT-{flag} for all, or choose a planner that gives every unit its own"
        )
    return tuple(common)


def micro_batch_sizes(request: PlanningRequest, choices: Sequence[int]) -> Iterator[int]:
    """Yield the fixed microbatch size, or the choices that divide the global batch and make no overlong microbatches."""
    if request.micro_batch_size is not None:
        yield request.micro_batch_size
        return
    longest = max(loads[0] for loads in request.mean_loads.values())
    yield from (
        size
        for size in choices
        if size == 1 or (request.global_batch_size % size == 0 and size * longest <= MOST_MICRO_BATCH_TOKENS)
    )


def largest_fitting(sizes: Sequence[int], *, gpus_per_replica: int, num_gpus: int, count: int = 2) -> Sequence[int]:
    """Return the largest data parallel sizes that fit, in ascending order: fewer replicas only make every stage busier.

    Two, since the largest may lose a little where gradients are reduced over more of them.
    """
    return [size for size in sizes if size * gpus_per_replica <= num_gpus][-count:]
