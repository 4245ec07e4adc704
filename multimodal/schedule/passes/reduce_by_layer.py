"""Lets a stage's gradients be reduced layer by layer while the backward of its last microbatch still runs."""

from collections.abc import Set
from dataclasses import replace

import numpy as np

from multimodal.schedule.execute_lanes import execute_lanes
from multimodal.values.action import Action, ActionKind
from multimodal.values.arrays.microbatches import MicrobatchPlace
from multimodal.values.schedule import Lane, Schedule, Slot, SlotMode
from multimodal.values.shape import StepShape
from multimodal.values.work.step_work import KIND_NUMBERS, step_work


def reduce_by_layer(schedule: Schedule) -> Schedule:
    """Cut reductions in two, the first of which stands before the backward that completes the stage's gradients.

    From there on, a layer's gradients are reduced as soon as that backward has passed the layer; the second part reduces the
    layer that the backward passes last. Reductions keep their order in every lane, and layers go in one order everywhere, so all
    replicas make the same calls in the same order. A reduction is cut if, in all lanes of all replicas, it stands right after the
    whole backward of the last microbatch, or there is no microbatch. Others stay whole: if weight gradients are split from the
    backward, if another reduction has to go first, if microbatches end in another order, and in stages of one layer. With unlike
    replicas there are more parts (`StepShape.reductions`), all stages of a unit are cut or none, and only the last part stands
    behind the backward. If lanes would then wait for each other in a circle when reductions block, all stay whole. O(actions +
    dependencies).
    """
    if schedule.shape.cuts.reduced_by_layer:
        return schedule
    is_unlike = any(unit.is_unlike for unit in schedule.shape.plan.units.values())
    if not (is_unlike or schedule.has_fillers or schedule.shape.cuts.num_subsets or schedule.shape.cuts.segments):
        return _of_whole_computations(schedule)
    reductions = (action for lane in schedule.lanes for action in lane.actions if action.kind is ActionKind.REDUCE_GRADIENTS)
    return cut_reductions(schedule, {key for action in reductions for key in _cut_together(action, schedule.shape)})


def _of_whole_computations(schedule: Schedule) -> Schedule:
    """Do the same, without making actions, in a schedule in line whose computations are whole and whose replicas are alike."""
    shape, work = schedule.shape, schedule.work
    kinds, stages, lanes = work.kinds[schedule.pieces], work.computed_stages[schedule.pieces], schedule.lane_of_slot
    slots = np.flatnonzero(kinds == KIND_NUMBERS[ActionKind.REDUCE_GRADIENTS])
    reduced, last = stages[slots], np.zeros(work.pieces.num_stages, np.int64)
    np.maximum.at(last, work.computed_stages, 1 + work.microbatches)
    follows = (slots > 0) & (lanes[slots] == lanes[slots - 1]) & (kinds[slots - 1] == KIND_NUMBERS[ActionKind.BACKWARD])
    follows &= (stages[slots - 1] == reduced) & (work.microbatches[schedule.pieces[slots - 1]] == last[reduced] - 1)
    can_be_cut = follows | (last[reduced] == 0)
    keys = [(unit, stage) for unit, _, stage in map(work.stages.__getitem__, reduced.tolist())]
    cut = {(unit, stage) for unit, stage in keys if len(shape.plan.virtual_stage(unit, 0, stage).layers) > 1}
    cut -= {key for key, is_free in zip(keys, can_be_cut.tolist(), strict=True) if not is_free}
    if not cut:
        return schedule
    aimed = shape.with_cuts(replace(shape.cuts, reduced_by_layer=frozenset(cut)))
    cut_work = step_work(aimed)
    is_second = (cut_work.kinds == KIND_NUMBERS[ActionKind.REDUCE_GRADIENTS]) & (cut_work.pieces.parts == 1)
    numbers, is_cut = np.flatnonzero(~is_second), np.array([key in cut for key in keys], bool)
    at, first = slots[is_cut], numbers[schedule.pieces[slots[is_cut]]]
    found = schedule.with_inserted(aimed, numbers, lanes=lanes[at], before=at + 1, pieces=first + 1)
    early = (at + np.arange(len(at)))[follows[is_cut]]  # where the first parts stand now, behind their backwards
    found.pieces[early - 1], found.pieces[early] = found.pieces[early].copy(), found.pieces[early - 1].copy()
    return schedule if execute_lanes(found).stuck else found


