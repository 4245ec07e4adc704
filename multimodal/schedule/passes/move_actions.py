"""Passes that move actions: weight gradients fill bubbles, receives and forwards are deferred."""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from functools import wraps

import numpy as np

from multimodal.schedule.execute_lanes import execute_lanes
from multimodal.schedule.passes import Pass
from multimodal.schedule.passes.reduce_by_layer import cut_reductions, with_whole_reductions
from multimodal.schedule.simulate import timeline_of_unit_costs
from multimodal.values.action import Action, ActionKind, Resource, action_to_text
from multimodal.values.arrays.rows import Floats
from multimodal.values.backward_need import BackwardNeed
from multimodal.values.errors import ScheduleError
from multimodal.values.schedule import Lane, Schedule, Slot, SlotMode, lane_of, show_slots
from multimodal.values.shape import StepShape
from multimodal.values.timeline import TimelineEvent


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
    if any(len(shape.plan.lanes_of_stage(*action[1:4])) > 1 for action in lane.actions):
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
        if slot.action.kind.resource is not Resource.COMPUTE:
            return None
        if slot.action.kind is not ActionKind.WEIGHT_GRADIENT and slot.mode is not SlotMode.INSIDE:
            return slot.action
    return None


def keeps_earlier_passes(*, never_longer: bool = False) -> Callable[[Pass], Pass]:
    """Return a decorator for a pass that knows neither fillers nor reductions by layer.

    The pass receives every filler in line, at its position, and every reduction whole. Afterwards the same reductions are cut
    again, and weight gradients before an action with a message become fillers again; others have no wait to fill and stay in
    line. If a reduction can no longer be cut, the original schedule is kept.

    never_longer: the pass promises not to make a schedule longer; if it nevertheless does, with fillers that run in waits or with
    cut reductions, the original schedule is kept, too. Raises ScheduleError for a filler that is no weight gradient.
    """

    def decorate(rewrite: Pass) -> Pass:
        @wraps(rewrite)
        def rewritten(schedule: Schedule) -> Schedule:
            cut = schedule.shape.cuts.reduced_by_layer
            _check_fillers(schedule)
            whole = (with_whole_reductions(lane, schedule.shape) for lane in schedule.lanes)
            moved = rewrite(schedule.with_lanes(lane_of(lane.ranks, lane.actions) for lane in whole))
            if cut:
                moved = cut_reductions(moved.with_lanes(_with_early_reductions(lane, cut) for lane in moved.lanes), cut)
                if moved.shape.cuts.reduced_by_layer != cut:
                    return schedule
            if schedule.has_fillers:
                moved = fill(moved, splits=False)
            elif not cut:
                return moved
            pairs = zip(schedule.lanes, moved.lanes, strict=True)
            moved = moved.with_lanes(old if old.actions == new.actions else new for old, new in pairs)
            return schedule if never_longer and _is_longer(moved, schedule) else moved

        return rewritten

    return decorate


def _check_fillers(schedule: Schedule) -> None:
    for index, lane in enumerate(schedule.lanes):
        for action, mode, _ in lane.slots:
            is_known = mode is SlotMode.FILLS_WAIT and action.kind is ActionKind.WEIGHT_GRADIENT
            if mode is not SlotMode.IN_LINE and not is_known:
                raise ScheduleError(
                    f"lane {index}: {action_to_text(action)} fills a wait, but passes that move actions know where to put weight "
                    "gradients between computations only; apply them before whatever let it fill one"
                )


def _with_early_reductions(lane: Lane, stages: Set[tuple[str, int]]) -> Lane:
    """Move the reductions of these stages right behind the last backward that they need."""
    actions = list(lane.actions)
    for reduction in [action for action in reversed(actions) if action.kind is ActionKind.REDUCE_GRADIENTS]:
        own = [at for at, action in enumerate(actions) if action.microbatch >= 0 and action[1:4] == reduction[1:4]]
        if (reduction.unit, reduction.stage) in stages and own:
            actions.remove(reduction)
            actions.insert(own[-1] + 1, reduction)
    return lane_of(lane.ranks, actions)


