"""Fills the time in which a lane waits for a message with weight gradients."""

from collections.abc import Collection

import numpy as np

from multimodal.values.action import ACTION_TABLE, Action, ActionKind, Resource
from multimodal.values.backward_need import BackwardNeed
from multimodal.values.schedule import Lane, Schedule, Slot, SlotMode
from multimodal.values.shape import StepShape


def fill(schedule: Schedule, *, splits: bool = True) -> Schedule:
    """Let every weight gradient that stands before an action with a message fill that action's idle slot.

    A backward right before such an action is split first: its input gradient runs at once, as other stages wait for it, and its
    weight gradient becomes the filler. A filler runs while the message is on its way; if the message is already there, the action
    comes first, and the filler right after it. So a lane's work never waits for a weight gradient, and at most one more
    microbatch's gradients are kept. Lanes that share a stage's actions with other lanes stay as they are (they must agree on the
    order), and so do weight gradients before a reduction by layer. splits: False fills with existing weight gradients alone.
    O(actions + dependencies).
    """
    work = schedule.work
    receiving = {work.computed[piece] for piece in np.unique(work.message_ends[1]).tolist()}
    return schedule.with_lanes(_fill_lane(lane, schedule.shape, receiving, splits=splits) for lane in schedule.lanes)


def _fill_lane(lane: Lane, shape: StepShape, receiving: Collection[Action], *, splits: bool) -> Lane:
    """Fill one lane; receiving: the actions that need a message."""
    if any(len(shape.lanes_of(*action[1:4])) > 1 for action in lane.actions):
        return lane
    slots: list[Slot] = []
    for position, slot in enumerate(lane.slots):
        action, carrier = slot.action, _carrier(lane, position)
        waits = slot.mode is SlotMode.IN_LINE and carrier in receiving
        is_whole = action.kind is ActionKind.BACKWARD and action.covers is None
        # After a split, the waits of a carrier would have other numbers.
        carries = position > 0 and lane.slots[position - 1].mode is SlotMode.INSIDE
        if waits and action.kind is ActionKind.WEIGHT_GRADIENT:
            slots.append(Slot(action, SlotMode.FILLS_WAIT))
        elif splits and waits and is_whole and not carries and shape.backward_need(*action[1:4]) is BackwardNeed.FULL:
            slots.append(Slot(action._replace(kind=ActionKind.INPUT_GRADIENT)))
            slots.append(Slot(action._replace(kind=ActionKind.WEIGHT_GRADIENT), SlotMode.FILLS_WAIT))
        else:
            slots.append(slot)
    return Lane(lane.ranks, tuple(slots))


def _carrier(lane: Lane, position: int) -> Action | None:
    """Return the next action that would not become a filler itself, if only computations lie between."""
    for slot in lane.slots[position + 1 :]:
        if ACTION_TABLE[slot.action.kind].resource is not Resource.COMPUTE:
            return None
        if slot.action.kind is not ActionKind.WEIGHT_GRADIENT and slot.mode is not SlotMode.INSIDE:
            return slot.action
    return None
