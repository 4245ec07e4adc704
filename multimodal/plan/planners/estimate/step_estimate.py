"""The time of a step in closed form (Entrain, Eq. 4.2), the effect of varying lengths, and the choice of the shortest."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from multimodal.cost.cluster import Cluster
from multimodal.cost.communication import collective_seconds
from multimodal.cost.memoize import memoized
from multimodal.cost.step_memory import GRADIENT_BYTES
from multimodal.cost.unit_load import UnitLoad
from multimodal.plan.planners.estimate.candidate import Candidate
from multimodal.plan.planners.estimate.chain_estimate import slowdown_by_lengths
from multimodal.plan.planners.estimate.layer_times import stage_times, unit_seconds
from multimodal.plan.planners.estimate.memory_estimate import draw_microbatches
from multimodal.plan.planners.estimate.unit_layout import UnitLayout
from multimodal.plan.planners.estimate.unit_options import infeasible
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest, StageSize

BACKWARD_SHARE = 2 / 3
"""Share of the backward in a microbatch's time in a stage that trains all its weights."""
MOST_CHUNKS = 4
"""Layer ranges per stage beyond which more ranges do not change the wait for heavy microbatches."""
LEAST_ROUNDS, MOST_NODES = 3, 20_000
"""Fewest microbatches that are run, as a multiple of the stages, and most computations."""


