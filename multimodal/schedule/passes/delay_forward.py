"""Delays the LLM's warm-up forwards (Optimus 4.3): it needs encoder outputs as late as possible without a longer schedule."""

from collections import defaultdict

from multimodal.schedule.passes.move_actions import duration_of, keeps_earlier_passes
from multimodal.values.action import Action, ActionKind
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Schedule, lane_of


@keeps_earlier_passes(never_longer=True)
def delay_forward(schedule: Schedule) -> Schedule:
    """Give each pipeline stage of the LLM the fewest warm-up forwards that keep the schedule's length under unit costs.

    Optimus finds that the last forwards of 1F1B's warm-up, above all in the interleaved schedule, can be deferred "without any
    adverse effects on the overall pipeline latency": encoder forwards then have more bubbles to run in. Stage by stage from the
    last to the first, alike in all replicas, as many forwards as possible leave the warm-up, and all later forwards move behind
    as many backwards. Lanes that the LLM shares with other units stay as they are.

    O(stages x log(warm-up) executions).
    """
    length = duration_of(schedule)
    for lanes in _lanes_by_stage(schedule.shape.graph, schedule.shape.plan):
        fewest, most = 0, min((_num_warm_up(schedule.lanes[lane].actions) for lane in lanes), default=1) - 1
        while fewest < most:
            middle = (fewest + most + 1) // 2
            candidate = _delay(schedule, lanes, middle)
            duration = duration_of(candidate)
            if duration is not None and length is not None and duration <= length:
                fewest = middle
            else:
                most = middle - 1
        schedule = _delay(schedule, lanes, fewest)
    return schedule


def _lanes_by_stage(graph: ModelGraph, plan: Plan) -> list[tuple[int, ...]]:
    """Return the lanes that belong to the LLM alone, by pipeline stage, the last stage first."""
    backbone = plan.units[graph.backbone.name]
    shared = {rank for name, unit in plan.units.items() if name != graph.backbone.name for rank in unit.ranks}
    lanes: dict[int, list[int]] = defaultdict(list)
    for replica in backbone.replicas:
        for index, stage in enumerate(replica.stages):
            if not shared & set(stage.ranks):
                lanes[index].append(plan.lane_of_rank[stage.ranks[0]])
    return [tuple(lanes[index]) for index in sorted(lanes, reverse=True)]


def _num_warm_up(actions: tuple[Action, ...]) -> int:
    """Return the number of forwards before the first backward."""
    count = 0
    for action in actions:
        if action.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT):
            return count
        count += action.kind is ActionKind.FORWARD
    return 0


def _delay(schedule: Schedule, lanes: tuple[int, ...], num_forwards: int) -> Schedule:
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
    for position in range(len(delayed), -1, -1):
        if position == 0 or delayed[position - 1].kind is not ActionKind.REDUCE_GRADIENTS:
            return (*delayed[:position], *(action for action, _ in waiting), *delayed[position:])
    return tuple(delayed)
