"""Sizes that units share: tensor, context and data parallel sizes of one grid, and microbatches."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from multimodal.plan.planners.allowed_sizes import context_parallel_sizes, data_parallel_sizes, tensor_parallel_sizes
from multimodal.plan.planners.estimate.candidate import Candidate
from multimodal.plan.planners.estimate.unit_layout import Groups, UnitLayout
from multimodal.plan.planners.planning_request import MOST_MICRO_BATCH_TOKENS, PlanningRequest, StageSize
from multimodal.values.errors import PlanError


def with_replicas(
    request: PlanningRequest, layouts: Mapping[str, UnitLayout], data_sizes: Sequence[int], *, groups: Groups = ()
) -> Iterator[Candidate]:
    """Yield one replica of every unit, repeated by the largest of the data parallel sizes that fit (`largest_fitting`)."""
    one = Candidate({name: layouts[name] for name in request.graph.unit_names}, request.default_micro_batch_size, groups)
    for data in largest_fitting(data_sizes, gpus_per_replica=one.num_gpus, num_gpus=request.num_gpus):
        yield replace(one, layouts={name: replace(each, data_parallel_size=data) for name, each in one.layouts.items()})


def largest_candidates(candidates: Iterable[Candidate], *, num_gpus: int) -> Sequence[Candidate]:
    """Return the last two candidates that fit, of candidates with increasing replicas, for the reason in `largest_fitting`."""
    return [each for each in candidates if each.num_gpus <= num_gpus][-2:]


def shared_data_parallel_sizes(request: PlanningRequest, units: Sequence[str]) -> tuple[int, ...]:
    """Return the data parallel sizes that all units allow; raises PlanError if fixed sizes leave none."""
    return _shared({unit: data_parallel_sizes(request, unit) for unit in units}, flag="data-parallel-size")


def shared_stage_sizes(
    request: PlanningRequest, units: Sequence[str], *, context_of: Sequence[str] | None = None
) -> list[StageSize]:
    """Return every tp and cp that units may share: a fixed cp, else all that suit any of them.

    context_of: units that share only the cp. Raises PlanError if fixed sizes leave none.
    """
    tensor = _shared({unit: tensor_parallel_sizes(request, unit) for unit in units}, flag="tensor-model-parallel-size")
    units = context_of or units
    fixed = [unit for unit in units if request.fixed(unit).context_parallel_size is not None]
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


def micro_batch_sizes(request: PlanningRequest, choices: Sequence[int]) -> Iterator[int]:
    """Yield the fixed microbatch size, or the choices that divide the global batch and make no overlong microbatches."""
    if request.micro_batch_size is not None:
        yield request.micro_batch_size
        return
    longest = max(loads[0] for loads in request.loads.mean.values())
    yield from (
        size
        for size in choices
        if size == 1 or (request.global_batch_size % size == 0 and size * longest <= MOST_MICRO_BATCH_TOKENS)
    )


def largest_fitting(sizes: Sequence[int], *, gpus_per_replica: int, num_gpus: int) -> Sequence[int]:
    """Return the largest data parallel sizes that fit, in ascending order: fewer replicas only make every stage busier.

    Two sizes, since the largest may lose a little by reducing gradients over more replicas.
    """
    return [size for size in sizes if size * gpus_per_replica <= num_gpus][-2:]
