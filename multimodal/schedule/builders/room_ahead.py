"""Finds the memory that is left for forwards beyond those that a schedule needs, and how much of it to use."""

from collections.abc import Callable, Iterator, Mapping
from math import floor, isinf

import numpy as np

from multimodal.cost.step_costs import StepCosts
from multimodal.schedule.execute_lanes import execute_lanes
from multimodal.values.action import ActionKind
from multimodal.values.arrays.rows import Integers, linked_groups
from multimodal.values.parts.cuts import StageKey
from multimodal.values.schedule import Schedule
from multimodal.values.shape import StepShape
from multimodal.values.work.step_work import KIND_NUMBERS, step_work

_FORWARD = KIND_NUMBERS[ActionKind.FORWARD]
MEMORY_SHARE = 0.9
"""Share of a rank's memory that may be used, which is also the planners' default."""
FACTORS = (1.0, 1.25, 1.5, 1.75, 2.0, 3.0, 4.0)
"""Candidates for the microbatches kept at most, over those that a schedule needs."""
_TRIED = (1.0, 2.0, 4.0)
"""Factors that are tried, since too many forwards ahead delay backwards."""


def build_within_memory(
    shape: StepShape,
    limits: Mapping[StageKey, int],
    *,
    costs: StepCosts,
    build: Callable[[Callable[[StageKey, int], int]], Schedule],
) -> Schedule:
    """Return the shortest of the schedules that keep up to 1, 2 and 4 times `limits` as far as memory has room for it.

    limits: the microbatches that each stage keeps at least; build: makes a schedule from a function that scales a stage's limit.
    """
    room = factors_within_memory(shape, limits, costs=costs)
    best, shortest = float("inf"), None
    for most in sorted({min(tried, max(room.values(), default=1.0)) for tried in _TRIED}):
        schedule = build(lambda stage, limit, most=most: floor(min(most, room[stage]) * limit))  # type: ignore[misc]
        seconds = costs.of_pieces(schedule.work, np.arange(schedule.work.num_computed)).seconds
        duration = execute_lanes(schedule, seconds=seconds).duration_seconds
        if shortest is None or duration < best:
            best, shortest = duration, schedule
    assert shortest is not None
    return shortest


def factors_within_memory(shape: StepShape, limits: Mapping[StageKey, int], *, costs: StepCosts) -> dict[StageKey, float]:
    """Return, for each stage, the largest of `FACTORS` that its lanes' memory allows for the limits of all of their stages.

    The largest microbatches are counted, so any microbatches fit. Replicas that exchange samples run only as far ahead as the
    fullest of their lanes allows, since others would only wait. 1 if even the limits do not fit; the largest factor if costs know
    no memory (`StepCosts.memory_bytes`). O(microbatches x stages log).
    """
    if isinf(costs.memory_bytes):
        return dict.fromkeys(shape.stages, FACTORS[-1])
    needed = np.zeros((len(shape.plan.lanes), len(FACTORS)))
    for stage, kept in kept_by_stage(shape, costs):
        sums = np.append(0, np.cumsum(np.sort(kept)[::-1]))
        counts = np.floor(np.array(FACTORS) * limits[stage]).astype(np.int64)
        needed[list(shape.lanes_of(*stage))] += sums[np.minimum(counts, len(kept))]
    room = MEMORY_SHARE * costs.memory_bytes - np.array([costs.static_bytes(lane) for lane in range(len(needed))])
    of_lane = np.maximum(np.count_nonzero(needed <= room[:, None], axis=1) - 1, 0)
    groups = _exchanging_replicas(shape)
    least: dict[int, int] = {}
    for stage in shape.stages:
        group = groups[stage[:2]]
        least[group] = min(least.get(group, len(FACTORS)), *of_lane[list(shape.lanes_of(*stage))].tolist())
    return {stage: FACTORS[least[groups[stage[:2]]]] for stage in shape.stages}


def kept_by_stage(shape: StepShape, costs: StepCosts) -> Iterator[tuple[StageKey, Integers]]:
    """Yield each stage that has microbatches, with the bytes per rank that each of them keeps there."""
    work = step_work(shape)
    forwards = np.flatnonzero(work.kinds == _FORWARD)
    kept, stages = costs.kept_bytes(work, forwards), work.computed_stages[forwards]
    order = np.argsort(stages, kind="stable")
    numbers, starts = np.unique(stages[order], return_index=True)
    yield from zip((work.stages[number] for number in numbers.tolist()), np.split(kept[order], starts[1:]), strict=True)


def _exchanging_replicas(shape: StepShape) -> dict[tuple[str, int], int]:
    """Return a group number for each (unit, replica): replicas between which samples travel, directly or not, share one."""
    numbers = {place: number for number, place in enumerate(dict.fromkeys(stage[:2] for stage in shape.stages))}
    pairs = [
        (numbers[source, given], numbers[target, taken])
        for source, target in shape.graph.edges
        for given, taken in shape.replica_routes(source, target)
    ]
    ends = np.array(pairs, np.int64).reshape(-1, 2)
    groups = linked_groups((ends[:, 0], ends[:, 1]), len(numbers))
    return {place: int(groups[number]) for place, number in numbers.items()}
