"""Interleaved 1F1B whose weight gradients wait for idle time (Qi et al., Zero Bubble Pipeline Parallelism)."""

from collections.abc import Collection

import numpy as np

from multimodal.cost.step_costs import StepCosts
from multimodal.schedule.builders.interleaved_1f1b import build_interleaved_1f1b
from multimodal.schedule.builders.room_ahead import MEMORY_SHARE
from multimodal.schedule.fill_pipelines import Movable, fill_pipelines
from multimodal.schedule.split_in_line import fills_of, reduced_units, split_in_line, weights_before_forwards, weights_before_last
from multimodal.values.arrays.rows import Integers
from multimodal.values.schedule import Schedule
from multimodal.values.shape import StepShape

MORE_IN_FLIGHT = (1, 4, 8, 16, 32)
"""Microbatches of layer ranges that a lane may keep beyond those of interleaved 1F1B."""
_LEAST_GAIN = 1e-3
"""Share of the pipelines' time by which keeping more must shorten it to be worthwhile."""


def build_interleaved_zb(shape: StepShape, costs: StepCosts) -> Schedule:
    """Build interleaved 1F1B with weight gradients where a lane would be idle, in the compute dialect.

    Layer ranges of several units, or of a unit and its ends, take different times, so lanes wait for each other in every group of
    microbatches. Forwards and input gradients keep the order of interleaved 1F1B. Weight gradients go where the lane would be
    idle for their duration, by the durations of `costs`; before forwards for which they must make room; and, if their gradients
    are reduced, before their stage's last one, which keeps its place, so that reductions by layer start about as early as in
    interleaved 1F1B. Lanes keep more microbatches as far as this shortens the pipelines and fits into the memory of `costs`. Qi
    et al. (ZB-H1) have one layer range per stage, equal durations and no reductions. If the pipelines would not end earlier, the
    schedule is interleaved 1F1B.
    """
    in_line = build_interleaved_1f1b(shape)
    best = fill_pipelines(in_line, costs, _movable(in_line, (), 0))
    if shape.forward_only:
        return best.schedule
    split, reduced = split_in_line(in_line, shape.graph.unit_names), reduced_units(shape, costs)
    room = MEMORY_SHARE * costs.memory_bytes - np.array([costs.static_bytes(lane) for lane in range(in_line.num_lanes)])
    for num_more in MORE_IN_FLIGHT:
        filled = fill_pipelines(split, costs, _movable(split, reduced, num_more))
        if filled.end >= (1 - _LEAST_GAIN) * best.end:
            break
        if (_most_kept(filled.schedule, costs) > room).any():
            break
        best = filled
    return best.schedule


def _movable(in_line: Schedule, reduced: Collection[str], num_more: int) -> Movable:
    """Return the weight gradients as movable work; lanes may keep `num_more` microbatches more than in the given order."""
    last = weights_before_last(in_line, reduced)
    return Movable(fills_of(in_line, (), last), weights_before_forwards(in_line, num_more=num_more).joined(last))


def _most_kept(schedule: Schedule, costs: StepCosts) -> Integers:
    """Return [num_lanes] the most bytes per rank that microbatches keep at one time."""
    work, kept = schedule.work, np.zeros(schedule.work.num_computed, np.int64)
    for grid in work.pieces.units.values():
        is_kept = grid.is_there & (grid.width > 0)
        forwards, ends = grid.forward[is_kept], (grid.backward + grid.width - 1)[is_kept]
        kept[forwards] = costs.kept_bytes(work, forwards)
        kept[ends] = -kept[forwards]
    is_computed = schedule.pieces < work.num_computed
    sizes, lanes = kept[schedule.pieces[is_computed]], schedule.lane_of_slot[is_computed]
    ends = np.searchsorted(lanes, np.arange(1, schedule.num_lanes))
    return np.array([np.cumsum(row).max(initial=0) for row in np.split(sizes, ends)])
