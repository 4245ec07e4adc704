"""ZB-H1: weight gradients of 1F1B move into idle slots, within 1F1B's memory (Qi et al., Zero Bubble Pipeline Parallelism)."""

from collections.abc import Callable

from multimodal.cost.step_costs import StepCosts
from multimodal.schedule.builders.one_f_one_b import forward_floors, forward_limits
from multimodal.schedule.builders.room_ahead import build_within_memory
from multimodal.schedule.list_schedule import Policy, list_schedule, split_all
from multimodal.values.parts.cuts import StageKey
from multimodal.values.schedule import Schedule
from multimodal.values.shape import StepShape


def build_zb_h1(shape: StepShape) -> Schedule:
    """Build the ZB-H1 schedule over the unit graph, in the compute dialect.

    Forwards and input gradients run in the order of forwards and backwards in 1F1B. A weight gradient runs when its lane would
    otherwise be idle, or when the stage stores as many microbatches as it may. One unit of P stages is idle for (P - 1)(F + I -
    W) per lane.
    """
    limits = forward_limits(shape)
    policy = Policy(
        forward_limits=limits,
        forward_floors=forward_floors(shape.plan, limits),
        storage_limits=storage_limits(shape, limits),
        forwards_go_first=True,
    )
    return list_schedule(split_all(shape), policy)


def build_zb_h1_in_memory(shape: StepShape, *, costs: StepCosts) -> Schedule:
    """Build ZB-H1 with forwards that run ahead as far as the memory of each lane allows, in the compute dialect.

    If memory allows, a stage stores more microbatches between forward and weight gradient than in ZB-H1, and runs a forward
    whenever no input gradient is ready. This serves assignments that make some input gradients late (Entrain 4.5.3), and with
    enough memory it removes a part of ZB-H1's bubble (ZB-H2 of the same paper). Of several depths, including ZB-H1's order, the
    one with the shortest step is taken (`build_within_memory`).
    """
    limits = forward_limits(shape)
    stored = storage_limits(shape, limits)
    floors = forward_floors(shape.plan, limits)

    def build(scaled: Callable[[StageKey, int], int]) -> Schedule:
        policy = Policy(
            forward_limits={stage: scaled(stage, limit) for stage, limit in limits.items()},
            forward_floors=floors,
            storage_limits={stage: scaled(stage, limit) for stage, limit in stored.items()},
            forwards_go_first=all(scaled(stage, limit) == limit for stage, limit in limits.items()),
        )
        return list_schedule(split_all(shape), policy)

    return build_within_memory(shape, stored, costs=costs, build=build)


def storage_limits(shape: StepShape, limits: dict[StageKey, int]) -> dict[StageKey, int]:
    """Return the number of microbatches that each stage may store, given the number that 1F1B lets it have in flight.

    It is that of the fullest stage with a backward in its unit or an upstream one: the memory of 1F1B's fullest lane.
    """
    fullest: dict[str, int] = {}
    for unit in shape.graph.unit_names:
        own = [limit for stage, limit in limits.items() if stage[0] == unit and shape.backward_need(*stage).has_backward]
        fullest[unit] = max([1, *own, *(fullest[source] for source in shape.graph.upstream(unit))])
    return {stage: fullest[stage[0]] for stage in limits}
