"""Partitions of an LLM replica's microbatches over the encoder pipelines on its ranks (Optimus 4.1)."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import permutations
from typing import NamedTuple

import numpy as np

from multimodal.balance.placement import turns_of
from multimodal.plan.planners.estimate.layer_times import PlanningTimes, unit_plan_times
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.plan.planners.search.plan_to_fit import PredictedRun
from multimodal.values.plan import Plan

MOST_MOVES = 6
"""Moves that are tried before a partition counts as the best."""
MOST_TRIED = 24
"""Partitions of a plan that are simulated."""
LARGE_MOVE = 8
"""A move takes one microbatch of each pipeline; if they have many, one of this number of theirs."""


def best_partition(
    best: PredictedRun, request: PlanningRequest, *, predict: Callable[[PlannedRun], PredictedRun | None]
) -> PredictedRun:
    """Return a run with a partition that is improved move by move, while that shortens the step.

    predict: simulates a run; returns None if it is impossible or does not fit. Moves are those of `other_partitions`.
    """
    tried: set[str] = set()
    is_better = True
    while is_better:
        is_better = False
        for run in other_partitions(best.run, request):
            if run.key in tried or len(tried) == MOST_TRIED:
                continue
            tried.add(run.key)
            found = predict(run)
            if found is not None and found.key < best.key:
                best, is_better = found, True
                break
    return best


def other_partitions(run: PlannedRun, request: PlanningRequest) -> Iterator[PlannedRun]:
    """Yield the run with other partitions: one that evens out the lanes' work, and those one move away from the run's.

    Encoder pipelines over the same stages of the LLM form a group; a move takes equally many microbatches from each pipeline of
    one group and gives them to those of another, first from the busiest lanes to the idlest. Encoders whose pipelines do not all
    lie inside pipelines of the LLM, or all lie over the same stages, are left as they are.
    """
    for unit in request.graph.encoders:
        pipelines = None if unit.name in request.loads.idle_units else _pipelines(run, request, unit.name)
        if pipelines is None or len(set(pipelines.groups)) < 2:
            continue
        for shares in dict.fromkeys((pipelines.even_out(), *pipelines.moves())):
            if shares != pipelines.shares:
                unit_plan = replace(run.plan.units[unit.name], microbatch_shares=shares)
                yield replace(run, plan=Plan({**run.plan.units, unit.name: unit_plan}))


class _Pipelines(NamedTuple):
    """An encoder's pipelines over one replica of the LLM."""

    groups: tuple[tuple[int, ...], ...]
    """Groups of pipelines that lie over the same stages of the LLM."""
    llm_seconds: tuple[float, ...]
    """The LLM's work on the busiest ranks of each group."""
    microbatch_seconds: float
    shares: tuple[int, ...]
    """Number of microbatches of each pipeline."""

    def even_out(self) -> tuple[int, ...]:
        """Give every microbatch to the pipeline whose ranks have the least work."""
        loads, shares = list(self.llm_seconds), [0] * len(self.shares)
        for _ in range(sum(self.shares)):
            least = loads.index(min(loads))
            shares[least] += 1
            loads[least] += self.microbatch_seconds
        return tuple(shares)

    def moves(self) -> Iterator[tuple[int, ...]]:
        """Yield the partitions that are one move away."""
        loads = {
            group: max(alone + count * self.microbatch_seconds for _, alone, count in rows)
            for group in dict.fromkeys(self.groups)
            if (rows := [row for row in zip(self.groups, self.llm_seconds, self.shares, strict=True) if row[0] == group])
        }
        pairs = [pair for pair in permutations(loads, 2) if self.groups.count(pair[0]) == self.groups.count(pair[1])]
        pairs.sort(key=lambda pair: loads[pair[1]] - loads[pair[0]])
        for source, target in pairs[:MOST_MOVES]:
            most = min(count for group, count in zip(self.groups, self.shares, strict=True) if group == source)
            for size in sorted({1, max(1, most // LARGE_MOVE)}, reverse=True):
                if size <= most:
                    moved = {source: -size, target: size}
                    yield tuple(count + moved.get(group, 0) for group, count in zip(self.groups, self.shares, strict=True))


def _pipelines(run: PlannedRun, request: PlanningRequest, unit: str) -> _Pipelines | None:
    """Describe an encoder's pipelines over the LLM's first replica; None if any also lies elsewhere."""
    name = request.graph.backbone.name
    llm, own = run.plan.units[name], run.plan.units[unit]
    num_pipelines, remainder = divmod(own.data_parallel_size, llm.data_parallel_size)
    stage_of_rank = {rank: index for index, stage in enumerate(llm.replicas[0].stages) for rank in stage.ranks}
    ranks = [own.replicas[pipeline * llm.data_parallel_size].ranks for pipeline in range(num_pipelines)]
    if remainder or not set(stage_of_rank).issuperset(rank for each in ranks for rank in each):
        return None
    groups = tuple(tuple(sorted({stage_of_rank[rank] for rank in each})) for each in ranks)
    times = PlanningTimes(request.changed(micro_batch_size=run.micro_batch_size, recompute=run.recompute))
    count = -(-request.global_batch_size // run.micro_batch_size) // llm.data_parallel_size
    of_llm = unit_plan_times(times, name, llm)
    turns = turns_of(own.microbatch_shares or (1,) * num_pipelines)
    shares = np.bincount(turns[np.arange(count) % len(turns)], minlength=num_pipelines)
    return _Pipelines(
        groups=groups,
        llm_seconds=tuple(count * max(of_llm[stage] for stage in stages) for stages in groups),
        microbatch_seconds=max(unit_plan_times(times, unit, own)),
        shares=tuple(shares.tolist()),
    )
