"""Every action that a step consists of, whatever the order: what builders place and what the validator expects."""

from multimodal.schedule.dependencies import dependencies, message, needs_message, repeated
from multimodal.schedule.repeated_work import repeated_places
from multimodal.values.assignment import Assignment, MicrobatchPlace
from multimodal.values.backward_need import BackwardNeed, stage_backward_need
from multimodal.values.model_graph import ModelGraph, Role
from multimodal.values.plan import Plan
from multimodal.values.schedule import REPEATED_KINDS, Action, ActionKind, Place
from multimodal.values.schedule_form import PLAIN, ScheduleForm


def compute_actions(
    graph: ModelGraph, plan: Plan, assignment: Assignment, *, forward_only: bool = False, form: ScheduleForm = PLAIN
) -> tuple[Action, ...]:
    """Return every action of the compute dialect once, ordered by unit, stage, replica, then kind and microbatch.

    A stage has backwards where `stage_backward_need` says so, and reduces gradients where it trains something, even on a
    replica without microbatches (the reduction is collective). Where `form` splits a backward, its two halves take its place: a
    stage that trains nothing has no weight gradient. Where it replicates encoders, copies repeat what others do. `forward_only`
    leaves the forwards alone.
    """
    found: list[Action] = []
    for unit in graph.unit_names:
        for stage in range(plan.units[unit].num_virtual_stages):
            for replica in range(plan.units[unit].data_parallel_size):
                need = BackwardNeed.NONE if forward_only else stage_backward_need(graph, plan, unit, replica, stage)
                microbatches = range(assignment.num_microbatches(unit, replica))
                found += [Action(ActionKind.FORWARD, unit, replica, stage, microbatch) for microbatch in microbatches]
                if need.has_backward:
                    for microbatch in microbatches:
                        found += _backwards(MicrobatchPlace(unit, replica, microbatch), stage, need, form)
                if form.repeats_encoders and graph.unit(unit).role is Role.ENCODER:
                    kinds = REPEATED_KINDS if need.has_backward else (ActionKind.REPEATED_FORWARD,)
                    originals = repeated_places(unit, replica, graph=graph, plan=plan, assignment=assignment)
                    found += [repeated(kind, original, replica) for original in originals for kind in kinds]
                if need.trains_weights and form.gathers_parameters:
                    found.append(Action(ActionKind.GATHER_PARAMETERS, unit, replica, stage))
                if need.trains_weights:
                    parts = form.reduction_parts(unit, stage)
                    found += [Action(ActionKind.REDUCE_GRADIENTS, unit, replica, stage, part=part) for part in parts]
    return tuple(found)


def _backwards(microbatch: MicrobatchPlace, stage: int, need: BackwardNeed, form: ScheduleForm) -> list[Action]:
    place = Place(microbatch.unit, microbatch.replica, stage, microbatch.microbatch)
    kinds = [ActionKind.BACKWARD]
    if place in form.split:
        kinds = [ActionKind.INPUT_GRADIENT, *([ActionKind.WEIGHT_GRADIENT] if need.trains_weights else [])]
    return [Action(kind, *place, part=part) for part in form.parts(microbatch) for kind in kinds]


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
