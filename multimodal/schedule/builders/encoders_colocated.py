"""Encoders-colocated: all encoders fused into the same stages, one after another (Megatron-LM; Cornstarch, section 2)."""

from collections.abc import Iterator

from multimodal.schedule.builders.one_f_one_b import forward_floors, forward_limits
from multimodal.schedule.list_schedule import Policy, list_schedule
from multimodal.values.action import Action, ActionKind
from multimodal.values.arrays.rows import integers
from multimodal.values.errors import ScheduleError
from multimodal.values.plan import Plan
from multimodal.values.schedule import Schedule
from multimodal.values.shape import StepShape
from multimodal.values.work.step_work import step_work

_Fused = tuple[Action, ...]
"""The same microbatch of all encoders in one stage."""


def build_encoders_colocated(shape: StepShape) -> Schedule:
    """Build 1F1B over one chain in which all encoders act as one module, in the compute dialect.

    Microbatch i of every encoder runs in a stage in one go, encoder after encoder, before any of them continues in the next
    stage: a dependency that the model does not have, and the reason why modality parallelism (`1f1b` on disjoint ranks) is
    faster. A schedule holds only orders inside lanes, so when it runs, only these orders remain of the dependency.

    Raises ScheduleError if an encoder feeds another one, or the encoders do not share all their stages.
    """
    encoders = [unit.name for unit in shape.graph.encoders]
    if fed := [name for name in encoders if shape.graph.upstream(name)]:
        raise ScheduleError(
            f"encoders-colocated runs encoders as one, and {', '.join(fed)} takes what other encoders give; choose 1f1b"
        )
    _check_layout(encoders, shape.plan)
    work = step_work(shape)
    existing = frozenset(work.computed)
    chains = [
        [fused for fused in chain if fused]
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)
        for chain in _chains(kind, encoders, shape, existing)
    ]
    orders = (
        *(tuple(action for fused in chain for action in fused) for chain in chains),
        *_orders_of_consumers(chains, shape, existing),
    )
    limits = forward_limits(shape)
    policy = Policy(
        forward_limits=limits,
        forward_floors=forward_floors(shape.plan, limits),
        orders=[integers(map(work.computed_numbers.__getitem__, order)) for order in orders],
        urgent=frozenset(action for chain in chains for fused in chain for action in fused[1:]),
    )
    return list_schedule(shape, policy)


def _check_layout(encoders: list[str], plan: Plan) -> None:
    def ranks(unit: str) -> list[list[list[int]]]:
        return [[list(stage.ranks) for stage in replica.virtual_stages] for replica in plan.units[unit].replicas]

    for unit in encoders[1:]:
        if ranks(unit) != ranks(encoders[0]):
            raise ScheduleError(
                f"encoders-colocated needs all encoders in the same stages of the same ranks, found {ranks(encoders[0])} for "
                f"'{encoders[0]}' and {ranks(unit)} for '{unit}' (replica by replica); give '{unit}' the ranks of "
                f"'{encoders[0]}' in the plan, or choose 1f1b"
            )


def _chains(kind: ActionKind, encoders: list[str], shape: StepShape, existing: frozenset[Action]) -> Iterator[list[_Fused]]:
    """Yield, per replica and microbatch, the fused stages in the order in which they run; a backward retraces the forward."""
    unit = shape.plan.units[encoders[0]] if encoders else None
    for replica in range(unit.data_parallel_size if unit else 0):
        for microbatch in range(max(shape.num_microbatches(encoder, replica) for encoder in encoders)):
            stages = range(unit.num_stages_of(replica) if unit else 0)
            chain = [tuple(Action(kind, encoder, replica, stage, microbatch) for encoder in encoders) for stage in stages]
            if kind is ActionKind.BACKWARD:
                chain = [fused[::-1] for fused in chain[::-1]]
            yield [tuple(action for action in fused if action in existing) for fused in chain]


def _orders_of_consumers(
    chains: list[list[_Fused]], shape: StepShape, existing: frozenset[Action]
) -> Iterator[tuple[Action, Action]]:
    """Let every consumer of one encoder wait for the whole fused module, and the module's backward for every consumer."""
    targets = shape.routes.targets_of
    for chain in (chain for chain in chains if chain):
        is_forward = chain[0][0].kind is ActionKind.FORWARD
        fused = chain[-1] if is_forward else chain[0]
        for action in fused:
            for target in targets.get(action.microbatch_place, ()):
                consumer = Action(action.kind, target.unit, target.replica, 0, target.microbatch)
                if consumer in existing:
                    yield (fused[-1], consumer) if is_forward else (consumer, fused[0])
