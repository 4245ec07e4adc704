"""1F1B over the unit graph, and ZB-H1 (Qi et al., Zero Bubble Pipeline Parallelism); forwards may run ahead in free memory."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from multimodal.cost.step_costs import StepCosts
from multimodal.schedule.execute_lanes import execute_lanes
from multimodal.schedule.list_schedule import Policy, list_schedule, split_units
from multimodal.values.arrays.rows import Integers, linked_groups
from multimodal.values.parts.cuts import StageKey
from multimodal.values.plan import Plan
from multimodal.values.schedule import Schedule
from multimodal.values.shape import StepShape
from multimodal.values.work.step_work import FORWARD, step_work


def build_one_f_one_b(shape: StepShape, *, memory_factor: float = 1.0) -> Schedule:
    """Build the 1F1B schedule over the unit graph, in the compute dialect.

    Encoder and LLM stages form one pipeline. For a single unit this is textbook 1F1B (PipeDream-flush): stage s of P runs P - s -
    1 forwards, then forwards and backwards in turn, then the remaining backwards, whatever their durations: frozen or slow stages
    keep the same order. `StepShape.forward_only` leaves backwards and reductions out (evaluation).

    memory_factor: microbatches that a stage may have in flight over those of 1F1B, rounded down (eager 1F1B, Entrain 4.5.3).
    With more, it runs a forward whenever no backward is ready; before a backward it has as many in flight as 1F1B. If deferred
    samples make backwards late, the forwards of the steady phase are already done. With uniform work it is as long as 1F1B.
    """
    return _build(shape, forward_limits(shape), {}, lambda _, limit: math.floor(memory_factor * limit))


def build_zb_h1(shape: StepShape) -> Schedule:
    """Build the ZB-H1 schedule over the unit graph, in the compute dialect.

    Forwards and input gradients run in the order of forwards and backwards in 1F1B. A weight gradient runs when its lane would
    otherwise be idle, or when the stage stores as many microbatches as it may. One unit of P stages is idle for (P - 1)(F + I -
    W) per lane.
    """
    limits = forward_limits(shape)
    return _build(shape, limits, storage_limits(shape, limits), lambda _, limit: limit)


def build_in_memory(shape: StepShape, *, costs: StepCosts, splits_backwards: bool = False) -> Schedule:
    """Build eager 1F1B or ZB-H1 with as many microbatches in flight as memory has room for, in the compute dialect.

    `costs` gives the bytes that microbatches keep and the memory of a rank. Of the schedules that keep up to 1, 2 and 4 times as
    many as they need, as far as memory has room for it, the one with the shortest step is taken. This serves assignments that
    make some gradients late (Entrain 4.5.3); with enough memory it removes a part of ZB-H1's bubble (ZB-H2 of the same paper).
    """
    limits = forward_limits(shape)
    stored = storage_limits(shape, limits) if splits_backwards else {}
    room = factors_within_memory(shape, stored or limits, costs=costs)

    def build(most: float) -> Schedule:
        return _build(shape, limits, stored, lambda stage, limit: math.floor(min(most, room[stage]) * limit))

    def duration(schedule: Schedule) -> float:
        seconds = costs.of_pieces(schedule.work, np.arange(schedule.work.num_computed)).seconds
        return execute_lanes(schedule, seconds=seconds).duration_seconds

    factors = sorted({min(tried, max(room.values(), default=1.0)) for tried in _TRIED})
    return min(map(build, factors), key=duration)


def _build(
    shape: StepShape, limits: Mapping[StageKey, int], stored: Mapping[StageKey, int], scaled: Callable[[StageKey, int], int]
) -> Schedule:
    """Build 1F1B, or ZB-H1 if stages have limits of what they store; scaled: the limit of a stage for a limit of 1F1B."""
    in_flight = {stage: scaled(stage, limit) for stage, limit in limits.items()}
    storage = {stage: scaled(stage, limit) for stage, limit in stored.items()}
    goes_first = bool(stored) and in_flight == limits
    policy = Policy(in_flight, forward_floors(shape.plan, limits), storage, forwards_go_first=goes_first)
    return list_schedule(split_units(shape, shape.graph.unit_names) if stored else shape, policy)


def forward_limits(shape: StepShape) -> dict[StageKey, int]:
    """Return the number of microbatches that each stage may have in flight.

    Stage s of the P stages of the LLM: P - s. Stage s of the S stages of an encoder: S - s, plus the most microbatches of this
    replica that the LLM's first stages span at any moment if each is as full as allowed. With one encoder microbatch per LLM
    microbatch that is the limit of one pipeline of S + P stages. A stage without a backward only needs to be ahead of its
    consumer; its limit matters in a lane that it shares with other stages (alone in a lane, there is nothing to order).
    """
    depths = stage_counts(shape.plan)
    return stage_limits(depths, spans=microbatch_spans(shape, depths=depths))


Depths = Mapping[str, Sequence[int]]
"""unit -> per replica, the microbatches that its first stage has in flight if the unit is alone."""


def stage_counts(plan: Plan) -> Depths:
    """Return the depths of 1F1B: as many microbatches as a replica has layer ranges."""
    return {name: [len(replica.virtual_stages) for replica in unit.replicas] for name, unit in plan.units.items()}


def stage_limits(depths: Depths, *, spans: Mapping[StageKey, int]) -> dict[StageKey, int]:
    """Return the limit in flight of each stage, from the depth of its replica's first stage and the spans downstream."""
    return {(unit, replica, stage): depths[unit][replica] - stage + span for (unit, replica, stage), span in spans.items()}


