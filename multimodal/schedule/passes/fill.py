"""Fill the time in which a lane waits for a message with weight gradients."""

from multimodal.schedule.dependencies import dependencies, needs_message
from multimodal.values.assignment import Assignment
from multimodal.values.backward_need import BackwardNeed, stage_backward_need
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import ACTION_TABLE, Action, ActionKind, Lane, Resource, Schedule
from multimodal.values.schedule_form import ScheduleForm, form_of


def fill(schedule: Schedule, *, graph: ModelGraph, plan: Plan, assignment: Assignment) -> Schedule:
    """Let every weight gradient that stands before an action with a message fill that action's idle slot.

    A backward right before such an action is split first: its input gradient runs at once, as others wait for it, and its weight
    gradient becomes the filler. It runs while the message is on its way; when the message is there already, the action comes
    first, and the filler right after it. So a lane's work never waits for a weight gradient that nobody waits for, and at most
    one more microbatch's gradients are kept. Lanes that share a stage's actions with other lanes stay as they are (these must
    agree on the order), and so does what stands before a reduction by layer. O(actions + dependencies).
    """
    form = form_of(schedule)
    return Schedule(tuple(_fill_lane(lane, form, graph, plan, assignment, splits=True) for lane in schedule.lanes))


def refill(schedule: Schedule, *, graph: ModelGraph, plan: Plan, assignment: Assignment) -> Schedule:
    """Do what `fill` does with weight gradients that are there, and split no backward. O(actions + dependencies)."""
    form = form_of(schedule)
    return Schedule(tuple(_fill_lane(lane, form, graph, plan, assignment, splits=False) for lane in schedule.lanes))


def _fill_lane(lane: Lane, form: ScheduleForm, graph: ModelGraph, plan: Plan, assignment: Assignment, *, splits: bool) -> Lane:
    if any(len(plan.lanes_of_stage(*action[1:4])) > 1 for action in lane.actions):
        return lane
    actions: list[Action] = []
    fillers: set[int] = set()
    for position, action in enumerate(lane.actions):
        carrier = _carrier(lane.actions, position)
        waits = carrier is not None and _waits_for_message(carrier, form, graph, plan, assignment)
        if position in lane.fillers or (waits and action.kind is ActionKind.WEIGHT_GRADIENT):
            fillers.add(len(actions))
            actions.append(action)
        elif splits and waits and action.part < 0 and _can_split(action, graph, plan):
            actions.append(action._replace(kind=ActionKind.INPUT_GRADIENT))
            fillers.add(len(actions))
            actions.append(action._replace(kind=ActionKind.WEIGHT_GRADIENT))
        else:
            actions.append(action)
    return Lane(lane.ranks, tuple(actions), frozenset(fillers))


def _carrier(actions: tuple[Action, ...], position: int) -> Action | None:
    """The next action that would not become a filler itself, when only computations stand between."""
    for action in actions[position + 1 :]:
        if ACTION_TABLE[action.kind].resource is not Resource.COMPUTE:
            return None
        if action.kind is not ActionKind.WEIGHT_GRADIENT:
            return action
    return None


def _can_split(action: Action, graph: ModelGraph, plan: Plan) -> bool:
    if action.kind is not ActionKind.BACKWARD:
        return False
    return stage_backward_need(graph, plan, action.unit, action.replica, action.stage) is BackwardNeed.FULL


def _waits_for_message(action: Action, form: ScheduleForm, graph: ModelGraph, plan: Plan, assignment: Assignment) -> bool:
    return any(needs_message(need, action, plan) for need in dependencies(action, graph, plan, assignment, form=form))