def _is_longer(after: Schedule, before: Schedule) -> bool:
    """Return True if the schedule takes longer under unit costs, with fillers in line or with fillers that run in waits."""
    if after == before:
        return False
    if (length := duration_of(after)) == math.inf or length > duration_of(before):
        return True
    return timeline_of_unit_costs(after).duration_seconds > timeline_of_unit_costs(before).duration_seconds


def action_times(schedule: Schedule) -> dict[Action, TimelineEvent]:
    """Return the event of each action of a compute-dialect schedule under unit costs: the same times in all of its lanes.

    Raises ScheduleError if the schedule cannot finish.
    """
    execution = execute_lanes(schedule)
    if stuck := execution.stuck:
        raise ScheduleError(
            "the schedule cannot finish, so nothing in it can be moved; validate it first\n"
            + show_slots(schedule.lanes, marked=stuck)
        )
    return {event.action: event for event in execution.events}


def duration_of(schedule: Schedule, *, seconds: Floats | None = None) -> float:
    """Return the duration of a schedule under unit costs, or with the given seconds; infinite if it cannot finish."""
    execution = execute_lanes(schedule, seconds=seconds)
    return math.inf if execution.stuck else execution.duration_seconds


def sort_lanes(
    lanes: Iterable[Lane], shape: StepShape, key: Callable[[Action], float], added: Mapping[int, list[Action]] | None = None
) -> Schedule:
    """Sort every lane by time; actions of equal time keep their order. added: more actions per lane, after those of their time.

    lanes: without fillers, whose carriers would change (see `keeps_earlier_passes`). If every action's time is strictly after the
    times of all its needs, the result cannot deadlock.
    """
    rows, more = tuple(lanes), added or {}
    assert not any(lane.fillers for lane in rows), "fillers would be lost"
    actions = (sorted((*lane.actions, *more.get(index, ())), key=key) for index, lane in enumerate(rows))
    return Schedule.of_lanes(shape, map(lane_of, (lane.ranks for lane in rows), actions))


@keeps_earlier_passes(never_longer=True)
def defer_receives(schedule: Schedule) -> Schedule:
    """Let later actions of a lane run while it would wait for a message.

    Under unit costs: where a lane waits, the next action in its list that is ready when the wait begins and ends before the
    message arrives moves to the front, and so on until the gap is full. Only lanes of one stage move their actions (in several
    lanes at once, an order that suits one may stop another). The result may keep more activations, but never takes longer: if
    moving does not pay, the schedule stays as it is. O(actions x window + dependencies).
    """
    shape, work, times = schedule.shape, schedule.work, action_times(schedule)
    starts = {action: event.start_seconds for action, event in times.items()}
    for lane in schedule.lanes:
        if any(len(shape.plan.lanes_of_stage(*action[1:4])) > 1 for action in lane.actions):
            continue
        needs = {action: work.needs_of(action, lowered=False) for action in lane.actions}
        ready = {action: max((times[need].end_seconds for need in needed), default=0.0) for action, needed in needs.items()}
        starts |= _fill_gaps([times[action] for action in lane.actions], ready)
    moved = sort_lanes(schedule.lanes, shape, starts.__getitem__)
    return moved if duration_of(moved) <= duration_of(schedule) else schedule


_WINDOW = 32
"""Number of later actions that are considered for a gap."""


def _fill_gaps(events: Sequence[TimelineEvent], ready: dict[Action, float]) -> dict[Action, float]:
    """Return new start times for the actions that move into a gap of their lane."""
    moved: dict[Action, float] = {}
    free_at = 0.0
    for index, event in enumerate(events):
        if event.action in moved:
            continue
        for later in events[index + 1 : index + 1 + _WINDOW] if _is_computed(event) else ():
            length = later.end_seconds - later.start_seconds
            is_ready = _is_computed(later) and later.action not in moved and ready[later.action] <= free_at
            if is_ready and free_at + length <= event.start_seconds:
                moved[later.action] = free_at
                free_at += length
        free_at = event.end_seconds
    return moved


