"""Entrain: GPUs by stable proportions of real work, then intra- and inter-module balancing (Entrain, Alg. 2 and 3)."""

import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from multimodal.balance import BALANCERS
from multimodal.cost.communication import message_cost
from multimodal.plan.planners.candidate import Candidate, fits, num_unit_microbatches, samples_in_flight
from multimodal.plan.planners.infeasible import infeasible
from multimodal.plan.planners.layer_times import PlanningTimes
from multimodal.plan.planners.memory_estimate import MemoryEstimate
from multimodal.plan.planners.partition_layers import partition_unit
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.plan.planners.profiling_batch import (
    gpu_block,
    num_trials,
    replica_allocation,
    sample_work,
    stable_batch_size,
)
from multimodal.plan.planners.shared_grid import shared_data_parallel_sizes
from multimodal.plan.planners.step_estimate import unit_stage_seconds
from multimodal.plan.planners.unit_layout import UnitLayout
from multimodal.values.model_graph import Role, Unit

BALANCE = "entrain" if "entrain" in BALANCERS else "orchmllm"
"""Entrain's hierarchical assignment; its plans count on it."""
EAGER_FACTOR = 2
"""Microbatches in flight under eager 1F1B over those of 1F1B, as `build_eager_1f1b` has them."""


def plan_entrain(request: PlanningRequest) -> PlannedRun:
    """Plan as Entrain does: one dp for all units, a replica's GPUs divided in proportion to the units' work.

    For each dp, b_min samples are drawn for the proportions (Alg. 2); every tp x cp x pp of each unit's GPUs is partitioned by
    dynamic programming and the combination with the least T = sum of tau + (K - 1) beta_max + resharding is taken (Alg. 3).
    Backwards are split, and forwards run ahead where memory allows it (4.5.3). Raises PlanError when nothing fits.
    """
    started = time.perf_counter()
    times, memory = PlanningTimes(request), MemoryEstimate(request)
    work, block = sample_work(request), gpu_block(request)
    best: tuple[float, int] | None = None
    chosen: Candidate | None = None
    batch_size = 0
    for data in shared_data_parallel_sizes(request, request.graph.unit_names, micro_batch_size=request.default_micro_batch_size):
        if request.num_gpus // data // block < len(request.graph.units):
            continue
        size = stable_batch_size(work, num_gpus=request.num_gpus, data_parallel_size=data, block=block)
        for candidate in _candidates(request, times, _proportions(work, size), data):
            rank = (iteration_seconds(request, times, candidate), candidate.num_gpus)
            if (best is None or rank < best) and fits(request, memory, candidate):
                best, chosen, batch_size = rank, candidate, size
    if best is None or chosen is None:
        raise infeasible(request, planner="entrain")
    is_pipeline = sum(layout.pipeline_parallel_size for layout in chosen.layouts.values()) > 1
    schedule = "eager-1f1b" if is_pipeline and runs_ahead(request, memory, chosen) else "1f1b"
    run = chosen.to_run(request, planner="entrain", seconds=best[0], started=started, balance=BALANCE, schedule=schedule)
    notes = (f"minimum stable profiling batch: {batch_size} samples ({num_trials()} trials)",)
    passes = (*run.passes, "split-backward") if request.graph.encoders else run.passes
    return replace(run, passes=passes, notes=notes)


def runs_ahead(request: PlanningRequest, memory: MemoryEstimate, candidate: Candidate) -> bool:
    """Whether stages can keep as many microbatches as eager 1F1B has in flight; every unit has ranks of its own."""
    return all(
        _eager_bytes(request, memory, candidate, unit, stage) <= request.planned_memory_bytes
        for unit, layout in candidate.layouts.items()
        for stage in range(layout.pipeline_parallel_size)
    )


