"""Split-backward (Entrain 4.5.3): an encoder does not wait for the gradients of samples that the LLM runs later."""

import math
from collections import defaultdict
from dataclasses import replace

import numpy as np

from multimodal.schedule.execute_lanes import unit_cost, unit_costs
from multimodal.schedule.passes.move_actions import action_times, duration_of, keeps_earlier_passes, sort_lanes
from multimodal.values.action import BACKWARDS, Action, ActionKind, SampleSubset
from multimodal.values.arrays.microbatches import MicrobatchPlace
from multimodal.values.arrays.rows import Floats
from multimodal.values.schedule import Lane, Schedule, Slot
from multimodal.values.work.step_work import step_work

_ROUNDING = 1e-6
"""Seconds: thirds do not add up exactly."""


@keeps_earlier_passes()
def split_backward(schedule: Schedule) -> Schedule:
    """Cut the backward of every encoder microbatch with several consumers into one per consumer, each as early as possible.

    Entrain defers samples of a microbatch to a later LLM microbatch, so their gradients come back later. The backward of the
    other samples runs as soon as their gradients are there; only the last subset keeps the backward's old place. If a backward is
    split into input and weight gradients, this applies to the input gradient; the weight gradients of all subsets take the place
    of the old one. If the step would take longer under unit costs, with equal subsets, the schedule stays as it was. Raises
    ScheduleError if the schedule cannot finish. O((actions + dependencies) log).
    """
    shape = schedule.shape
    encoders = {unit.name for unit in shape.graph.encoders if shape.graph.gives_items_once(unit.name)}
    consumers = {each: len(shape.consumers(each)) for each in shape.microbatches if each.unit in encoders}
    rewritten = _cut(schedule, {each: count for each, count in consumers.items() if count > 1})
    if rewritten == schedule:
        return schedule
    after, before = (duration_of(each, seconds=_seconds(each)) for each in (rewritten, schedule))
    return rewritten if after <= before + _ROUNDING < math.inf else schedule


def _seconds(schedule: Schedule) -> Floats:
    """Return unit costs, [num_computed]; every sample subset of a backward has the same share of the backward's."""
    seconds = unit_costs(schedule.shape).astype(np.float64)
    for number, action in enumerate(schedule.work.computed):
        if action.subset >= 0:
            seconds[number] /= schedule.shape.cuts.num_subsets[action.microbatch_place]
    return seconds


def _cut(schedule: Schedule, num_subsets: dict[MicrobatchPlace, int]) -> Schedule:
    """Cut these microbatches' backwards, the last stage's first: a subset in one stage needs that of the next stage."""
    shape = schedule.shape
    cut_work = step_work(shape.with_cuts(replace(shape.cuts, num_subsets={**shape.cuts.num_subsets, **num_subsets})))
    times = action_times(schedule)
    replaced: dict[Action, list[Action]] = {}
    added: dict[int, list[Action]] = defaultdict(list)
    whole = (action for action in times if action.kind in BACKWARDS and action.covers is None)
    backwards = [action for action in whole if action.microbatch_place in num_subsets]
    for backward in sorted(backwards, key=lambda action: -action.stage):
        subsets = [backward._replace(covers=SampleSubset(index)) for index in range(num_subsets[backward.microbatch_place])]
        num_early = 0 if backward.kind is ActionKind.WEIGHT_GRADIENT else len(subsets) - 1
        replaced[backward] = subsets[num_early:]
        times |= dict.fromkeys(replaced[backward], times[backward])
        for subset in subsets[:num_early]:
            start = max(times[need].end_seconds for need in cut_work.needs_of(subset, lowered=False))
            times[subset] = times[backward]._replace(start_seconds=start, end_seconds=start + unit_cost(backward, shape))
            if start == times[backward].start_seconds:
                replaced[backward].insert(-1, subset)
                continue
            for lane in shape.plan.lanes_of_stage(*subset[1:4]):
                added[lane].append(subset)
    lanes = [
        Lane(lane.ranks, tuple(Slot(new) for action in lane.actions for new in replaced.get(action, [action])))
        for lane in schedule.lanes
    ]
    return sort_lanes(lanes, shape, lambda action: times[action].start_seconds, added)
