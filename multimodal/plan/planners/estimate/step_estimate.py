"""The time of a step in closed form (Entrain, Eq. 4.2), the effect of varying lengths, and the choice of the shortest."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from multimodal.cost.cluster import Cluster, collective_seconds
from multimodal.cost.memoize import memoized
from multimodal.cost.step_memory import GRADIENT_BYTES
from multimodal.cost.unit_load import UnitLoad
from multimodal.plan.planners.estimate.candidate import Candidate
from multimodal.plan.planners.estimate.memory_estimate import draw_microbatches
from multimodal.plan.planners.estimate.unit_layout import UnitLayout, stage_times, unit_seconds
from multimodal.plan.planners.estimate.unit_options import infeasible
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest, StageSize
from multimodal.schedule.simulate_events import NodeKind, run_without_messages
from multimodal.values.arrays.rows import Bytes, Integers, row_starts
from multimodal.values.deferred import Deferred
from multimodal.values.work.step_work import BACKWARD, FORWARD

interleaved_order = Deferred("multimodal.schedule.builders.interleaved_1f1b.interleaved_order")
SHORT, LONG = 2, 3
"""Microbatches of two short steps, divided by the number of lanes: after its warm-up a pipeline is periodic."""


class ChainRange(NamedTuple):
    """One layer range; seconds are of one microbatch."""

    forward_seconds: float
    backward_seconds: float
    gathering_seconds: float = 0.0
    """Seconds of gathering its updated weights before its first forward."""
    reducing_seconds: float = 0.0
    """Seconds of reducing its gradients, without the part that runs during its last backward."""


def chain_seconds(ranges: Sequence[ChainRange], *, num_lanes: int, num_microbatches: int) -> float:
    """Return the seconds of a step of interleaved 1F1B; range i is in lane i modulo `num_lanes`.

    All lanes pass their ranges in groups of `num_lanes` microbatches and wait for each other at every step, so unequal ranges
    cost more than the busiest lane's work: in its short ranges, a lane waits for its neighbours' long ones. Messages take no
    time. A step of many microbatches is extrapolated linearly from two short ones. O(ranges x lanes).
    """
    if num_microbatches <= LONG * num_lanes:
        return _run(ranges, num_lanes, num_microbatches)
    short, long = (_run(ranges, num_lanes, times * num_lanes) for times in (SHORT, LONG))
    return short + (long - short) * (num_microbatches - SHORT * num_lanes) / ((LONG - SHORT) * num_lanes)


def num_nodes(*, num_ranges: int, num_lanes: int, num_microbatches: int) -> int:
    """Return the approximate number of computations that `chain_seconds` runs."""
    short_steps = (SHORT + LONG) * num_lanes
    return 2 * num_ranges * (num_microbatches if num_microbatches <= LONG * num_lanes else short_steps)


@lru_cache(maxsize=256)
def chunks_in_flight(lane: int, *, num_lanes: int, chunks: int, num_microbatches: int) -> NDArray[np.int64]:
    """Return the microbatches of each of its chunks that a lane keeps after each of its steps, [num_steps, chunks]."""
    num_microbatches = min(num_microbatches, LONG * num_lanes)
    order = interleaved_order(lane, num_stages=num_lanes, chunks=chunks, num_microbatches=num_microbatches)
    changes = np.zeros((len(order.kinds), chunks), np.int64)
    changes[np.arange(len(changes)), order.chunks] = np.where(order.kinds == FORWARD, 1, -1)
    return changes.cumsum(axis=0)


def _run(ranges: Sequence[ChainRange], num_lanes: int, num_microbatches: int, works: NDArray[np.float64] | float = 1.0) -> float:
    """Return the seconds of the ranges in that order; works: of each microbatch, relative to an average one."""
    steps = _arrays(num_lanes, len(ranges) // num_lanes, num_microbatches)
    forward, backward, gathering, reducing = np.array(ranges).T
    of_each = np.broadcast_to(works, num_microbatches)
    computing = (np.outer(seconds, of_each).ravel() for seconds in (forward, backward))
    return float(run_without_messages(*steps, np.concatenate((*computing, gathering, reducing))).end_seconds.max())


@lru_cache(maxsize=64)
def _arrays(num_lanes: int, chunks: int, num_microbatches: int) -> tuple[Integers, Integers, Bytes, Integers, Integers]:
    """Number the forwards of all ranges, their backwards, then the gathers and the reductions, for `run_without_messages`."""
    num_ranges = num_lanes * chunks
    count = num_ranges * num_microbatches
    forwards, ranges = np.arange(count), np.arange(num_ranges)
    position, first = forwards // num_microbatches, ranges * num_microbatches
    needs = np.full((2 * (count + num_ranges), 2), -1)
    needs[:count, 0] = np.where(position > 0, forwards - num_microbatches, -1)
    needs[first, 1] = 2 * count + ranges
    needs[count : 2 * count, 0] = forwards
    needs[count : 2 * count, 1] = np.where(position < num_ranges - 1, count + forwards + num_microbatches, -1)
    needs[2 * count + num_ranges :, 0] = count + first + num_microbatches - 1
    lanes = []
    for lane in range(num_lanes):  # gathers, runs Megatron's order, and reduces each range after its last backward
        order = interleaved_order(lane, num_stages=num_lanes, chunks=chunks, num_microbatches=num_microbatches)
        is_backward, held = order.kinds == BACKWARD, order.chunks * num_lanes + lane
        nodes = is_backward * count + held * num_microbatches + order.microbatches
        last = np.flatnonzero(is_backward & (order.microbatches == num_microbatches - 1))
        gatherings = 2 * count + np.arange(chunks) * num_lanes + lane
        reductions = 2 * count + num_ranges + held[last]
        lanes.append(np.concatenate((gatherings, np.insert(nodes, last + 1, reductions))))
    is_needed, kinds = needs >= 0, np.full(len(needs), NodeKind.COMPUTE, np.uint8)
    kinds[2 * count :] = NodeKind.COLLECTIVE
    lane_starts, need_starts = row_starts(list(map(len, lanes))), row_starts(is_needed.sum(axis=1))
    return lane_starts, np.concatenate(lanes), kinds, need_starts, needs[is_needed]


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

    Runs interleaved 1F1B, as `chain_seconds`, over equal ranges on microbatches as a balancer leaves them, the heaviest first:
    next to each other, heavy ones cause one wait, while in random order each of them would cause one. Over several units, a
    microbatch weighs the work of all of its samples in them. num_microbatches: of a replica; if there are many, fewer are run.
    num_chunks: layer ranges of each stage.
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
    if not works.any():
        return 1.0
    even = [ChainRange(1.0, 2.0)] * (num_stages * num_chunks)
    return max(1.0, _run(even, num_stages, count, works / works.mean()) / _run(even, num_stages, count))


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
        computing, least = stage_times(request, unit, layout.size, layout.stages), 0.0
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
        heaviest = max(heaviest_seconds(request, unit, layout.size) for unit, layout in layouts.items())
        least = max(heaviest, sum(map(sum, (stages[unit] for unit in stages if unit not in encoders))))
    return max(chain + steady, least) + reducing


def reduction_seconds(request: PlanningRequest, unit: str, layout: UnitLayout, *, first_rank: int = 0) -> float:
    """Return the seconds of reducing the slowest stage's gradients over its holders; first_rank: of the unit."""
    if layout.weight_copies == 1:
        return 0.0
    weights = request.trained_weights[unit]
    of_stages = (sum(weights[end] - weights[first] for first, end in ranges) for ranges in layout.stages)
    ranks_per_position = layout.size.num_ranks * layout.data_parallel_size
    return max(
        replicas_seconds(request, GRADIENT_BYTES * each, layout, first_rank=first_rank + stage * ranks_per_position)
        for stage, each in enumerate(of_stages)
    )


def replicas_seconds(request: PlanningRequest, num_bytes: float, layout: UnitLayout, *, first_rank: int) -> float:
    """Return the seconds of reducing or gathering a stage's bytes over its replicas, the first of which has `first_rank`."""
    size, per_node = layout.size.tensor, request.cluster.gpus_per_node
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


def choose_candidates(
    request: PlanningRequest,
    candidates: Iterable[Choice],
    *,
    within: float = 1.0,
    seconds: Callable[[PlanningRequest, Choice], float] = estimate_seconds,
    least_seconds: Callable[[PlanningRequest, Choice], float] = lower_bound_seconds,
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


def choose_run(request: PlanningRequest, candidates: Iterable[Candidate]) -> PlannedRun:
    """Return the run of the best candidate (`choose_candidates`)."""
    chosen, seconds = choose_candidates(request, candidates)[0]
    return chosen.to_run(request, seconds=seconds)
