"""Every action that a step consists of, whatever the order: what builders place and what the validator expects."""

from multimodal.schedule.dependencies import dependencies, message, needs_message
from multimodal.values.assignment import Assignment, MicrobatchPlace
from multimodal.values.backward_need import BackwardNeed, layers_backward_need
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Action, ActionKind
from multimodal.values.schedule_form import PLAIN, ScheduleForm

_new = tuple.__new__
"""Makes an action of its fields five times as fast as its constructor: a step has actions by the ten thousand."""


def compute_actions(
    graph: ModelGraph, plan: Plan, assignment: Assignment, *, forward_only: bool = False, form: ScheduleForm = PLAIN
) -> tuple[Action, ...]:
    """Return every action of the compute dialect once, ordered by unit, stage, replica, then kind and microbatch.

    A stage has backwards where `stage_backward_need` says so, and reduces gradients where it trains something, even on a
    replica without microbatches (the reduction is collective). Where `form` splits a backward, its two halves take its place: a
    stage that trains nothing has no weight gradient. `forward_only` leaves the forwards alone.
    """
    found: list[Action] = []
    for unit in graph.unit_names:
        for stage in range(plan.units[unit].num_virtual_stages):
            need_of: dict[range, BackwardNeed] = {}
            for replica in range(plan.units[unit].data_parallel_size):
                layers = plan.virtual_stage(unit, replica, stage).layers
                if layers not in need_of:
                    need_of[layers] = BackwardNeed.NONE if forward_only else layers_backward_need(graph, unit, layers)
                need = need_of[layers]
                microbatches = range(assignment.num_microbatches(unit, replica))
                found += _whole(ActionKind.FORWARD, unit, replica, stage, microbatches)
                if need.has_backward:
                    found += _backwards(unit, replica, stage, microbatches, need, form)
                if need.trains_weights and form.gathers_parameters:
                    found.append(Action(ActionKind.GATHER_PARAMETERS, unit, replica, stage))
                if need.trains_weights:
                    parts = form.reduction_parts(unit, stage)
                    found += [Action(ActionKind.REDUCE_GRADIENTS, unit, replica, stage, part=part) for part in parts]
    return tuple(found)


def collective_actions(graph: ModelGraph, plan: Plan, *, form: ScheduleForm = PLAIN) -> tuple[Action, ...]:
    """Return the gathers and reductions of `compute_actions`, which are the same whatever the microbatches."""
    nothing = Assignment({unit: ((),) * plan.units[unit].data_parallel_size for unit in graph.unit_names})
    return compute_actions(graph, plan, nothing, form=form)


def _whole(kind: ActionKind, unit: str, replica: int, stage: int, microbatches: range) -> list[Action]:
    return [_new(Action, (kind, unit, replica, stage, microbatch, None, -1)) for microbatch in microbatches]


def _backwards(unit: str, replica: int, stage: int, microbatches: range, need: BackwardNeed, form: ScheduleForm) -> list[Action]:
    if not form.split and not form.num_parts:
        return _whole(ActionKind.BACKWARD, unit, replica, stage, microbatches)
    whole = (ActionKind.BACKWARD,)
    halves = (ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT) if need.trains_weights else (ActionKind.INPUT_GRADIENT,)
    return [
        _new(Action, (kind, unit, replica, stage, microbatch, None, part))
        for microbatch in microbatches
        for part in form.parts(MicrobatchPlace(unit, replica, microbatch))
        for kind in (halves if (unit, replica, stage, microbatch) in form.split else whole)
    ]


def expected_actions(
    graph: ModelGraph,
    plan: Plan,
    assignment: Assignment,
    *,
    lowered: bool,
    forward_only: bool = False,
    form: ScheduleForm = PLAIN,
) -> tuple[Action, ...]:
    """Return every action of a schedule in the given dialect once; each appears in all lanes of its stage."""
    computed = compute_actions(graph, plan, assignment, forward_only=forward_only, form=form)
    if not lowered:
        return computed
    messages = [
        part
        for consumer in computed
        for producer in dependencies(consumer, graph, plan, assignment, form=form)
        if needs_message(producer, consumer, plan)
        for part in message(producer, consumer)
    ]
    return (*computed, *messages)
