"""ZB-H1: 1F1B whose weight gradients wait for idle slots, within 1F1B's memory (Qi et al., Zero Bubble Pipeline Parallelism)."""

from multimodal.schedule.builders.one_f_one_b import forward_floors, forward_limits
from multimodal.schedule.list_schedule import Policy, list_schedule, split_all
from multimodal.values.schedule import Schedule
from multimodal.values.step_graph import StageKey, StepGraph


def build_zb_h1(step: StepGraph) -> Schedule:
    """Build the ZB-H1 schedule over the unit graph, in the compute dialect.

    Forwards and input gradients go as forwards and backwards do in 1F1B. A weight gradient runs when its lane would else be idle,
    or when the stage stores as many microbatches as it may. One unit of P stages is idle for (P - 1)(F + I - W) per lane.
    """
    limits = forward_limits(step)
    policy = Policy(
        forward_limits=limits,
        forward_floors=forward_floors(step.plan, limits),
        storage_limits=storage_limits(step, limits),
        forwards_go_first=True,
    )
    return list_schedule(split_all(step), policy)


def storage_limits(step: StepGraph, limits: dict[StageKey, int]) -> dict[StageKey, int]:
    """Return how many microbatches each stage may store, given how many 1F1B lets it have in flight.

    As many as the fullest stage of its unit or of one upstream that has a backward: the memory of 1F1B's fullest lane.
    """
    fullest: dict[str, int] = {}
    for unit in step.graph.unit_names:
        own = [limit for stage, limit in limits.items() if stage[0] == unit and step.backward_need(*stage).has_backward]
        fullest[unit] = max([1, *own, *(fullest[source] for source in step.graph.upstream(unit))])
    return {stage: fullest[stage[0]] for stage in limits}
