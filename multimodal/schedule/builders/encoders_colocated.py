"""Encoders-colocated: all encoders fused into the same stages, one after another (Megatron-LM; Cornstarch, section 2)."""

from itertools import product

from multimodal.schedule.builders.one_f_one_b import forward_floors, forward_limits
from multimodal.schedule.list_schedule import Policy, list_schedule
from multimodal.values.action import Action, ActionKind
from multimodal.values.arrays.rows import integers
from multimodal.values.errors import ScheduleError
from multimodal.values.schedule import Schedule
from multimodal.values.shape import StepShape
from multimodal.values.work.step_work import step_work


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
    for unit in encoders[1:]:
        first, other = (
            [[list(stage.ranks) for stage in replica.virtual_stages] for replica in shape.plan.units[name].replicas]
            for name in (encoders[0], unit)
        )
        if other != first:
            raise ScheduleError(
                f"encoders-colocated needs all encoders in the same stages of the same ranks, found {first} for "
                f"'{encoders[0]}' and {other} for '{unit}' (replica by replica); give '{unit}' the ranks of "
                f"'{encoders[0]}' in the plan, or choose 1f1b"
            )
    existing = step_work(shape).computed_numbers
    replicas = range(shape.plan.units[encoders[0]].data_parallel_size) if encoders else ()
    counts = [max(shape.num_microbatches(unit, replica) for unit in encoders) for replica in replicas]
    places = [(replica, microbatch) for replica, count in enumerate(counts) for microbatch in range(count)]
    chains: list[list[list[Action]]] = []
    """The stages that each microbatch passes, in order; in each, its actions of all encoders."""
    for kind, (replica, microbatch) in product((ActionKind.FORWARD, ActionKind.BACKWARD), places):
        way = 1 if kind is ActionKind.FORWARD else -1  # a backward retraces the forward
        chain = []
        for stage in range(shape.plan.units[encoders[0]].num_stages_of(replica))[::way]:
            fused = [Action(kind, unit, replica, stage, microbatch) for unit in encoders[::way]]
            chain.append([action for action in fused if action in existing])
        chains.append([fused for fused in chain if fused])
    orders = [[action for fused in chain for action in fused] for chain in chains]
    # Every consumer of one encoder waits for the whole fused module, and the module's backward for every consumer.
    for chain in filter(None, chains):
        is_forward = chain[0][0].kind is ActionKind.FORWARD
        fused = chain[-1] if is_forward else chain[0]
        for action in fused:
            for target in shape.routes.targets_of.get(action.microbatch_place, ()):
                consumer = Action(action.kind, target.unit, target.replica, 0, target.microbatch)
                if consumer in existing:
                    orders.append([fused[-1], consumer] if is_forward else [consumer, fused[0]])
    limits, ordered = forward_limits(shape), [integers(map(existing.__getitem__, order)) for order in orders]
    urgent = frozenset(action for chain in chains for fused in chain for action in fused[1:])
    return list_schedule(shape, Policy(limits, forward_floors(shape.plan, limits), orders=ordered, urgent=urgent))
