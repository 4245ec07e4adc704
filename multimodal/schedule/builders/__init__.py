"""Builders: from Plan and Assignment to a schedule in the compute dialect, one file each."""

from collections.abc import Mapping
from typing import Protocol

from multimodal.schedule.builders.gpipe import build_gpipe
from multimodal.schedule.builders.one_f_one_b import build_one_f_one_b
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Schedule


class Builder(Protocol):
    """What every builder looks like."""

    def __call__(self, graph: ModelGraph, plan: Plan, assignment: Assignment, *, forward_only: bool = False) -> Schedule:
        """Build a schedule in the compute dialect."""


BUILDERS: Mapping[str, Builder] = {"gpipe": build_gpipe, "1f1b": build_one_f_one_b}
"""Every builder by the name that selects it."""
