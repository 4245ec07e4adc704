"""Runs of one plan in which one unit has other parallel sizes: neighbours of a plan, wherever its units lie."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import permutations
from math import isqrt, lcm
from typing import NamedTuple

from multimodal.balance.encoder_pipelines import keep_beside_llm
from multimodal.plan.planners.allowed_sizes import pipeline_parallel_sizes, tensor_parallel_sizes
from multimodal.plan.planners.estimate.candidate import build_run
from multimodal.plan.planners.estimate.unit_layout import UnitLayout, balanced_layout, build_unit
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest, StageSize
from multimodal.plan.plans_of_sizes import split_units
from multimodal.schedule.passes import PASSES
from multimodal.values.errors import PlanError
from multimodal.values.plan import Plan, Replica, UnitPlan


class Sizes(NamedTuple):
    """The sizes of one unit that are varied."""

    tensor: int
    pipeline: int
    data: int


def other_unit_sizes(run: PlannedRun, request: PlanningRequest) -> Iterator[PlannedRun]:
    """Yield the run with one unit's sizes changed by one prime factor, which moves between tp, pp and dp, on the unit's ranks.

    So any unit can change: one on ranks of its own, one that shares ranks, and one of a chain. A unit on ranks of its own also
    gives ranks back, or takes some that the plan leaves. Its layers are cut anew by their times, into as many ranges as before
    where stages hold several.
    """
    options = {"micro_batch_size": run.micro_batch_size, "recompute": run.recompute}
    like_run = request.changed(**options, tp_comm_overlap=run.tp_comm_overlap, sharding=run.sharding)
    for name, unit in run.plan.units.items():
        if name in request.loads.idle_units or unit.is_unlike:
            continue
        for sizes in near_sizes(run.plan, name):
            layout = _layout(like_run, name, unit, sizes)
            plan = None if layout is None else _resized(run.plan, name, layout, like_run)
            if plan is not None:
                with suppress(PlanError):  # fixed sizes or shares of other units do not go with it
                    yield _with_plan(run, plan, like_run)


def near_sizes(plan: Plan, name: str) -> Iterator[Sizes]:
    """Yield the sizes of a unit that are one prime factor away."""
    unit = plan.units[name]
    own = Sizes(unit.tensor_parallel_size, len(unit.replicas[0].stages), unit.data_parallel_size)
    for giver, taker in permutations(own._fields, 2):
        sizes = own._asdict()
        for factor in _prime_factors(sizes[giver]):
            yield Sizes(**{**sizes, giver: sizes[giver] // factor, taker: sizes[taker] * factor})
    ranks = set(unit.ranks)
    is_apart = all(ranks.isdisjoint(other.ranks) for each, other in plan.units.items() if each != name)
    if is_apart and len(ranks) == max(ranks) - min(ranks) + 1:
        for axis, size in own._asdict().items():
            for other in (2 * size, *(size // factor for factor in _prime_factors(size))):
                yield own._replace(**{axis: other})


def _prime_factors(number: int) -> list[int]:
    divisors = (each for each in range(2, number + 1) if number % each == 0)
    return [each for each in divisors if all(each % smaller for smaller in range(2, isqrt(each) + 1))]


def _layout(request: PlanningRequest, name: str, unit: UnitPlan, sizes: Sizes) -> UnitLayout | None:
    """Return the unit's layout with these sizes; None if they are not allowed."""
    described, fixed = request.graph.unit(name), request.fixed(name)
    multiple_of = lcm(unit.expert_parallel_size, request.num_state_copies or 1)
    num_ranges, num_stages = unit.num_virtual_stages, len(unit.replicas[0].stages)
    virtual = max(1, num_ranges // sizes.pipeline) if num_ranges > num_stages and sizes.pipeline > 1 else 1
    is_allowed = (
        sizes.tensor in tensor_parallel_sizes(request, name)
        and sizes.pipeline in pipeline_parallel_sizes(request, name)
        and fixed.data_parallel_size in (None, sizes.data)
        and sizes.data <= request.num_microbatches
        and sizes.data % multiple_of == 0
        and fixed.virtual_pipeline_size in (None, virtual)
        and virtual * sizes.pipeline <= described.num_inner_layers
    )
    if not is_allowed:
        return None
    size = StageSize(sizes.tensor, unit.context_parallel_size)
    return balanced_layout(request, described, size, data=sizes.data, num_stages=sizes.pipeline, virtual_stages=virtual)


def _resized(plan: Plan, name: str, layout: UnitLayout, request: PlanningRequest) -> Plan | None:
    """Return the plan with another layout of a unit, others after it on later or earlier ranks if it takes more or fewer.

    None if that needs too many ranks, or splits tensor parallel groups over nodes.
    """
    ranks = sorted(plan.units[name].ranks)
    added = layout.num_ranks - len(ranks)
    own = [*ranks, *range(ranks[-1] + 1, ranks[-1] + 1 + added)]
    units = dict(plan.units)
    if added:
        units = {each: _on_ranks(unit, lambda rank: rank + added * (rank > ranks[-1])) for each, unit in units.items()}
    if name == request.graph.backbone.name:
        units = {each: replace(unit, microbatch_shares=()) for each, unit in units.items()}
    placed = _on_ranks(build_unit(layout, first_rank=0), own.__getitem__)
    units[name] = replace(placed, expert_parallel_size=plan.units[name].expert_parallel_size)
    resized = Plan(units)
    is_split = bool(split_units(resized, ranks_per_node=request.cluster.gpus_per_node))
    return None if is_split or plan.num_ranks + added > request.num_gpus else resized


def _on_ranks(unit: UnitPlan, rank_of: Callable[[int], int]) -> UnitPlan:
    def moved(replica: Replica) -> Replica:
        return Replica(tuple(replace(stage, ranks=tuple(map(rank_of, stage.ranks))) for stage in replica.stages))

    return replace(unit, replicas=tuple(map(moved, unit.replicas)))


def _with_plan(run: PlannedRun, plan: Plan, request: PlanningRequest) -> PlannedRun:
    """Return the run with another plan: passes of all planned runs go by the plan, others are kept; raises PlanError."""
    made = build_run(request, keep_beside_llm(plan, request.graph), schedule=run.schedule, seconds=0.0, balance=run.balance)
    own = [name for name in run.passes if not PASSES[name].is_planned]
    before, after = ([name for name in own if PASSES[name].splits_backwards == splits] for splits in (False, True))
    made = replace(made, encoder_micro_batch_sizes=run.encoder_micro_batch_sizes, predicted_as=run.predicted_as)
    return replace(made, passes=(*before, *made.passes, *after))
