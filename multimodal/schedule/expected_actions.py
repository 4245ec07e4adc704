"""Every action that a step consists of, whatever the order: what builders place and what the validator expects."""

from multimodal.schedule.dependencies import dependencies, message, needs_message
from multimodal.values.assignment import Assignment
from multimodal.values.backward_need import BackwardNeed, stage_backward_need
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Action, ActionKind


def compute_actions(graph: ModelGraph, plan: Plan, assignment: Assignment, *, forward_only: bool = False) -> tuple[Action, ...]:
    """Return every action of the compute dialect once, ordered by unit, stage, replica, then kind and microbatch.

    A stage has backwards where `stage_backward_need` says so, and reduces gradients where it trains something, even on a
    replica without microbatches (the reduction is collective). `forward_only` leaves the forwards alone.
    """
    found: list[Action] = []
    for unit in graph.unit_names:
        for stage in range(plan.units[unit].num_virtual_stages):
            for replica in range(plan.units[unit].data_parallel_size):
                need = BackwardNeed.NONE if forward_only else stage_backward_need(graph, plan, unit, replica, stage)
                kinds = [ActionKind.FORWARD, *([ActionKind.BACKWARD] if need.has_backward else [])]
                microbatches = range(assignment.num_microbatches(unit, replica))
                found += [Action(kind, unit, replica, stage, microbatch) for kind in kinds for microbatch in microbatches]
                if need in (BackwardNeed.FULL, BackwardNeed.WEIGHT_GRADIENT):
                    found.append(Action(ActionKind.REDUCE_GRADIENTS, unit, replica, stage))
    return tuple(found)


def expected_actions(
    graph: ModelGraph, plan: Plan, assignment: Assignment, *, lowered: bool, forward_only: bool = False
) -> tuple[Action, ...]:
    """Return every action of a schedule in the given dialect once; each appears in all lanes of its stage."""
    computed = compute_actions(graph, plan, assignment, forward_only=forward_only)
    if not lowered:
        return computed
    messages = [
        part
        for consumer in computed
        for producer in dependencies(consumer, graph, plan, assignment)
        if needs_message(producer, consumer, plan)
        for part in message(producer, consumer)
    ]
    return (*computed, *messages)
