"""Split-backward (Entrain 4.5.3): an encoder does not wait for the gradients of samples that the LLM runs later."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from multimodal.schedule.dependencies import dependencies
from multimodal.schedule.lane_times import duration_of, lane_times, sort_lanes
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
    one. Where the step would take longer under unit costs, with equal subsets, the schedule stays as it was. Raises ScheduleError
    when the schedule cannot finish. O((actions + dependencies) log).
    """
    num_parts = _num_parts(graph, plan, assignment)
    found = _cut(schedule, num_parts, graph=graph, plan=plan, assignment=assignment)
    if found == schedule:
        return schedule
    costs = _SubsetCosts(graph, plan, num_parts)
    after, before = (
        duration_of(each, graph=graph, plan=plan, assignment=assignment, duration=costs.seconds) for each in (found, schedule)
    )
    return found if after is not None and before is not None and after <= before + _ROUNDING else schedule


_ROUNDING = 1e-6
"""Seconds: thirds do not add up exactly."""


@dataclass(frozen=True)
class _SubsetCosts:
    """Unit costs of which every sample subset of a backward takes the same share."""

    graph: ModelGraph
    plan: Plan
    num_parts: Mapping[MicrobatchPlace, int]
    whole: dict[tuple[str, str, int, int], int] = field(default_factory=dict)
    """(kind, unit, replica, stage) -> seconds, as all microbatches take the same."""

    def seconds(self, action: Action) -> float:
        """Return how long an action takes."""
        key = action[:4]
        if key not in self.whole:
            self.whole[key] = unit_cost(action, self.graph, self.plan)
        is_subset = action.part >= 0 and action.kind in _BACKWARDS
        return self.whole[key] / (self.num_parts.get(_microbatch(action), 1) if is_subset else 1)


def _num_parts(graph: ModelGraph, plan: Plan, assignment: Assignment) -> dict[MicrobatchPlace, int]:
    """Return the number of consumers of every encoder microbatch that has several."""
    return {
        place: len(parts)
        for unit in graph.encoders
        for replica in range(plan.units[unit.name].data_parallel_size)
        for microbatch in range(assignment.num_microbatches(unit.name, replica))
        if len(parts := parts_of(place := MicrobatchPlace(unit.name, replica, microbatch), graph, assignment)) > 1
    }


def _cut(
    schedule: Schedule, num_parts: dict[MicrobatchPlace, int], *, graph: ModelGraph, plan: Plan, assignment: Assignment
) -> Schedule:
    """Cut these microbatches' backwards, the last stage's first: a subset of one stage needs that of the next."""
    form = form_of(schedule)
    cut = replace(form, num_parts={**form.num_parts, **num_parts})
    times = lane_times(schedule, graph=graph, plan=plan, assignment=assignment)
    starts = {event.action: event.start_seconds for lane in times for event in lane}
    ends = {event.action: event.end_seconds for lane in times for event in lane}
    replaced: dict[Action, list[Action]] = {}
    added: dict[int, list[Action]] = defaultdict(list)
    backwards = [action for action in starts if _is_cut(action, graph, num_parts)]
    for backward in sorted(backwards, key=lambda action: -action.stage):
        subsets = [backward._replace(part=part) for part in range(num_parts[_microbatch(backward)])]
        num_early = 0 if backward.kind is ActionKind.WEIGHT_GRADIENT else len(subsets) - 1
        replaced[backward] = subsets[num_early:]
        for part in replaced[backward]:
            starts[part], ends[part] = starts[backward], ends[backward]
        for part in subsets[:num_early]:
            starts[part] = max(ends[need] for need in dependencies(part, graph, plan, assignment, form=cut))
            ends[part] = starts[part] + unit_cost(backward, graph, plan)
            if starts[part] == starts[backward]:
                replaced[backward].insert(-1, part)
                continue
            for lane in plan.lanes_of_stage(part.unit, part.replica, part.stage):
                added[lane].append(part)
    lanes = (
        Lane(lane.ranks, tuple(new for action in lane.actions for new in replaced.get(action, [action])))
        for lane in schedule.lanes
    )
    return sort_lanes(Schedule(tuple(lanes)), starts.__getitem__, added)


_BACKWARDS = (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)


def _is_cut(action: Action, graph: ModelGraph, num_parts: dict[MicrobatchPlace, int]) -> bool:
    is_whole = action.kind in _BACKWARDS and action.part < 0
    return is_whole and graph.unit(action.unit).role is Role.ENCODER and _microbatch(action) in num_parts


def _microbatch(action: Action) -> MicrobatchPlace:
    return MicrobatchPlace(action.unit, action.replica, action.microbatch)
