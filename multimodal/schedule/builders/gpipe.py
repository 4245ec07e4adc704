"""GPipe: every lane runs all its forwards, then all its backwards."""

from multimodal.schedule.list_schedule import Policy, list_schedule
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Action, ActionKind, Schedule


def build_gpipe(graph: ModelGraph, plan: Plan, assignment: Assignment, *, forward_only: bool = False) -> Schedule:
    """Build the GPipe schedule over the unit graph, in the compute dialect.

    The simplest schedule and the baseline of all: it keeps the activations of every microbatch at once. `forward_only` leaves
    backwards and reductions out (evaluation).
    """
    return list_schedule(graph, plan, assignment, policy=Policy(phase=_phase), forward_only=forward_only)


def _phase(action: Action) -> int:
    return 0 if action.kind is ActionKind.FORWARD else 1
