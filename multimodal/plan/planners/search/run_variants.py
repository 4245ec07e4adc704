"""Runs of one plan with other schedules, balancers, microbatch sizes or passes that suit it, by the facts in their rows."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import pairwise, permutations
from typing import NamedTuple

import numpy as np

from multimodal.balance import BALANCERS, UNBALANCED, Placement, placements_of
from multimodal.balance.placement import turns_of
from multimodal.cost.unit_load import UnitLoad
from multimodal.plan.planners.allowed_sizes import micro_batch_sizes
from multimodal.plan.planners.estimate.unit_layout import unit_plan_times
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.plan.planners.search.plan_to_fit import PredictedRun
from multimodal.plan.planners.search.unit_sizes import other_unit_sizes
from multimodal.plan.plans_of_sizes import fold_stages
from multimodal.schedule.builders import BUILDERS, ScheduleRow
from multimodal.schedule.passes import PASSES, Need
from multimodal.values.plan import Plan, Replica

Form = tuple[str, str]
Placed = tuple[tuple[Placement, ...], bool]
"""The placements of a plan's units, and True if some stage holds several layer ranges."""


def placements(run: PlannedRun, request: PlanningRequest) -> tuple[Placement, ...]:
    """Return the placements of the units that have work."""
    return placements_of([unit for name, unit in run.plan.units.items() if name not in request.loads.idle_units])


def first_balances(placement: Placement, request: PlanningRequest) -> tuple[str, ...]:
    """List the balancers that are tried first on such plans; none if samples are alike."""
    if not request.loads.vary:
        return (UNBALANCED,)
    return tuple(name for name, row in BALANCERS.items() if placement in row.tried_first_on)


def with_first_balance(run: PlannedRun, request: PlanningRequest) -> PlannedRun:
    """Return the run with the balancer that is tried first on plans of its placement."""
    return replace(run, balance=next(iter(first_balances(placements(run, request)[0], request)), run.balance))


def other_balances(run: PlannedRun, request: PlanningRequest) -> Iterator[PlannedRun]:
    """Yield the run with every other balancer that suits its plan; those that are tried first on some plan come first."""
    if not request.loads.vary:
        return
    for name, row in sorted(BALANCERS.items(), key=lambda entry: not entry[1].tried_first_on):
        is_whole = row.keeps_samples_whole or not run.has_virtual_stages
        if name != run.balance and is_whole and row.suits(placements(run, request)):
            yield replace(run, balance=name)


def other_schedules(run: PlannedRun, request: PlanningRequest) -> Iterator[PlannedRun]:
    """Yield the run with every other schedule that suits its plan."""
    others = (formed(run, (name, run.balance), request) for name, _ in fitting_schedules(run, request) if name != run.schedule)
    yield from filter(None, others)


def fitting_schedules(run: PlannedRun, request: PlanningRequest) -> list[tuple[str, ScheduleRow]]:
    """List the schedules that are meant for a run's plan, those that keep least first."""
    has_several = run.has_virtual_stages
    rows = [entry for entry in BUILDERS.items() if entry[1].is_for(request.graph, has_virtual_stages=has_several)]
    return sorted(rows, key=lambda entry: (not entry[1].is_tried_first, entry[1].in_flight))


def formed(run: PlannedRun, form: Form, request: PlanningRequest) -> PlannedRun | None:
    """Return a run with a schedule, layers that run it, and a balancer; None if these do not suit the plan."""
    schedule, balance = form
    row, plan = BUILDERS[schedule], run.plan
    of_run = request.changed(sharding=run.sharding, tp_comm_overlap=run.tp_comm_overlap)
    if row.is_folded:
        plan = fold_stages(plan)
    has_shape = row.layout is None or row.layout.is_met(request.graph, plan)
    has_use = not (row.needs_messages or row.splits_backwards) or not plan.is_whole_on_every_rank  # else no lane waits
    if not of_run.allows(schedule) or not has_shape or not has_use:
        return None
    return replace(run, plan=plan, schedule=schedule, balance=balance, transformer_impl=of_run.implementation(schedule))


def overlapped(run: PlannedRun, request: PlanningRequest) -> Iterator[PlannedRun]:
    """Yield the run with overlapped tensor parallel collectives, which need local layers, help large products and keep more."""
    if run.has_tensor_parallelism and request.transformer_impl != "transformer_engine" and not run.tp_comm_overlap:
        yield replace(run, transformer_impl="local", tp_comm_overlap=True)


