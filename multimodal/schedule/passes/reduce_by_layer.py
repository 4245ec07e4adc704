"""Passes that spread the collectives of weights over the step: gradients reduced layer by layer, parameters gathered early."""

from collections.abc import Set
from dataclasses import replace

import numpy as np

from multimodal.schedule.execute_lanes import can_finish
from multimodal.values.action import ActionKind
from multimodal.values.arrays.rows import Bools, Integers, row_starts, take_rows
from multimodal.values.schedule import Lane, Schedule, Slot, SlotMode
from multimodal.values.shape import StepShape
from multimodal.values.work.step_work import BACKWARD, GATHER, REDUCTION, step_work


def reduce_by_layer(schedule: Schedule) -> Schedule:
    """Cut reductions in two, the first of which stands before the backward that completes the stage's gradients.

    From there on, a layer's gradients are reduced as soon as that backward has passed the layer; the second part reduces the
    layer that the backward passes last. Reductions keep their order in every lane, and layers go in one order everywhere, so all
    replicas make the same calls in the same order. A reduction is cut if, in all lanes of all replicas, it stands right after the
    whole backward of the last microbatch, or there is no microbatch. Others stay whole: if weight gradients are split from the
    backward, if another reduction has to go first, if microbatches end in another order, and in stages of one layer. With unlike
    replicas there are more parts (`StepShape.reductions`), all stages of a unit are cut or none, and only the last part stands
    behind the backward. If lanes would then wait in a circle when reductions block, all stay whole. O(actions + dependencies).
    """
    return schedule if schedule.shape.cuts.reduced_by_layer else cut_reductions(schedule)


def cut_reductions(schedule: Schedule, stages: Set[tuple[str, int]] | None = None) -> Schedule:
    """Cut the whole reductions of these (unit, virtual stage), by default of all, if all of them can be cut."""
    shape, work, pieces, lanes = schedule.shape, schedule.work, schedule.pieces, schedule.lane_of_slot
    slots = np.flatnonzero(work.kinds[pieces] == REDUCTION)
    first, reduced = slots - work.pieces.parts[pieces[slots]], work.computed_stages[pieces[slots]]
    num_microbatches, last = np.zeros(work.pieces.num_stages, np.int64), np.full(work.pieces.num_stages, -1)
    np.maximum.at(num_microbatches, work.computed_stages, 1 + work.microbatches)
    is_last = work.microbatches == num_microbatches[work.computed_stages] - 1
    ends = np.flatnonzero(is_last & (work.kinds == BACKWARD) & ~work.pieces.is_range)
    np.maximum.at(last, work.computed_stages[ends], ends)  # of sample subsets, the last one
    follows = (first > 0) & (lanes[first - 1] == lanes[slots]) & (pieces[first - 1] == last[reduced])
    is_alone = (first < 2) | (lanes[first - 2] != lanes[slots])  # a filler of the backward may be a need of the reduction
    follows &= (schedule.modes[first - 1] == SlotMode.IN_LINE) & (is_alone | (schedule.modes[first - 2] == SlotMode.IN_LINE))
    can_be_cut = follows | (num_microbatches[reduced] == 0)
    keys = [(unit, stage) for unit, _, stage in map(work.stages.__getitem__, reduced.tolist())]
    together = {key: _cut_together(*key, shape) for key in keys}
    cut = {each for key in keys if stages is None or key in stages for each in together[key]}
    cut -= {each for key, is_free in zip(keys, can_be_cut.tolist(), strict=True) if not is_free for each in together[key]}
    aimed = shape.with_cuts(replace(shape.cuts, reduced_by_layer=frozenset(cut)))
    for unit in {unit for unit, _ in cut if shape.plan.units[unit].is_unlike}:
        stages_of_unit = [stage for stage in shape.stages if stage[0] == unit and shape.num_microbatches(*stage[:2])]
        if not any(shape.backward_need(*key).trains_weights and len(aimed.reductions(*key)) > 1 for key in stages_of_unit):
            cut -= {each for each in cut if each[0] == unit}  # no reduction would begin before its stage's last backward
    if not cut:
        return schedule
    aimed = shape.with_cuts(replace(shape.cuts, reduced_by_layer=frozenset(cut)))
    is_cut = np.array([key in cut for key in keys], bool)
    chosen = is_cut & (first == slots)
    found = _with_parts(schedule, aimed, slots[is_cut], firsts=slots[chosen], is_behind=follows[chosen])
    return found if can_finish(found) else schedule


