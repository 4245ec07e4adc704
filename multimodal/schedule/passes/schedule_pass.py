"""What a pass is."""

from typing import Protocol

from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Schedule


class Pass(Protocol):
    """What every pass over the compute dialect looks like."""

    def __call__(self, schedule: Schedule, *, graph: ModelGraph, plan: Plan, assignment: Assignment) -> Schedule:
        """Rewrite a schedule of the compute dialect."""