def slowdown(
    request: PlanningRequest, units: Iterable[str], *, num_stages: int, num_microbatches: int, num_chunks: int = 1
) -> float:
    """Return the time of a pipeline's step relative to one of average microbatches.

    Runs 1F1B over equal ranges on microbatches as a balancer leaves them, the heaviest first: next to each other, heavy
    microbatches cause one wait, while in random order each of them would cause one. Over several units together, a microbatch
    weighs the work of all of its samples in them. num_microbatches: of a replica; if there are many, fewer are run. num_chunks:
    layer ranges of each stage.
    """
    if num_stages <= 1 or not request.loads.vary:
        return 1.0
    chunks = min(num_chunks, MOST_CHUNKS)
    most_rounds = max(LEAST_ROUNDS, MOST_NODES // (2 * num_stages**2 * chunks))
    return _slowdown(request, tuple(units), num_stages, chunks, min(-(-num_microbatches // num_stages), most_rounds))


@memoized
def _slowdown(request: PlanningRequest, units: tuple[str, ...], num_stages: int, num_chunks: int, rounds: int) -> float:
    sums, count = _microbatch_works(request, units), num_stages * rounds
    works = sums[len(sums) * (2 * np.arange(count) + 1) // (2 * count)]
    return max(1.0, slowdown_by_lengths(works, num_lanes=num_stages, num_chunks=num_chunks)) if works.any() else 1.0


@memoized
def heaviest_seconds(request: PlanningRequest, unit: str, size: StageSize) -> float:
    """Return the seconds that the heaviest sample spends in all stages of a unit: no step is shorter."""
    heaviest = request.loads.of_samples[unit][int(np.argmax(_seconds_of_samples(request, unit)))]
    return unit_seconds(request, unit, UnitLoad(*map(int, heaviest)), size)


@memoized
def _microbatch_works(request: PlanningRequest, units: tuple[str, ...]) -> NDArray[np.float64]:
    """Return the work of microbatches (`draw_microbatches`) in all layers of these units."""
    works = sum((len(request.graph.unit(unit).layers) * _seconds_of_samples(request, unit) for unit in units), np.zeros(1))
    return draw_microbatches(works, request.default_micro_batch_size)


@memoized
def _seconds_of_samples(request: PlanningRequest, unit: str) -> NDArray[np.float64]:
    """Return each sample's seconds in one layer of the unit on one rank: the mean over all but the two outer layers."""
    rows, index = np.unique(request.loads.of_samples[unit].astype(np.int64), axis=0, return_inverse=True)
    body = request.graph.unit(unit).inner_layers
    shares = {kind: count / len(body) for kind, count in Counter(body).items()}
    seconds_of = partial(request.layer_costs.seconds, unit)
    seconds = [sum(share * seconds_of(kind, UnitLoad(*row)).forward for kind, share in shares.items()) for row in rows.tolist()]
    return np.array(seconds)[index.ravel()]


def unit_stage_seconds(request: PlanningRequest, candidate: Candidate) -> Mapping[str, tuple[float, ...]]:
    """Return unit -> seconds of each stage per microbatch, forward and backward; at least those of moving sharded weights."""
    stage_seconds, firsts = {}, candidate.first_ranks if request.zero_stage == 3 else {}
    for unit, layout in candidate.layouts.items():
        computing, least = stage_times(request, unit, layout.stage_size, layout.stages), 0.0
        if firsts:  # twice the weights, and once the gradients
            per_weight = 2 * request.cluster.bytes_per_element + GRADIENT_BYTES
            least = per_weight / GRADIENT_BYTES * reduction_seconds(request, unit, layout, first_rank=firsts[unit])
        stage_seconds[unit] = tuple(max(seconds, least) for seconds in computing)
    return stage_seconds


def lower_bound_seconds(request: PlanningRequest, candidate: Candidate) -> float:
    """Return the busiest lane's work: no schedule of average microbatches is shorter."""
    stages = unit_stage_seconds(request, candidate)
    busy = {unit: candidate.unit_microbatches(request, unit) * max(seconds) for unit, seconds in stages.items()}
    return max(sum(busy[unit] for unit in group) for group in candidate.all_groups)


def estimate_seconds(request: PlanningRequest, candidate: Candidate, *, has_spread: bool = False) -> float:
    """Return the time of a step of average microbatches under 1F1B.

    The sum of tau over the longest chain of units, plus (n_u - 1) beta_u of the slowest group of units, where unit u's replicas
    run n_u microbatches each; with equal numbers everywhere and separate ranks for each unit, this is Eq. 4.2. Encoders on
    separate ranks work side by side, so only the slowest one's stages count in the chain. Virtual stages divide a unit's warm-up.
    has_spread: pipelines wait for their heaviest microbatches, no step is shorter than its heaviest sample, and reductions hide
    behind the last backwards.
    """
    stages, layouts, groups = unit_stage_seconds(request, candidate), candidate.layouts, candidate.all_groups
    warmup = {
        unit: sum(seconds) / chunks + max(seconds) * (1 - 1 / chunks)
        for unit, seconds in stages.items()
        for chunks in [layouts[unit].virtual_stages]
    }
    encoders = {unit.name for unit in request.graph.encoders}
    chain = sum(seconds for unit, seconds in warmup.items() if unit not in encoders)
    chain += max((sum(warmup[unit] for unit in group if unit in encoders) for group in groups), default=0.0)
    counts = {unit: candidate.unit_microbatches(request, unit) for unit in stages}
    depth = sum(max(len(stages[unit]) for unit in group) for group in groups)  # stages that a microbatch passes in sequence
    waits = {
        unit: slowdown(request, (unit,), num_stages=depth, num_microbatches=counts[unit]) if has_spread else 1.0
        for unit in stages
    }
    steady = max(sum((counts[unit] - 1) * max(stages[unit]) * waits[unit] for unit in group) for group in groups)
    reducing = least = 0.0
    if request.zero_stage != 3:
        firsts = candidate.first_ranks
        reducing = max(
            exposed_reduction_seconds(request, unit, each, stage_seconds=max(stages[unit]), first_rank=firsts[unit])
            if has_spread
            else reduction_seconds(request, unit, each, first_rank=firsts[unit])
            for unit, each in layouts.items()
        )
    if has_spread:
        heaviest = max(heaviest_seconds(request, unit, layout.stage_size) for unit, layout in layouts.items())
        least = max(heaviest, sum(map(sum, (stages[unit] for unit in stages if unit not in encoders))))
    return max(chain + steady, least) + reducing


def reduction_seconds(request: PlanningRequest, unit: str, layout: UnitLayout, *, first_rank: int = 0) -> float:
    """Return the seconds of reducing the slowest stage's gradients over its holders; first_rank: of the unit."""
    if layout.weight_copies == 1:
        return 0.0
    weights = request.trained_weights[unit]
    of_stages = (sum(weights[end] - weights[first] for first, end in ranges) for ranges in layout.stages)
    ranks_per_position = layout.ranks_per_stage * layout.data_parallel_size
    return max(
        replicas_seconds(request, GRADIENT_BYTES * each, layout, first_rank=first_rank + stage * ranks_per_position)
        for stage, each in enumerate(of_stages)
    )


def replicas_seconds(request: PlanningRequest, num_bytes: float, layout: UnitLayout, *, first_rank: int) -> float:
    """Return the seconds of reducing or gathering a stage's bytes over its replicas, the first of which has `first_rank`."""
    size, per_node = layout.tensor_parallel_size, request.cluster.gpus_per_node
    latency, per_byte = _ring_costs(request.cluster, first_rank % per_node, layout.weight_copies, size)
    return latency + per_byte * num_bytes / size if layout.weight_copies > 1 else 0.0


@lru_cache(maxsize=4096)
def _ring_costs(cluster: Cluster, first_rank: int, count: int, stride: int) -> tuple[float, float]:
    """Return latency, and seconds per byte, of a collective over every `stride`th rank."""
    ranks = range(first_rank, first_rank + count * stride, stride)
    latency, with_bytes = (collective_seconds(num_bytes, ranks=ranks, cluster=cluster) for num_bytes in (0.0, 1e9))
    return latency, (with_bytes - latency) / 1e9


def exposed_reduction_seconds(
    request: PlanningRequest, unit: str, layout: UnitLayout, *, stage_seconds: float, first_rank: int = 0
) -> float:
    """Return the seconds of a unit's reduction that the last microbatch's backward does not hide.

    Gradients are reduced layer by layer (`reduce-by-layer`): all but the first layer's while the backward runs. stage_seconds: of
    one microbatch in the slowest stage, forward and backward. first_rank: of the unit.
    """
    whole = reduction_seconds(request, unit, layout, first_rank=first_rank)
    of_first = whole / max(sum(end - first for first, end in ranges) for ranges in layout.stages)
    return of_first + max(0.0, whole - of_first - BACKWARD_SHARE * stage_seconds)


Choice = TypeVar("Choice", bound=Candidate)


def choose_near(
    request: PlanningRequest,
    candidates: Iterable[Choice],
    *,
    seconds: Callable[[PlanningRequest, Choice], float],
    least_seconds: Callable[[PlanningRequest, Choice], float] = lambda *_: 0.0,
    within: float = 1.0,
) -> list[tuple[Choice, float]]:
    """Return the candidates that fit and whose steps are at most `within` times the shortest, in order, with their seconds.

    Of equals, those with fewer GPUs come first. least_seconds: a lower bound; a candidate whose bound is too long is not examined
    further. Raises PlanError if none fits GPUs and memory.
    """
    best, found = math.inf, list[tuple[float, int, Choice]]()
    for candidate in candidates:
        if candidate.num_gpus > request.num_gpus or least_seconds(request, candidate) > within * best:
            continue
        taken = seconds(request, candidate)
        if taken <= within * best and candidate.fits(request):
            best = min(best, taken)
            found.append((taken, candidate.num_gpus, candidate))
    if not found:
        raise infeasible(request)
    near = sorted((each for each in found if each[0] <= within * best), key=lambda each: each[:2])
    return [(candidate, taken) for taken, _, candidate in near]


def choose_candidates(
    request: PlanningRequest, candidates: Iterable[Candidate], *, within: float = 1.0
) -> list[tuple[Candidate, float]]:
    """Return the candidates within a factor of the best by `estimate_seconds` that fit by the memory estimate (`choose_near`)."""
    return choose_near(request, candidates, seconds=estimate_seconds, least_seconds=lower_bound_seconds, within=within)


def choose_run(request: PlanningRequest, candidates: Iterable[Candidate]) -> PlannedRun:
    """Return the run of the best candidate (`choose_candidates`)."""
    chosen, seconds = choose_candidates(request, candidates)[0]
    return chosen.to_run(request, seconds=seconds)