def _cut_together(unit: str, stage: int, shape: StepShape) -> list[tuple[str, int]]:
    """Return the stages that must be cut together with one; none if it has only one layer."""
    plan = shape.plan.units[unit]
    if plan.is_unlike:
        return [(unit, each) for each in range(plan.num_virtual_stages)]
    return [(unit, stage)] if len(shape.plan.virtual_stage(unit, 0, stage).layers) > 1 else []


def _with_parts(schedule: Schedule, aimed: StepShape, slots: Integers, *, firsts: Integers, is_behind: Bools) -> Schedule:
    """Replace the reductions in some slots by those of another shape, all but the last of them before the last backward.

    firsts: the first slot of each stage's reductions in a lane; is_behind: True if it follows the stage's last backward.
    """
    old, new = schedule.work, step_work(aimed)
    reduced = np.array([(unit, stage) in aimed.cuts.reduced_by_layer for unit, _, stage in old.stages], bool)
    is_old, is_new = ((work.kinds == REDUCTION) & reduced[work.computed_stages] for work in (old, new))
    numbers, parts = np.full(old.num_computed, -1), np.flatnonzero(is_new)
    numbers[~is_old] = np.flatnonzero(~is_new)
    counts = np.bincount(new.computed_stages[parts], minlength=old.pieces.num_stages)
    starts, pieces = take_rows(row_starts(counts), parts, old.computed_stages[schedule.pieces[firsts]])
    # Three places at each slot: before it, its own, and behind it.
    kept, places = np.delete(np.arange(len(schedule.pieces)), slots), np.repeat(3 * (firsts - is_behind), np.diff(starts))
    places[starts[1:] - 1] = 3 * firsts + 1
    order = np.argsort(np.concatenate((3 * kept + 1, places)), kind="stable")
    lanes = np.concatenate((schedule.lane_of_slot[kept], np.repeat(schedule.lane_of_slot[firsts], np.diff(starts))))
    return schedule.merged(aimed, kept=kept, numbers=numbers, more=pieces, lanes=lanes, order=order)


def with_whole_reductions(lane: Lane, shape: StepShape) -> Lane:
    """Undo `reduce_by_layer`: one reduction after the backward that completes the stage's gradients."""
    whole, slots = shape.with_cuts(replace(shape.cuts, reduced_by_layer=frozenset())), list[Slot]()
    for slot in lane.slots:
        is_cut = (slot.action.unit, slot.action.stage) in shape.cuts.reduced_by_layer
        if slot.action.kind is not ActionKind.REDUCE_GRADIENTS or not is_cut:
            slots.append(slot)
        elif not shape.begins_early(slot.action):
            slots += [Slot(slot.action._replace(covers=covers)) for covers in whole.reductions(*slot.action[1:4])]
    return Lane(lane.ranks, tuple(slots))


def gather_parameters(schedule: Schedule) -> Schedule:
    """Put the gathers of every trained stage at the start of its lanes.

    Gathers are in one order everywhere (upstream units first, then early stages), so that the lanes of different replicas never
    wait for each other in a circle. A lane only starts a gather at its slot, and a stage's first forward waits for it: the first
    stage's gather shows as a bubble (Optimus, Table 1), and the others hide behind computations. O(actions).
    """
    if schedule.shape.cuts.gathers_parameters:
        return schedule
    shape = schedule.shape.with_cuts(replace(schedule.shape.cuts, gathers_parameters=True))
    work = step_work(shape)
    is_gather = work.kinds == GATHER
    if not is_gather.any():
        return schedule
    lanes, pieces = work.by_lane(np.flatnonzero(is_gather))
    before = schedule.lane_starts[lanes]
    return schedule.with_inserted(shape, numbers=np.flatnonzero(~is_gather), lanes=lanes, before=before, pieces=pieces)
