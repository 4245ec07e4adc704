"""ZB-H1: 1F1B whose weight gradients wait for idle slots, within 1F1B's memory (Qi et al., Zero Bubble Pipeline Parallelism)."""

from multimodal.schedule.builders.one_f_one_b import forward_floors, forward_limits
from multimodal.schedule.list_schedule import Policy, StageKey, list_schedule
from multimodal.values.assignment import Assignment
from multimodal.values.backward_need import stage_backward_need
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Schedule


def build_zb_h1(graph: ModelGraph, plan: Plan, assignment: Assignment, *, forward_only: bool = False) -> Schedule:
    """Build the ZB-H1 schedule over the unit graph, in the compute dialect.

    Forwards and input gradients go as forwards and backwards do in 1F1B. A weight gradient runs when its lane would else be idle,
    or when the stage stores as many microbatches as it may. One unit of P stages is idle for (P - 1)(F + I - W) per lane.
    """
    limits = forward_limits(graph, plan, assignment, forward_only=forward_only)
    policy = Policy(
        forward_limits=limits,
        forward_floors=forward_floors(plan, limits),
        storage_limits=storage_limits(graph, plan, limits),
        splits_backwards=True,
        forwards_go_first=True,
    )
    return list_schedule(graph, plan, assignment, policy=policy, forward_only=forward_only)


def storage_limits(graph: ModelGraph, plan: Plan, limits: dict[StageKey, int]) -> dict[StageKey, int]:
    """Return how many microbatches each stage may store, given how many 1F1B lets it have in flight.

    As many as the fullest stage of its unit or of one upstream that has a backward: the memory of 1F1B's fullest lane.
    """
    fullest: dict[str, int] = {}
    for unit in graph.unit_names:
        own = [
            limit for stage, limit in limits.items() if stage[0] == unit and stage_backward_need(graph, plan, *stage).has_backward
        ]
        fullest[unit] = max([1, *own, *(fullest[source] for source in graph.upstream(unit))])
    return {stage: fullest[stage[0]] for stage in limits}