def _is_computed(event: TimelineEvent) -> bool:
    return event.action.kind.resource is Resource.COMPUTE


@keeps_earlier_passes(never_longer=True)
def delay_forward(schedule: Schedule) -> Schedule:
    """Give each pipeline stage of the LLM the fewest warm-up forwards that keep the schedule's length under unit costs.

    Optimus finds that the last forwards of 1F1B's warm-up, above all in the interleaved schedule, can be deferred "without any
    adverse effects on the overall pipeline latency": encoder forwards then have more bubbles to run in. Stage by stage from the
    last to the first, alike in all replicas, as many forwards as possible leave the warm-up, and all later forwards move behind
    as many backwards. Lanes that the LLM shares with other units stay as they are.

    O(stages x log(warm-up) executions).
    """
    length, graph, plan = duration_of(schedule), schedule.shape.graph, schedule.shape.plan
    # The lanes that belong to the LLM alone, by pipeline stage.
    shared = {rank for name, unit in plan.units.items() if name != graph.backbone.name for rank in unit.ranks}
    lanes_of_stage: dict[int, list[int]] = defaultdict(list)
    for replica in plan.units[graph.backbone.name].replicas:
        for index, stage in enumerate(replica.stages):
            if not shared & set(stage.ranks):
                lanes_of_stage[index].append(plan.lane_of_rank[stage.ranks[0]])
    for _, lanes in sorted(lanes_of_stage.items(), reverse=True):
        fewest, most = 0, min((_num_warm_up(schedule.lanes[lane].actions) for lane in lanes), default=1) - 1
        while fewest < most:
            middle = (fewest + most + 1) // 2
            if duration_of(_delay(schedule, lanes, middle)) <= length < math.inf:
                fewest = middle
            else:
                most = middle - 1
        schedule = _delay(schedule, lanes, fewest)
    return schedule


def _num_warm_up(actions: tuple[Action, ...]) -> int:
    """Return the number of forwards before the first backward."""
    kinds = [action.kind for action in actions]
    first = next((at for at, kind in enumerate(kinds) if kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)), 0)
    return kinds[:first].count(ActionKind.FORWARD)


def _delay(schedule: Schedule, lanes: list[int], num_forwards: int) -> Schedule:
    """Take `num_forwards` forwards out of the warm-up of these lanes."""
    if num_forwards == 0:
        return schedule
    return schedule.with_lanes(
        lane_of(lane.ranks, _delay_lane(lane.actions, num_forwards)) if index in lanes else lane
        for index, lane in enumerate(schedule.lanes)
    )


def _delay_lane(actions: tuple[Action, ...], num_forwards: int) -> tuple[Action, ...]:
    """Move every forward after the shortened warm-up behind `num_forwards` more backwards (and their weight gradients)."""
    num_kept = _num_warm_up(actions) - num_forwards
    delayed: list[Action] = []
    waiting: list[tuple[Action, int]] = []
    num_seen = num_backwards = 0
    for action in actions:
        if action.kind is ActionKind.FORWARD:
            num_seen += 1
            if num_seen > num_kept:
                waiting.append((action, num_backwards + min(num_forwards, num_seen - num_kept)))
                continue
        elif action.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT):
            while waiting and waiting[0][1] <= num_backwards:
                delayed.append(waiting.pop(0)[0])
            num_backwards += 1
        delayed.append(action)
    end = len(delayed)
    while end and delayed[end - 1].kind is ActionKind.REDUCE_GRADIENTS:
        end -= 1
    return (*delayed[:end], *(action for action, _ in waiting), *delayed[end:])
