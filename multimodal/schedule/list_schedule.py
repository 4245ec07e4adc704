"""The engine of the builders: a deterministic list scheduler on a discrete clock."""

from multimodal.kernels import kernels
from multimodal.schedule.list_schedule_reference import list_schedule_reference
from multimodal.schedule.listed_actions import list_actions
from multimodal.schedule.place_reductions import place_reductions
from multimodal.schedule.policy import Policy, StageKey
from multimodal.schedule.split_form import split_form
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Action, Lane, Schedule

__all__ = ["Policy", "StageKey", "list_schedule", "split_form"]


def list_schedule(
    graph: ModelGraph, plan: Plan, assignment: Assignment, *, policy: Policy, forward_only: bool = False
) -> Schedule:
    """Build a compute-dialect schedule by letting every lane always take its most urgent ready action.

    An action is ready when its dependencies are done; forwards of one stage go in microbatch order. Backwards are more urgent
    than forwards (or the other way round, see `Policy`), both more than weight gradients, which so fill what would be idle; then
    downstream units come before upstream ones, then lower microbatches. An action of several lanes starts when it is the most
    urgent one in all of them: the order is the same everywhere, so the lanes never wait for each other in a circle.

    A microbatch is in flight in a stage from its forward to its backward (or input gradient) or, where there is none, to its
    consumers' forwards; it is stored until its weight gradient. A forward beyond its stage's limits waits, and so does a backward
    below its stage's floor: with floor and limit alike a stage alternates strictly, whatever the clock says. When nothing else is
    left to do, the earliest such backward, or else forward, is admitted all the same, so every assignment finishes. Gradients are
    reduced where `place_reductions` puts that.

    Runs as a C++ kernel where that is built, with the same result. O((actions + dependencies) log actions).
    """
    if kernels is None:
        order = list_schedule_reference(graph, plan, assignment, policy=policy, forward_only=forward_only)
    else:
        order = _list_schedule(graph, plan, assignment, policy, forward_only)
    schedule = Schedule(tuple(Lane(ranks, tuple(actions)) for ranks, actions in zip(plan.lanes, order, strict=True)))
    return schedule if forward_only else place_reductions(schedule, graph=graph, plan=plan, assignment=assignment)


def _list_schedule(
    graph: ModelGraph, plan: Plan, assignment: Assignment, policy: Policy, forward_only: bool
) -> list[list[Action]]:
    listed = list_actions(graph, plan, assignment, policy=policy, forward_only=forward_only)
    order = kernels.list_schedule(**listed.arrays, num_lanes=len(plan.lanes))
    assert sum(map(len, order)) == len(listed.arrays["lanes"]), "the policy's orders contradict the dependencies"
    return [[listed.actions[index] for index in lane] for lane in order]
