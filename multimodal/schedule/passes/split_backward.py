"""Split-backward (Entrain 4.5.3): an encoder does not wait for the gradients of samples that the LLM runs later."""

from collections import defaultdict

from multimodal.schedule.dependencies import dependencies
from multimodal.schedule.lane_times import lane_times, sort_lanes
from multimodal.schedule.unit_cost import unit_cost
from multimodal.values.assignment import Assignment, MicrobatchPlace
from multimodal.values.model_graph import ModelGraph, Role
from multimodal.values.plan import Plan
from multimodal.values.schedule import Action, ActionKind, Schedule
from multimodal.values.schedule_form import ScheduleForm, form_of, parts_of


def split_backward(schedule: Schedule, *, graph: ModelGraph, plan: Plan, assignment: Assignment) -> Schedule:
    """Cut the backward of every encoder microbatch with several consumers into one per consumer, each as early as it can run.

    Entrain defers samples of a microbatch to a later LLM microbatch; their gradients come back later, too. The backward of the
    others runs as soon as theirs are there; only the last subset keeps the backward's old place. An encoder whose backward is
    split into input and weight gradients keeps it whole. Raises ScheduleError when the schedule cannot finish.
    O((actions + dependencies) log).
    """
    form = form_of(schedule)
    whole = {place.unit for place in form.split}
    num_parts = {
        place: len(parts)
        for unit in graph.encoders
        if unit.name not in whole
        for replica in range(plan.units[unit.name].data_parallel_size)
        for microbatch in range(assignment.num_microbatches(unit.name, replica))
        if len(parts := parts_of(place := MicrobatchPlace(unit.name, replica, microbatch), graph, assignment)) > 1
    }
    times = lane_times(schedule, graph=graph, plan=plan, assignment=assignment)
    starts = {event.action: event.start_seconds for lane in times for event in lane}
    ends = {event.action: event.end_seconds for lane in times for event in lane}
    split = ScheduleForm(form.split, {**form.num_parts, **num_parts}, form.gathers_parameters)
    replaced: dict[Action, Action] = {}
    added: dict[int, list[Action]] = defaultdict(list)
    backwards = [action for action in starts if _is_cut(action, graph, num_parts)]
    for backward in sorted(backwards, key=lambda action: -action.stage):
        *early, last = (backward._replace(part=part) for part in range(num_parts[_microbatch(backward)]))
        replaced[backward] = last
        starts[last], ends[last] = starts[backward], ends[backward]
        for part in early:
            needed = dependencies(part, graph, plan, assignment, form=split)
            starts[part] = max(ends[need] for need in needed)
            ends[part] = starts[part] + unit_cost(backward, graph, plan)
            for lane in plan.lanes_of_stage(part.unit, part.replica, part.stage):
                added[lane].append(part)
    lanes = tuple(
        type(lane)(lane.ranks, tuple(replaced.get(action, action) for action in lane.actions)) for lane in schedule.lanes
    )
    return sort_lanes(Schedule(lanes), starts.__getitem__, added)


def _is_cut(action: Action, graph: ModelGraph, num_parts: dict[MicrobatchPlace, int]) -> bool:
    is_whole = action.kind is ActionKind.BACKWARD and action.part < 0
    return is_whole and graph.unit(action.unit).role is Role.ENCODER and _microbatch(action) in num_parts


def _microbatch(action: Action) -> MicrobatchPlace:
    return MicrobatchPlace(action.unit, action.replica, action.microbatch)
