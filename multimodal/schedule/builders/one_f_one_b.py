"""1F1B over the unit graph: one forward, one backward, and no more activations in flight than keep the pipeline full."""

from collections.abc import Mapping

from multimodal.schedule.builders.microbatch_span import microbatch_spans
from multimodal.schedule.list_schedule import Policy, StageKey, list_schedule
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Schedule


def build_one_f_one_b(graph: ModelGraph, plan: Plan, assignment: Assignment, *, forward_only: bool = False) -> Schedule:
    """Build the 1F1B schedule over the unit graph, in the compute dialect.

    Encoder and LLM stages form one pipeline. For a single unit this is textbook 1F1B (PipeDream-flush): stage s of P runs
    P - s - 1 forwards, then forwards and backwards in turn, then the remaining backwards, whatever they take: a stage that is
    frozen or slow keeps the same order. `forward_only` leaves backwards and reductions out (evaluation).
    """
    limits = forward_limits(graph, plan, assignment, forward_only=forward_only)
    return list_schedule(
        graph,
        plan,
        assignment,
        policy=Policy(forward_limits=limits, forward_floors=forward_floors(plan, limits)),
        forward_only=forward_only,
    )


def forward_limits(graph: ModelGraph, plan: Plan, assignment: Assignment, *, forward_only: bool = False) -> dict[StageKey, int]:
    """Return how many microbatches each stage may have in flight.

    Stage s of the P stages of the LLM: P - s. Stage s of the S stages of an encoder: S - s, plus as many of this replica's
    microbatches as the LLM's first stages span at any moment when each is as full as it may be. With one encoder microbatch
    per LLM microbatch that is the limit of one pipeline of S + P stages. A stage without a backward needs to be ahead of its
    consumer only; its limit shapes a lane that it shares with other stages (alone in a lane, there is nothing to order).
    """
    depths = {unit: plan.units[unit].num_virtual_stages for unit in graph.unit_names}
    spans = microbatch_spans(graph, plan, assignment, depths=depths, forward_only=forward_only)
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