def storage_limits(shape: StepShape, limits: Mapping[StageKey, int]) -> dict[StageKey, int]:
    """Return the number of microbatches that each stage may store, given the number that 1F1B lets it have in flight.

    It is that of the fullest stage with a backward in its unit or an upstream one: the memory of 1F1B's fullest lane.
    """
    fullest: dict[str, int] = {}
    for unit in shape.graph.unit_names:
        own = [limit for stage, limit in limits.items() if stage[0] == unit and shape.backward_need(*stage).has_backward]
        fullest[unit] = max([1, *own, *(fullest[source] for source in shape.graph.upstream(unit))])
    return {stage: fullest[stage[0]] for stage in limits}


def forward_floors(plan: Plan, limits: Mapping[StageKey, int]) -> Mapping[StageKey, int]:
    """Return the number of microbatches in flight below which a stage runs no backward while it has forwards left.

    It equals the limit: then the order does not depend on the effect of frozen, slow or starved stages on the builder's clock. If
    every rank holds the whole model, there is no pipeline to fill, and the floor is 0.
    """
    return {} if plan.is_whole_on_every_rank else limits


def microbatch_spans(shape: StepShape, *, depths: Depths) -> dict[StageKey, int]:
    """Return, for each stage, the microbatches that the units downstream of it keep in flight there.

    The microbatches that units keep for those downstream of them add to their own depths; of a unit, the deepest replica counts.
    A stage without a backward only needs to be ahead of its consumers' next microbatch.
    """
    spans: dict[StageKey, int] = {}
    for unit in reversed(shape.graph.unit_names):
        targets = shape.graph.downstream(unit)
        target_depth = max((max(depths[target]) + spans[target, 0, 0] for target in targets), default=0)
        wanted = {1, target_depth} if targets else set()
        of_depths = {depth: _spans(shape, unit, depth) for depth in wanted}
        none = [0] * shape.plan.units[unit].data_parallel_size
        for replica in range(len(none)):
            for stage in range(shape.plan.units[unit].num_stages_of(replica)):
                keeps = shape.backward_need(unit, replica, stage).has_backward
                spans[unit, replica, stage] = of_depths.get(target_depth if keeps else 1, none)[replica]
    return spans


