"""DIP: colocated units one after another: encoder forwards, then the LLM, then encoder backwards (Entrain, figure 4.2c)."""

from multimodal.schedule.builders.one_f_one_b import forward_floors, forward_limits
from multimodal.schedule.list_schedule import Policy, list_schedule
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph, Role
from multimodal.values.plan import Plan
from multimodal.values.schedule import Action, ActionKind, Schedule


def build_dip(graph: ModelGraph, plan: Plan, assignment: Assignment, *, forward_only: bool = False) -> Schedule:
    """Build the DIP schedule, in the compute dialect.

    Every lane ends the forwards of all encoders in it, then runs the 1F1B of the LLM (and of what follows it), then the encoders'
    backwards. Modalities never wait for each other inside a phase, but all of an encoder's activations are kept over the LLM's
    phase. Meant for plans whose encoders share the LLM's lanes; an encoder on lanes of its own just runs as in GPipe.
    """
    encoders = frozenset(unit.name for unit in graph.units if unit.role is Role.ENCODER)

    def phase(action: Action) -> int:
        if action.unit not in encoders:
            return 1
        return 0 if action.kind is ActionKind.FORWARD else 2

    limits = forward_limits(graph, plan, assignment, forward_only=forward_only)
    limits = {stage: limit for stage, limit in limits.items() if stage[0] not in encoders}
    return list_schedule(
        graph,
        plan,
        assignment,
        policy=Policy(forward_limits=limits, forward_floors=forward_floors(plan, limits), phase=phase),
        forward_only=forward_only,
    )
