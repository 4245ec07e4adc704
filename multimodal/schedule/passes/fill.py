"""Fill the time in which a lane waits for a message with weight gradients."""

from multimodal.values.action import ACTION_TABLE, Action, ActionKind, Resource
from multimodal.values.backward_need import BackwardNeed
from multimodal.values.dependencies import dependencies, needs_message
from multimodal.values.schedule import Lane, Schedule, lane_of
from multimodal.values.step_graph import StepGraph


def fill(schedule: Schedule) -> Schedule:
    """Let every weight gradient that stands before an action with a message fill that action's idle slot.

    A backward right before such an action is split first: its input gradient runs at once, as others wait for it, and its weight
    gradient becomes the filler. It runs while the message is on its way; when the message is there already, the action comes
    first, and the filler right after it. So a lane's work never waits for a weight gradient that nobody waits for, and at most
    one more microbatch's gradients are kept. Lanes that share a stage's actions with other lanes stay as they are (these must
    agree on the order), and so does what stands before a reduction by layer. O(actions + dependencies).
    """
    return schedule.with_lanes(_fill_lane(lane, schedule.step, splits=True) for lane in schedule.lanes)


def refill(schedule: Schedule) -> Schedule:
    """Do what `fill` does with weight gradients that are there, and split no backward. O(actions + dependencies)."""
    return schedule.with_lanes(_fill_lane(lane, schedule.step, splits=False) for lane in schedule.lanes)


def _fill_lane(lane: Lane, step: StepGraph, *, splits: bool) -> Lane:
    if any(len(step.lanes_of(*action[1:4])) > 1 for action in lane.actions):
        return lane
    actions: list[Action] = []
    fillers: set[int] = set()
    for position, action in enumerate(lane.actions):
        carrier = _carrier(lane.actions, position)
        waits = carrier is not None and _waits_for_message(carrier, step)
        if position in lane.fillers or (waits and action.kind is ActionKind.WEIGHT_GRADIENT):
            fillers.add(len(actions))
            actions.append(action)
        elif splits and waits and action.covers is None and _can_split(action, step):
            actions.append(action._replace(kind=ActionKind.INPUT_GRADIENT))
            fillers.add(len(actions))
            actions.append(action._replace(kind=ActionKind.WEIGHT_GRADIENT))
        else:
            actions.append(action)
    return lane_of(lane.ranks, actions, fillers)


def _carrier(actions: tuple[Action, ...], position: int) -> Action | None:
    """Return the next action that would not become a filler itself, when only computations stand between."""
    for action in actions[position + 1 :]:
        if ACTION_TABLE[action.kind].resource is not Resource.COMPUTE:
            return None
        if action.kind is not ActionKind.WEIGHT_GRADIENT:
            return action
    return None


def _can_split(action: Action, step: StepGraph) -> bool:
    return action.kind is ActionKind.BACKWARD and step.backward_need(*action[1:4]) is BackwardNeed.FULL


def _waits_for_message(action: Action, step: StepGraph) -> bool:
    return any(needs_message(need, action, step.plan) for need in dependencies(action, step))