def _spans(shape: StepShape, unit: str, depth: int) -> list[int]:
    """Return the most microbatches of each encoder replica that any `depth` consecutive microbatches of the LLM span.

    While the LLM's replicas work on microbatches k .. k + depth - 1, a replica must have run (in order) every microbatch up to
    the last one that these need, and can have released those whose last consumer comes before k.
    """
    counted = shape.counts[unit]
    firsts, lasts = np.full(counted.num_microbatches, np.iinfo(np.int64).max), np.full(counted.num_microbatches, -1)
    for target in shape.graph.downstream(unit):
        given, taken = shape.routes.of_edge(unit, target)
        steps = shape.counts[target].index_in_replica[taken]
        np.minimum.at(firsts, given, steps)
        np.maximum.at(lasts, given, steps)
    is_needed = lasts >= 0
    replicas, num_steps = counted.replica_of_microbatch[is_needed], int(lasts.max(initial=-1)) + 1
    last_needed_at, num_done_at = np.zeros((2, counted.num_replicas, num_steps + 1), np.int64)
    np.maximum.at(last_needed_at, (replicas, firsts[is_needed]), counted.index_in_replica[is_needed] + 1)
    np.add.at(num_done_at, (replicas, lasts[is_needed]), 1)
    ahead = np.minimum(np.arange(num_steps) + depth - 1, num_steps)
    num_started = np.maximum.accumulate(last_needed_at, axis=1)[:, ahead]
    num_done = np.cumsum(num_done_at, axis=1)[:, :num_steps] - num_done_at[:, :num_steps]
    return (num_started - num_done).max(axis=1, initial=0).tolist()


MEMORY_SHARE = 0.9
"""Share of a rank's memory that may be used, which is also the planners' default."""
FACTORS = (1.0, 1.25, 1.5, 1.75, 2.0, 3.0, 4.0)
"""Candidates for the microbatches kept at most, over those that a schedule needs."""
_TRIED = (1.0, 2.0, 4.0)
"""Factors that are tried, since too many forwards ahead delay backwards."""


def factors_within_memory(shape: StepShape, limits: Mapping[StageKey, int], *, costs: StepCosts) -> dict[StageKey, float]:
    """Return, for each stage, the largest of `FACTORS` that its lanes' memory allows for the limits of all of their stages.

    The largest microbatches are counted, so any microbatches fit. Replicas that exchange samples run only as far ahead as the
    fullest of their lanes allows, since others would only wait. 1 if even the limits do not fit; the largest factor if costs know
    no memory (`StepCosts.memory_bytes`). O(microbatches x stages log).
    """
    if math.isinf(costs.memory_bytes):
        return dict.fromkeys(shape.stages, FACTORS[-1])
    needed = np.zeros((len(shape.plan.lanes), len(FACTORS)))
    for stage, kept in kept_by_stage(shape, costs):
        sums = np.append(0, np.cumsum(np.sort(kept)[::-1]))
        counts = np.floor(np.array(FACTORS) * limits[stage]).astype(np.int64)
        needed[list(shape.plan.lanes_of_stage(*stage))] += sums[np.minimum(counts, len(kept))]
    room = MEMORY_SHARE * costs.memory_bytes - np.array([costs.static_bytes(lane) for lane in range(len(needed))])
    of_lane = np.maximum(np.count_nonzero(needed <= room[:, None], axis=1) - 1, 0)
    # Replicas between which samples travel, directly or not, share a group.
    numbers = {replica: number for number, replica in enumerate(dict.fromkeys(stage[:2] for stage in shape.stages))}
    ends = np.array([[numbers[end] for end in pair] for pair in shape.linked_replicas], np.int64).reshape(-1, 2)
    of_replicas = linked_groups((ends[:, 0], ends[:, 1]), len(numbers)).tolist()
    groups = {replica: of_replicas[number] for replica, number in numbers.items()}
    least: dict[int, int] = {}
    for stage in shape.stages:
        group = groups[stage[:2]]
        least[group] = min(least.get(group, len(FACTORS)), *of_lane[list(shape.plan.lanes_of_stage(*stage))].tolist())
    return {stage: FACTORS[least[groups[stage[:2]]]] for stage in shape.stages}


def kept_by_stage(shape: StepShape, costs: StepCosts) -> Iterator[tuple[StageKey, Integers]]:
    """Yield each stage that has microbatches, with the bytes per rank that each of them keeps there."""
    work = step_work(shape)
    forwards = np.flatnonzero(work.kinds == FORWARD)
    kept, stages = costs.kept_bytes(work, forwards), work.computed_stages[forwards]
    order = np.argsort(stages, kind="stable")
    numbers, starts = np.unique(stages[order], return_index=True)
    yield from zip((work.stages[number] for number in numbers.tolist()), np.split(kept[order], starts[1:]), strict=True)
