"""How many microbatches a replica must have in flight for the units that consume its output to be full."""

from collections.abc import Mapping

from multimodal.schedule.list_schedule import StageKey
from multimodal.values.assignment import Assignment, MicrobatchPlace
from multimodal.values.backward_need import stage_backward_need
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan


def microbatch_spans(
    graph: ModelGraph, plan: Plan, assignment: Assignment, *, depths: Mapping[str, int], forward_only: bool = False
) -> dict[StageKey, int]:
    """Return, for each stage, how many microbatches the units downstream of it keep in flight there.

    `depths` says how many microbatches each unit has in flight in its first stage when it is alone; what it must keep for units
    downstream of it adds to that. A stage without a backward needs to be ahead of its consumers' next microbatch only.
    """
    spans: dict[StageKey, int] = {}
    for unit in reversed(graph.unit_names):
        targets = graph.downstream(unit)
        target_depth = max((depths[target] + spans[target, 0, 0] for target in targets), default=0)
        for replica in range(plan.units[unit].data_parallel_size):
            of_depth = {depth: _span(graph, assignment, unit, replica, depth) for depth in {1, target_depth}} if targets else {}
            for stage in range(plan.units[unit].num_virtual_stages):
                keeps = not forward_only and stage_backward_need(graph, plan, unit, replica, stage).has_backward
                spans[unit, replica, stage] = of_depth.get(target_depth if keeps else 1, 0)
    return spans


def _span(graph: ModelGraph, assignment: Assignment, unit: str, replica: int, depth: int) -> int:
    """Return the most microbatches of an encoder replica that any `depth` consecutive microbatches of the LLM span.

    While the LLM's replicas work on microbatches k .. k + depth - 1, this replica must have run (in order) every microbatch up
    to the last one that those need, and can have given back those whose last consumer comes before k.
    """
    routes = assignment.routes(graph)
    consumers = [
        [route.target.microbatch for route in routes.from_source.get(MicrobatchPlace(unit, replica, microbatch), ())]
        for microbatch in range(assignment.num_microbatches(unit, replica))
    ]
    num_steps = max((max(steps) for steps in consumers if steps), default=-1) + 1
    last_needed_at, num_done_at = [0] * (num_steps + 1), [0] * (num_steps + 1)
    for microbatch, steps in enumerate(consumers):
        if steps:
            last_needed_at[min(steps)] = microbatch + 1
            num_done_at[max(steps)] += 1
    span, num_done = 0, 0
    num_started = max(last_needed_at[: depth - 1], default=0)
    for step in range(num_steps):
        num_started = max(num_started, last_needed_at[min(step + depth - 1, num_steps)])
        span = max(span, num_started - num_done)
        num_done += num_done_at[step]
    return span
