"""Let a stage's gradients be reduced layer by layer while the backward of its last microbatch still runs."""

from collections.abc import Iterator, Set

from multimodal.schedule.execute_lanes import execute_lanes
from multimodal.values.action import Action, ActionKind, LayerRange
from multimodal.values.assignment import MicrobatchPlace
from multimodal.values.dependencies import begins_early
from multimodal.values.schedule import Lane, Schedule, Slot, SlotMode
from multimodal.values.step_graph import StepGraph


def reduce_by_layer(schedule: Schedule) -> Schedule:
    """Cut reductions in two, of which the first stands before the backward that ends the stage's gradients.

    From there on, a layer's gradients are reduced as soon as that backward has passed the layer; the second part reduces what it
    passes last. Reductions keep their order in every lane, and layers go in one order everywhere, so all replicas make the
    same calls in the same order. It is done where, in all lanes of all replicas, the reduction stands right after the whole
    backward of the last microbatch, or there is no microbatch. Others stay whole: where weight gradients come apart from the
    backward, where another reduction has to go first, where microbatches end in another order, and of stages of
    one layer. Where lanes would then wait for each other in a circle if reductions blocked, all stay whole.
    O(actions + dependencies).
    """
    if schedule.step.cuts.reduced_by_layer:
        return schedule
    return cut_reductions(schedule, set(_reduced_stages(schedule)))


def cut_reductions(schedule: Schedule, stages: Set[tuple[str, int]]) -> Schedule:
    """Cut the whole reductions of these (unit, virtual stage) where they can be cut, or none."""
    step = schedule.step
    cut = set(stages) - {
        (action.unit, action.stage)
        for lane in schedule.lanes
        for position, action in enumerate(lane.actions)
        if action.kind is ActionKind.REDUCE_GRADIENTS and not _can_be_cut(lane, position, step)
    }
    rewritten = schedule.with_lanes(_with_pieces(lane, cut, step) for lane in schedule.lanes)
    return schedule if execute_lanes(rewritten).stuck else rewritten


def with_whole_reductions(lane: Lane) -> Lane:
    """Undo `reduce_by_layer`: one reduction after the backward that ends the stage's gradients."""
    kept = (slot for slot in lane.slots if not begins_early(slot.action))
    whole = (Slot(slot.action._replace(covers=None)) if isinstance(slot.action.covers, LayerRange) else slot for slot in kept)
    return Lane(lane.ranks, tuple(whole))


def _reduced_stages(schedule: Schedule) -> Iterator[tuple[str, int]]:
    for lane in schedule.lanes:
        yield from ((each.unit, each.stage) for each in lane.actions if each.kind is ActionKind.REDUCE_GRADIENTS)


def _can_be_cut(lane: Lane, position: int, step: StepGraph) -> bool:
    """Return True if the reduction at a position of a lane follows the backward that ends it."""
    reduction = lane.actions[position]
    num_microbatches = step.num_microbatches(reduction.unit, reduction.replica)
    if len(step.plan.virtual_stage(*reduction[1:4]).layers) < 2:
        return False
    if num_microbatches == 0:
        return True
    subset = step.cuts.subsets(MicrobatchPlace(reduction.unit, reduction.replica, num_microbatches - 1))[-1]
    last = Action(ActionKind.BACKWARD, *reduction[1:4], microbatch=num_microbatches - 1, covers=subset)
    around = lane.slots[max(0, position - 2) : position]  # What fills the backward may be what the reduction needs.
    is_plain = all(slot.mode is SlotMode.IN_LINE for slot in around)
    return position > 0 and lane.actions[position - 1] == last and is_plain


def _with_pieces(lane: Lane, cut: set[tuple[str, int]], step: StepGraph) -> Lane:
    slots: list[Slot] = []
    for slot in lane.slots:
        action = slot.action
        if action.kind is not ActionKind.REDUCE_GRADIENTS or (action.unit, action.stage) not in cut:
            slots.append(slot)
            continue
        has_backward = bool(slots) and slots[-1].action[:4] == (ActionKind.BACKWARD, *action[1:4])
        num_layers = len(step.plan.virtual_stage(*action[1:4]).layers)
        slots.insert(len(slots) - has_backward, Slot(action._replace(covers=LayerRange(1, num_layers))))
        slots.append(Slot(action._replace(covers=LayerRange(0, 1))))
    return Lane(lane.ranks, tuple(slots))
