"""Let a stage's gradients be reduced layer by layer while the backward of its last microbatch still runs."""

from collections.abc import Iterator, Set

from multimodal.schedule.lane_execution import execute_lanes
from multimodal.values.assignment import Assignment, MicrobatchPlace
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Action, ActionKind, Lane, Schedule
from multimodal.values.schedule_form import ScheduleForm, form_of


def reduce_by_layer(schedule: Schedule, *, graph: ModelGraph, plan: Plan, assignment: Assignment) -> Schedule:
    """Cut reductions in two, of which the first stands before the backward that ends the stage's gradients.

    From there on, a layer's gradients are reduced as soon as that backward has passed the layer; the second part reduces what it
    passes last. Reductions keep their order in every lane, and layers go in one order everywhere, so all replicas make the
    same calls in the same order. It is done where, in all lanes of all replicas, the reduction stands right after the whole
    backward of the last microbatch, or there is no microbatch. Others stay whole: where weight gradients come apart from the
    backward, where another reduction has to go first, where microbatches end in another order, of replicated encoders, and of
    stages of one layer. Where lanes would then wait for each other in a circle if reductions blocked, all stay whole.
    O(actions + dependencies).
    """
    if form_of(schedule).reduced_by_layer:
        return schedule
    return cut_reductions(schedule, set(_reduced_stages(schedule)), graph=graph, plan=plan, assignment=assignment)


def cut_reductions(
    schedule: Schedule, stages: Set[tuple[str, int]], *, graph: ModelGraph, plan: Plan, assignment: Assignment
) -> Schedule:
    """Cut the whole reductions of these (unit, virtual stage) where they can be cut, or none."""
    form = form_of(schedule)
    cut = set(stages) - {
        (action.unit, action.stage)
        for lane in schedule.lanes
        for position, action in enumerate(lane.actions)
        if action.kind is ActionKind.REDUCE_GRADIENTS and not _can_be_cut(lane, position, plan, assignment, form)
    }
    found = Schedule(tuple(_with_parts(lane, cut) for lane in schedule.lanes))
    is_stuck = execute_lanes(found, graph=graph, plan=plan, assignment=assignment, lowered=False).stuck(found)
    return schedule if is_stuck else found


def with_whole_reductions(lane: Lane) -> Lane:
    """Undo `reduce_by_layer`: one reduction after the backward that ends the stage's gradients."""
    actions: list[Action] = []
    fillers: set[int] = set()
    for position, action in enumerate(lane.actions):
        is_reduction = action.kind is ActionKind.REDUCE_GRADIENTS
        if is_reduction and action.part == 0:
            continue
        if position in lane.fillers:
            fillers.add(len(actions))
        actions.append(action._replace(part=-1) if is_reduction else action)
    return Lane(lane.ranks, tuple(actions), frozenset(fillers))


def _reduced_stages(schedule: Schedule) -> Iterator[tuple[str, int]]:
    for lane in schedule.lanes:
        yield from ((each.unit, each.stage) for each in lane.actions if each.kind is ActionKind.REDUCE_GRADIENTS)


def _can_be_cut(lane: Lane, position: int, plan: Plan, assignment: Assignment, form: ScheduleForm) -> bool:
    """Whether the reduction at a position of a lane follows the backward that ends it."""
    reduction = lane.actions[position]
    num_microbatches = assignment.num_microbatches(reduction.unit, reduction.replica)
    if len(plan.virtual_stage(*reduction[1:4]).layers) < 2:
        return False
    if num_microbatches == 0:
        return True
    part = form.parts(MicrobatchPlace(reduction.unit, reduction.replica, num_microbatches - 1))[-1]
    last = Action(ActionKind.BACKWARD, *reduction[1:4], microbatch=num_microbatches - 1, part=part)
    is_plain = not lane.fillers & {position - 1, position - 2}  # What fills the backward may be what the reduction needs.
    return position > 0 and lane.actions[position - 1] == last and is_plain


def _with_parts(lane: Lane, cut: set[tuple[str, int]]) -> Lane:
    actions: list[Action] = []
    fillers: set[int] = set()
    for position, action in enumerate(lane.actions):
        if action.kind is ActionKind.REDUCE_GRADIENTS and (action.unit, action.stage) in cut:
            has_backward = bool(actions) and actions[-1][:4] == (ActionKind.BACKWARD, *action[1:4])
            actions.insert(len(actions) - has_backward, action._replace(part=0))
            actions.append(action._replace(part=1))
            continue
        if position in lane.fillers:
            fillers.add(len(actions))
        actions.append(action)
    return Lane(lane.ranks, tuple(actions), frozenset(fillers))