def other_sizes(run: PlannedRun, request: PlanningRequest) -> Iterator[PlannedRun]:
    """Yield the run with the next smaller and the next larger microbatch size."""
    sizes = micro_batch_sizes(request)
    for size in (run.micro_batch_size // 2, 2 * run.micro_batch_size):
        if size in sizes:
            yield replace(run, micro_batch_size=size)


def other_passes(run: PlannedRun, request: PlanningRequest) -> Iterator[PlannedRun]:
    """Yield the run with one more pass, for each pass that its model and its plan's schedule need."""
    has_encoders = bool(request.graph.encoders)
    for name, row in PASSES.items():
        is_useful = has_encoders or row.need is not Need.ENCODERS
        is_open = not row.is_planned and not row.splits_backwards and name not in run.passes
        if is_open and is_useful and (row.works_with_sharded_weights or run.sharding == "optim"):
            yield replace(run, passes=(name, *run.passes))


def other_encoder_sizes(run: PlannedRun, request: PlanningRequest) -> Iterator[PlannedRun]:
    """Yield the run with other numbers of items in the microbatches of one encoder, which at first follow the LLM's."""
    for unit in (unit.name for unit in request.graph.encoders if unit.name not in request.loads.idle_units):
        given = dict(run.encoder_micro_batch_sizes)
        size, items = given.pop(unit, None), request.loads.mean[unit][UnitLoad._fields.index("num_sequences")]
        following = round(run.micro_batch_size * items)
        near = {following // 2, following, 2 * following} if size is None else {size // 2, size - 1, size + 1, 2 * size}
        choices = [{**given, unit: each} for each in sorted(near) if 1 <= each <= request.global_batch_size * items]
        for each in choices if size is None else [given, *choices]:
            yield replace(run, encoder_micro_batch_sizes=tuple(sorted(each.items())))


def neighbours(run: PlannedRun, request: PlanningRequest) -> Iterator[PlannedRun]:
    """Yield the runs that differ in one thing.

    It is the overlap, a microbatch size, the balancer, the schedule, one pass, one unit's sizes, a cut, or a partition.
    """
    yield from overlapped(run, request)
    if run.tp_comm_overlap:
        yield replace(run, tp_comm_overlap=False)
    if request.micro_batch_size is None:
        size, most = run.micro_batch_size, max(micro_batch_sizes(request))
        near = sorted({size // 2, size - 2, size - 1, size + 1, size + 2, size * 3 // 2, 2 * size} - {size})
        yield from (replace(run, micro_batch_size=each) for each in near if 1 <= each <= most)
    yield from other_balances(run, request)
    yield from other_schedules(run, request)
    yield from other_passes(run, request)
    open_passes = [name for name in run.passes if not (PASSES[name].is_planned or PASSES[name].splits_backwards)]
    yield from (replace(run, passes=tuple(other for other in run.passes if other != name)) for name in open_passes)
    yield from other_encoder_sizes(run, request)
    yield from filter(None, (formed(each, (each.schedule, each.balance), request) for each in other_unit_sizes(run, request)))
    yield from other_cuts(run, request)
    yield from other_partitions(run, request)


MOST_CUTS = 8
"""Cuts of a unit's layers that are tried: those that take a layer from a busy stage and give it to an idle one."""


def other_cuts(run: PlannedRun, request: PlanningRequest) -> Iterator[PlannedRun]:
    """Yield the run with a layer of a unit moved to the range before or behind its own, in all replicas alike."""
    like_run = request.changed(micro_batch_size=run.micro_batch_size, recompute=run.recompute)
    for name, unit in run.plan.units.items():
        if name in request.loads.idle_units or unit.is_unlike:
            continue
        seconds = unit_plan_times(like_run, name, unit)
        stages = unit.replicas[0].stages
        ranges = sorted((pair, stage, index) for stage, held in enumerate(stages) for index, pair in enumerate(held.layer_ranges))
        moves = []
        for left, right in pairwise(ranges):
            for giver, taker, bound in ((left, right, left[0][1] - 1), (right, left, right[0][0] + 1)):
                # The first and the last range of a unit hold its ends beside layers.
                least = 2 if giver in (ranges[0], ranges[-1]) else 1
                if giver[1] != taker[1] and giver[0][1] - giver[0][0] > least:
                    moves.append((seconds[taker[1]] - seconds[giver[1]], bound, left, right))
        for _, bound, left, right in sorted(moves)[:MOST_CUTS]:
            cut = {left[1:]: (left[0][0], bound), right[1:]: (bound, right[0][1])}
            held = [
                tuple(cut.get((stage, at), pair) for at, pair in enumerate(each.layer_ranges))
                for stage, each in enumerate(stages)
            ]
            replicas = tuple(
                Replica(tuple(replace(stage, layer_ranges=own) for stage, own in zip(replica.stages, held, strict=True)))
                for replica in unit.replicas
            )
            yield replace(run, plan=Plan({**run.plan.units, name: replace(unit, replicas=replicas)}))


def climb(
    best: PredictedRun,
    *,
    near: Callable[[PlannedRun], Iterable[PlannedRun]],
    judge: Callable[[PlannedRun, PredictedRun], PredictedRun | None],
    most: float = math.inf,
) -> tuple[PredictedRun, int]:
    """Go on to the first better run near the best one until there is none; return it, and the number of runs that were judged.

    judge: of a run and the best one; None if it cannot be better. most: runs that are judged at most; each is judged once.
    """
    tried = set[str]()

    def better() -> PredictedRun | None:
        for run in near(best.run):
            if run.key not in tried and len(tried) < most:
                tried.add(run.key)
                judged = judge(run, best)
                if judged is not None and judged.key < best.key:
                    return judged
        return None

    while (found := better()) is not None:
        best = found
    return best, len(tried)


MOST_MOVES = 6
"""Moves that are tried before a partition counts as the best."""
LARGE_MOVE = 8
"""A move takes one microbatch of each pipeline; if they have many, one of this number of theirs."""


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
    like_run = request.changed(micro_batch_size=run.micro_batch_size, recompute=run.recompute)
    count = -(-request.global_batch_size // run.micro_batch_size) // llm.data_parallel_size
    of_llm = unit_plan_times(like_run, name, llm)
    turns = turns_of(own.microbatch_shares or (1,) * num_pipelines)
    shares = np.bincount(turns[np.arange(count) % len(turns)], minlength=num_pipelines)
    llm_seconds = tuple(count * max(of_llm[stage] for stage in stages) for stages in groups)
    return _Pipelines(groups, llm_seconds, max(unit_plan_times(like_run, unit, own)), tuple(shares.tolist()))
