"""Entrain: GPUs by stable proportions of real work, then intra- and inter-module balancing (Entrain, Alg. 2 and 3)."""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from multimodal.cost.cluster import cost_between_nodes, cost_inside_node
from multimodal.cost.unit_load import UnitLoad
from multimodal.plan.planners.allowed_sizes import (
    context_parallel_sizes,
    pipeline_parallel_sizes,
    shared_data_parallel_sizes,
    stage_sizes,
    tensor_parallel_sizes,
)
from multimodal.plan.planners.estimate.candidate import Candidate
from multimodal.plan.planners.estimate.step_estimate import choose_candidates, unit_stage_seconds
from multimodal.plan.planners.estimate.unit_layout import UnitLayout, balanced_layout, unit_seconds
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest, StageSize
from multimodal.plan.stable_batch import NUM_TRIALS, POOL_SIZE, proportional_gpus, stable_batch_size
from multimodal.values.model_graph import Role, Unit

BALANCE = "entrain"
"""Entrain's hierarchical assignment, which its plans assume."""
AHEAD = "eager-1f1b"
"""Entrain's schedule if memory allows it."""


def plan_entrain(request: PlanningRequest) -> PlannedRun:
    """Plan as Entrain does: one dp for all units, a replica's GPUs divided in proportion to the units' work.

    For each dp, b_min samples are drawn for the proportions (Alg. 2); every tp x cp x pp of each unit's GPUs is partitioned by
    dynamic programming, and the combination with the least T = sum of tau + (K - 1) beta_max + resharding is taken (Alg. 3).
    Backwards are split, and forwards run ahead if memory allows it (4.5.3). Raises PlanError if nothing fits.
    """
    work, block = sample_work(request), gpu_block(request)
    batch_sizes = {
        data: stable_batch_size(work, num_gpus=num_blocks)
        for data in shared_data_parallel_sizes(request, request.graph.unit_names)
        if (num_blocks := request.num_gpus // data // block) >= len(request.graph.units)
    }
    candidates = (each for data, size in batch_sizes.items() for each in _candidates(request, work, size, data))
    chosen, seconds = choose_candidates(request, candidates, seconds=iteration_seconds, least_seconds=lambda *_: 0.0)[0]
    is_pipeline = sum(layout.pipeline_parallel_size for layout in chosen.layouts.values()) > 1
    schedule = AHEAD if is_pipeline and chosen.fits(request, schedule=AHEAD) else None
    run = chosen.to_run(request, seconds=seconds, balance=BALANCE, schedule=schedule)
    batch_size = batch_sizes[chosen.layouts[request.graph.backbone.name].data_parallel_size]
    notes = (f"minimum stable profiling batch: {batch_size} samples ({NUM_TRIALS} trials)",)
    passes = (*run.passes, "split-backward") if request.graph.encoders else run.passes
    return replace(run, passes=passes, notes=notes)


def _candidates(
    request: PlanningRequest, work: Mapping[str, NDArray[np.float64]], batch_size: int, data: int
) -> Iterator[Candidate]:
    """Yield every parallelism of the GPUs that the work of one batch of this size gives to each unit of a replica."""
    graph, block = request.graph, gpu_block(request)
    rows = np.random.default_rng(1).integers(0, len(next(iter(work.values()))), batch_size)
    proportions = {unit: float(seconds[rows].mean()) for unit, seconds in work.items()}
    blocks = proportional_gpus(proportions, fewest=dict.fromkeys(work, 1), num_gpus=request.num_gpus // data // block)
    layouts = [list(_factorisations(request, unit, block * blocks[unit.name], data)) for unit in graph.units]
    for choice in itertools.product(*layouts):
        yield Candidate(dict(zip(graph.unit_names, choice, strict=True)))


def _factorisations(request: PlanningRequest, unit: Unit, gpus: int, data: int) -> Iterator[UnitLayout]:
    """Yield every tp x cp x pp of a replica's GPUs, or of the largest smaller number that has any (for units with few layers)."""
    allowed = set(pipeline_parallel_sizes(request, unit.name))
    for count in range(gpus, 0, -1):
        sizes = [(size, *divmod(count, size.num_ranks)) for size in stage_sizes(request, unit.name)]
        whole = [(size, num_stages) for size, num_stages, rest in sizes if not rest and num_stages in allowed]
        if whole:
            break
    for size, num_stages in whole:
        yield balanced_layout(request, unit, size, data=data, num_stages=num_stages)


def iteration_seconds(request: PlanningRequest, candidate: Candidate) -> float:
    """Return T_iter of Alg. 3: Eq. 4.2 and the resharding cost."""
    stages = unit_stage_seconds(request, candidate)
    count = candidate.unit_microbatches(request, request.graph.backbone.name)
    slowest = max(max(seconds) for seconds in stages.values())
    return sum(map(sum, stages.values())) + (count - 1) * slowest + count * reshard_seconds(request, candidate)


def reshard_seconds(request: PlanningRequest, candidate: Candidate) -> float:
    """Return the seconds per microbatch of moving activations and gradients between units of different tp or cp."""
    graph, cluster = request.graph, request.cluster
    total = 0.0
    for source, target in graph.edges:
        layouts = [candidate.layouts[unit] for unit in (source, target)]
        if len({layout.size for layout in layouts}) == 1:
            continue
        here, there = (layout.size.num_ranks for layout in layouts)
        unit = graph.unit(source)
        load = request.loads.of_average(source, request.default_micro_batch_size)
        tokens = load.num_outputs if unit.role is Role.ENCODER else load.num_tokens
        num_bytes = 2.0 * tokens * graph.width_behind(source, len(unit.layers) - 1)
        first = max(here, there)
        is_inside = cluster.is_one_node((*range(here), *range(first, first + there)))
        cost = (cost_inside_node if is_inside else cost_between_nodes)(num_bytes, source_ranks=range(here), cluster=cluster)
        total += 2 * (cost.latency_seconds + cost.occupied_seconds)
    return total


def sample_work(request: PlanningRequest) -> Mapping[str, NDArray[np.float64]]:
    """Return unit -> seconds of single samples, forward and backward on one GPU, for at most `POOL_SIZE` samples of the data."""
    random = np.random.default_rng(0)
    count = len(request.lengths)
    rows = np.arange(count) if count <= POOL_SIZE else np.sort(random.choice(count, POOL_SIZE, replace=False))
    work = {}
    for unit in request.graph.units:
        loads = request.loads.of_samples[unit.name][rows]
        distinct, position = np.unique(loads, axis=0, return_inverse=True)
        seconds = [unit_seconds(request, unit.name, UnitLoad(*map(int, row)), StageSize(1)) for row in distinct.tolist()]
        work[unit.name] = np.array(seconds)[position.ravel()]
    return work


def gpu_block(request: PlanningRequest) -> int:
    """Return the divisor of every unit's number of GPUs: 1, or the one that fixed tp and cp require."""
    sizes = ((tensor_parallel_sizes(request, unit), context_parallel_sizes(request, unit)) for unit in request.graph.unit_names)
    return math.lcm(*(math.gcd(*tensor) * math.gcd(*context) for tensor, context in sizes))