def _eager_bytes(request: PlanningRequest, memory: MemoryEstimate, candidate: Candidate, unit: str, stage: int) -> float:
    layout = candidate.layouts[unit]
    most = candidate.micro_batch_size * num_unit_microbatches(request, candidate, unit)
    in_flight = min(most, EAGER_FACTOR * samples_in_flight(request, candidate, unit, stage))
    working = memory.working_bytes(
        unit, tensor_parallel_size=layout.tensor_parallel_size, context_parallel_size=layout.context_parallel_size
    )
    return memory.stage_bytes(unit, layout, stage, num_samples=in_flight) + working


def _proportions(work: Mapping[str, NDArray[np.float64]], size: int) -> dict[str, float]:
    random = np.random.default_rng(1)
    count = len(next(iter(work.values())))
    rows = random.integers(0, count, size)
    return {unit: float(seconds[rows].mean()) for unit, seconds in work.items()}


def _candidates(
    request: PlanningRequest, times: PlanningTimes, proportions: Mapping[str, float], data: int
) -> Iterator[Candidate]:
    graph = request.graph
    gpus = replica_allocation(proportions, num_gpus=request.num_gpus, data_parallel_size=data, block=gpu_block(request))
    layouts = [list(_factorisations(request, times, unit, gpus[unit.name], data)) for unit in graph.units]
    for choice in itertools.product(*layouts):
        yield Candidate(dict(zip(graph.unit_names, choice, strict=True)), request.default_micro_batch_size)


def _factorisations(request: PlanningRequest, times: PlanningTimes, unit: Unit, gpus: int, data: int) -> Iterator[UnitLayout]:
    """Every tp x cp x pp of a replica's GPUs; where a number has none (too few layers), of the next smaller one that has."""
    allowed, size = set(request.pipeline_parallel_sizes(unit.name)), request.default_micro_batch_size
    context_sizes = request.context_parallel_sizes(unit.name, micro_batch_size=size)
    for count in range(gpus, 0, -1):
        sizes = [
            (tensor, context, count // (tensor * context))
            for tensor, context in itertools.product(request.tensor_parallel_sizes(unit.name), context_sizes)
            if count % (tensor * context) == 0 and count // (tensor * context) in allowed
        ]
        if sizes:
            break
    for tensor, context, num_stages in sizes:
        total = times.of_unit(unit.name, tensor_parallel_size=tensor, num_samples=size, context_parallel_size=context).total
        ranges = partition_unit(unit, total, num_stages=num_stages)
        yield UnitLayout(tensor, data, tuple((each,) for each in ranges), context)


def iteration_seconds(request: PlanningRequest, times: PlanningTimes, candidate: Candidate) -> float:
    """T_iter of Alg. 3: Eq. 4.2 and the resharding cost."""
    stages = unit_stage_seconds(times, candidate)
    data = next(iter(candidate.layouts.values())).data_parallel_size
    count = -(-request.num_microbatches(candidate.micro_batch_size) // data)
    slowest = max(max(seconds) for seconds in stages.values())
    return sum(map(sum, stages.values())) + (count - 1) * slowest + count * reshard_seconds(request, candidate)


def reshard_seconds(request: PlanningRequest, candidate: Candidate) -> float:
    """Seconds per microbatch in which activations and their gradients change hands between units of different tp or cp."""
    graph, cluster = request.graph, request.cluster
    total = 0.0
    for source, target in graph.edges:
        layouts = [candidate.layouts[unit] for unit in (source, target)]
        if len({(layout.tensor_parallel_size, layout.context_parallel_size) for layout in layouts}) == 1:
            continue
        here, there = (layout.ranks_per_stage for layout in layouts)
        unit = graph.unit(source)
        load = request.load(source, candidate.micro_batch_size)
        is_encoder = unit.role is Role.ENCODER
        tokens = load.num_outputs if is_encoder else load.num_tokens
        hidden = graph.unit(target).transformer.hidden_size if is_encoder else unit.transformer.hidden_size
        first = max(here, there)
        cost = message_cost(
            2.0 * tokens * hidden, source_ranks=range(here), target_ranks=range(first, first + there), cluster=cluster
        )
        total += 2 * (cost.latency_seconds + cost.occupied_seconds)
    return total
