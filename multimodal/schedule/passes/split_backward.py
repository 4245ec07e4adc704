"""Split-backward (Entrain 4.5.3): an encoder does not wait for the gradients of samples that the LLM runs later."""

from collections import defaultdict
from dataclasses import replace

from multimodal.schedule.dependencies import dependencies
from multimodal.schedule.lane_times import lane_times, sort_lanes
from multimodal.schedule.passes.keep_earlier_passes import keeps_earlier_passes
from multimodal.schedule.unit_cost import unit_cost
from multimodal.values.assignment import Assignment, MicrobatchPlace
from multimodal.values.model_graph import ModelGraph, Role
from multimodal.values.plan import Plan
from multimodal.values.schedule import Action, ActionKind, Lane, Schedule
from multimodal.values.schedule_form import form_of, parts_of


@keeps_earlier_passes()
def split_backward(schedule: Schedule, *, graph: ModelGraph, plan: Plan, assignment: Assignment) -> Schedule:
    """Cut the backward of every encoder microbatch with several consumers into one per consumer, each as early as it can run.

    Entrain defers samples of a microbatch to a later LLM microbatch; their gradients come back later, too. The backward of the
    others runs as soon as theirs are there; only the last subset keeps the backward's old place. Of a backward that is split into
    input and weight gradients, the input gradient is treated so; the weight gradients of all subsets take the place of the old
    one. Raises ScheduleError when the schedule cannot finish.
    O((actions + dependencies) log).
    """
    form = form_of(schedule)
    num_parts = {
        place: len(parts)
        for unit in graph.encoders
        for replica in range(plan.units[unit.name].data_parallel_size)
        for microbatch in range(assignment.num_microbatches(unit.name, replica))
        if len(parts := parts_of(place := MicrobatchPlace(unit.name, replica, microbatch), graph, assignment)) > 1
    }
    times = lane_times(schedule, graph=graph, plan=plan, assignment=assignment)
    starts = {event.action: event.start_seconds for lane in times for event in lane}
    ends = {event.action: event.end_seconds for lane in times for event in lane}
    split = replace(form, num_parts={**form.num_parts, **num_parts})
    replaced: dict[Action, list[Action]] = {}
    added: dict[int, list[Action]] = defaultdict(list)
    backwards = [action for action in starts if _is_cut(action, graph, num_parts)]
    for backward in sorted(backwards, key=lambda action: -action.stage):
        subsets = [backward._replace(part=part) for part in range(num_parts[_microbatch(backward)])]
        num_early = 0 if backward.kind is ActionKind.WEIGHT_GRADIENT else len(subsets) - 1
        early, replaced[backward] = subsets[:num_early], subsets[num_early:]
        for part in replaced[backward]:
            starts[part], ends[part] = starts[backward], ends[backward]
        for part in early:
            needed = dependencies(part, graph, plan, assignment, form=split)
            starts[part] = max(ends[need] for need in needed)
            ends[part] = starts[part] + unit_cost(backward, graph, plan)
            if starts[part] == starts[backward]:
                replaced[backward].insert(-1, part)
                continue
            for lane in plan.lanes_of_stage(part.unit, part.replica, part.stage):
                added[lane].append(part)
    lanes = tuple(
        Lane(lane.ranks, tuple(new for action in lane.actions for new in replaced.get(action, [action])))
        for lane in schedule.lanes
    )
    return sort_lanes(Schedule(lanes), starts.__getitem__, added)


_BACKWARDS = (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)


def _is_cut(action: Action, graph: ModelGraph, num_parts: dict[MicrobatchPlace, int]) -> bool:
    is_whole = action.kind in _BACKWARDS and action.part < 0
    return is_whole and graph.unit(action.unit).role is Role.ENCODER and _microbatch(action) in num_parts


def _microbatch(action: Action) -> MicrobatchPlace:
    return MicrobatchPlace(action.unit, action.replica, action.microbatch)
