"""1F1B over the unit graph: one forward, one backward, and no more activations in flight than keep the pipeline full."""

from multimodal.schedule.list_schedule import Policy, StageKey, list_schedule
from multimodal.values.assignment import Assignment, MicrobatchPlace
from multimodal.values.backward_need import stage_backward_need
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Schedule


def build_one_f_one_b(graph: ModelGraph, plan: Plan, assignment: Assignment, *, forward_only: bool = False) -> Schedule:
    """Build the 1F1B schedule over the unit graph, in the compute dialect.

    Encoder and LLM stages form one pipeline. For a single unit this is textbook 1F1B (PipeDream-flush): stage s of P runs
    P - s - 1 forwards, then forwards and backwards in turn, then the remaining backwards. `forward_only` leaves backwards and
    reductions out (evaluation).
    """
    limits = forward_limits(graph, plan, assignment, forward_only=forward_only)
    return list_schedule(graph, plan, assignment, policy=Policy(forward_limits=limits), forward_only=forward_only)


def forward_limits(graph: ModelGraph, plan: Plan, assignment: Assignment, *, forward_only: bool = False) -> dict[StageKey, int]:
    """Return how many microbatches each stage may have in flight.

    Stage s of the P stages of the LLM: P - s. Stage s of the S stages of an encoder: S - s, plus as many of this replica's
    microbatches as the LLM's first stages span at any moment when each is as full as it may be. With one encoder microbatch
    per LLM microbatch that is the limit of one pipeline of S + P stages. A stage without a backward needs to be ahead of its
    consumer only; its limit shapes a lane that it shares with other stages (alone in a lane, there is nothing to order).
    """
    limits: dict[StageKey, int] = {}
    for unit in reversed(graph.unit_names):
        num_stages = plan.units[unit].num_virtual_stages
        targets = graph.downstream(unit)
        target_depth = max((limits[target, 0, 0] for target in targets), default=0)
        for replica in range(plan.units[unit].data_parallel_size):
            spans = {depth: _span(graph, assignment, unit, replica, depth) for depth in {1, target_depth}} if targets else {}
            for stage in range(num_stages):
                keeps = not forward_only and stage_backward_need(graph, plan, unit, replica, stage).has_backward
                depth = target_depth if keeps else 1
                limits[unit, replica, stage] = num_stages - stage + spans.get(depth, 0)
    return limits


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
