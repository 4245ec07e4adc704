"""1F1B over the unit graph: one forward, one backward, and no more activations in flight than keep the pipeline full."""

from collections.abc import Mapping

from multimodal.schedule.list_schedule import Policy, list_schedule
from multimodal.values.assignment import MicrobatchPlace
from multimodal.values.plan import Plan
from multimodal.values.schedule import Schedule
from multimodal.values.step_graph import StageKey, StepGraph


def build_one_f_one_b(step: StepGraph) -> Schedule:
    """Build the 1F1B schedule over the unit graph, in the compute dialect.

    Encoder and LLM stages form one pipeline. For a single unit this is textbook 1F1B (PipeDream-flush): stage s of P runs
    P - s - 1 forwards, then forwards and backwards in turn, then the remaining backwards, whatever they take: a stage that is
    frozen or slow keeps the same order. `StepGraph.forward_only` leaves backwards and reductions out (evaluation).
    """
    limits = forward_limits(step)
    return list_schedule(step, Policy(forward_limits=limits, forward_floors=forward_floors(step.plan, limits)))


def forward_limits(step: StepGraph) -> dict[StageKey, int]:
    """Return how many microbatches each stage may have in flight.

    Stage s of the P stages of the LLM: P - s. Stage s of the S stages of an encoder: S - s, plus as many of this replica's
    microbatches as the LLM's first stages span at any moment when each is as full as it may be. With one encoder microbatch
    per LLM microbatch that is the limit of one pipeline of S + P stages. A stage without a backward needs to be ahead of its
    consumer only; its limit shapes a lane that it shares with other stages (alone in a lane, there is nothing to order).
    """
    depths = {unit: step.plan.units[unit].num_virtual_stages for unit in step.graph.unit_names}
    spans = microbatch_spans(step, depths=depths)
    return {(unit, replica, stage): depths[unit] - stage + span for (unit, replica, stage), span in spans.items()}


def forward_floors(plan: Plan, limits: Mapping[StageKey, int]) -> Mapping[StageKey, int]:
    """Return how many microbatches a stage has in flight before each of its backwards, while it has forwards left.

    As many as it may: then the order does not depend on what frozen, slow or starved stages do to the builder's clock. Where
    every lane holds all stages of its replica of every unit there is no pipeline to keep full, and none must be in flight.
    """
    replicas = [replica for unit in plan.units.values() for replica in unit.replicas]
    is_pipeline = any(len({plan.lane_of_rank[rank] for rank in replica.ranks}) > 1 for replica in replicas)
    holders = [{plan.lane_of_rank[rank] for replica in unit.replicas for rank in replica.ranks} for unit in plan.units.values()]
    return limits if is_pipeline or any(lanes != holders[0] for lanes in holders) else {}


def microbatch_spans(step: StepGraph, *, depths: Mapping[str, int]) -> dict[StageKey, int]:
    """Return, for each stage, how many microbatches the units downstream of it keep in flight there.

    depths: microbatches that each unit has in flight in its first stage when it is alone; those that it must keep for units
    downstream of it are added. A stage without a backward needs to be ahead of its consumers' next microbatch only.
    """
    spans: dict[StageKey, int] = {}
    for unit in reversed(step.graph.unit_names):
        targets = step.graph.downstream(unit)
        target_depth = max((depths[target] + spans[target, 0, 0] for target in targets), default=0)
        for replica in range(step.plan.units[unit].data_parallel_size):
            of_depth = {depth: _span(step, unit, replica, depth) for depth in {1, target_depth}} if targets else {}
            for stage in range(step.plan.units[unit].num_virtual_stages):
                keeps = step.backward_need(unit, replica, stage).has_backward
                spans[unit, replica, stage] = of_depth.get(target_depth if keeps else 1, 0)
    return spans


def _span(step: StepGraph, unit: str, replica: int, depth: int) -> int:
    """Return the most microbatches of an encoder replica that any `depth` consecutive microbatches of the LLM span.

    While the LLM's replicas work on microbatches k .. k + depth - 1, this replica must have run (in order) every microbatch up
    to the last one that those need, and can have given back those whose last consumer comes before k.
    """
    consumers = [
        [route.target.microbatch for route in step.routes.from_source.get(MicrobatchPlace(unit, replica, microbatch), ())]
        for microbatch in range(step.num_microbatches(unit, replica))
    ]
    num_steps = max((max(steps) for steps in consumers if steps), default=-1) + 1
    last_needed_at, num_done_at = [0] * (num_steps + 1), [0] * (num_steps + 1)
    for microbatch, steps in enumerate(consumers):
        if steps:
            last_needed_at[min(steps)] = microbatch + 1
            num_done_at[max(steps)] += 1
    span, num_done = 0, 0
    num_started = max(last_needed_at[: depth - 1], default=0)
    for index in range(num_steps):
        num_started = max(num_started, last_needed_at[min(index + depth - 1, num_steps)])
        span = max(span, num_started - num_done)
        num_done += num_done_at[index]
    return span