def cut_reductions(schedule: Schedule, stages: Set[tuple[str, int]]) -> Schedule:
    """Cut the whole reductions of these (unit, virtual stage), if all of them can be cut."""
    shape = schedule.shape
    cut = set(stages) - {
        key
        for lane in schedule.lanes
        for position, action in enumerate(lane.actions)
        if action.kind is ActionKind.REDUCE_GRADIENTS and not _can_be_cut(lane, position, shape)
        for key in _cut_together(action, shape)
    }
    aimed = shape.with_cuts(replace(shape.cuts, reduced_by_layer=frozenset(cut)))
    cut -= {(unit, stage) for unit, stage in cut if shape.plan.units[unit].is_unlike and not _hides_anything(aimed, unit)}
    aimed = shape.with_cuts(replace(shape.cuts, reduced_by_layer=frozenset(cut)))
    rewritten = schedule.with_lanes(_with_pieces(lane, aimed) for lane in schedule.lanes)
    return schedule if execute_lanes(rewritten).stuck else rewritten


def _hides_anything(shape: StepShape, unit: str) -> bool:
    """Return True if a reduction of any stage of a unit begins before the stage's last backward."""
    stages = (stage for stage in shape.stages if stage[0] == unit and shape.num_microbatches(*stage[:2]))
    return any(shape.backward_need(*stage).trains_weights and len(shape.reductions(*stage)) > 1 for stage in stages)


def with_whole_reductions(lane: Lane, shape: StepShape) -> Lane:
    """Undo `reduce_by_layer`: one reduction after the backward that completes the stage's gradients."""
    whole, slots = shape.with_cuts(replace(shape.cuts, reduced_by_layer=frozenset())), list[Slot]()
    for slot in lane.slots:
        if (
            slot.action.kind is not ActionKind.REDUCE_GRADIENTS
            or (slot.action.unit, slot.action.stage) not in shape.cuts.reduced_by_layer
        ):
            slots.append(slot)
        elif not shape.begins_early(slot.action):
            slots += _reductions(slot.action, whole)
    return Lane(lane.ranks, tuple(slots))


def _reductions(action: Action, shape: StepShape) -> list[Slot]:
    """Return all reductions of an action's stage in a step."""
    return [Slot(action._replace(covers=covers)) for covers in shape.reductions(*action[1:4])]


def _cut_together(reduction: Action, shape: StepShape) -> list[tuple[str, int]]:
    """Return the stages that must be cut together with a reduction's."""
    unit = shape.plan.units[reduction.unit]
    stages = range(unit.num_virtual_stages) if unit.is_unlike else (reduction.stage,)
    return [(reduction.unit, stage) for stage in stages]


def _can_be_cut(lane: Lane, position: int, shape: StepShape) -> bool:
    """Return True if the reduction at a position follows the backward that completes it, or other parts of it do."""
    reduction = lane.actions[position]
    num_microbatches = shape.num_microbatches(reduction.unit, reduction.replica)
    if shape.plan.units[reduction.unit].is_unlike:
        position -= shape.reductions(*reduction[1:4]).index(reduction.covers)
    elif len(shape.plan.virtual_stage(*reduction[1:4]).layers) < 2:
        return False
    if num_microbatches == 0:
        return True
    subset = shape.cuts.subsets(MicrobatchPlace(reduction.unit, reduction.replica, num_microbatches - 1))[-1]
    last = Action(ActionKind.BACKWARD, *reduction[1:4], microbatch=num_microbatches - 1, covers=subset)
    around = lane.slots[max(0, position - 2) : position]  # A filler of the backward may be a need of the reduction.
    is_plain = all(slot.mode is SlotMode.IN_LINE for slot in around)
    return position > 0 and lane.actions[position - 1] == last and is_plain


def _with_pieces(lane: Lane, shape: StepShape) -> Lane:
    """Replace whole reductions by those of a step that reduces by layer."""
    slots: list[Slot] = []
    for slot in lane.slots:
        action = slot.action
        if action.kind is not ActionKind.REDUCE_GRADIENTS or (action.unit, action.stage) not in shape.cuts.reduced_by_layer:
            slots.append(slot)
            continue
        if slots and slots[-1].action.kind is ActionKind.REDUCE_GRADIENTS and slots[-1].action[1:4] == action[1:4]:
            continue  # all parts are already in place
        *early, last = _reductions(action, shape)
        has_backward = bool(slots) and slots[-1].action[:4] == (ActionKind.BACKWARD, *action[1:4])
        slots[len(slots) - has_backward : len(slots) - has_backward] = early
        slots.append(last)
    return Lane(lane.ranks, tuple(slots))
