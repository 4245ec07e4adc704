"""Builders: from Plan and Assignment to a schedule in the compute dialect, one file each."""

from collections.abc import Mapping
from functools import partial
from typing import Protocol

from multimodal.schedule.builders.breadth_first import build_breadth_first
from multimodal.schedule.builders.dip import build_dip
from multimodal.schedule.builders.eager_1f1b import build_eager_1f1b
from multimodal.schedule.builders.encoders_colocated import build_encoders_colocated
from multimodal.schedule.builders.encoders_replicated import build_encoders_replicated
from multimodal.schedule.builders.gpipe import build_gpipe
from multimodal.schedule.builders.interleaved_1f1b import build_interleaved_1f1b
from multimodal.schedule.builders.one_f_one_b import build_one_f_one_b
from multimodal.schedule.builders.zb_h1 import build_zb_h1
from multimodal.schedule.builders.zb_v import build_zb_v
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Schedule


class Builder(Protocol):
    """What every builder looks like."""

    def __call__(self, graph: ModelGraph, plan: Plan, assignment: Assignment, *, forward_only: bool = False) -> Schedule:
        """Build a schedule in the compute dialect; raises ScheduleError where the plan's layout does not allow it."""


DIP_ROUNDS = (2, 4, 8, 16)
"""Into how many rounds `dip-N` can cut a step."""

BUILDERS: Mapping[str, Builder] = {
    "gpipe": build_gpipe,
    "breadth-first": build_breadth_first,
    "1f1b": build_one_f_one_b,
    "eager-1f1b": build_eager_1f1b,
    "interleaved-1f1b": build_interleaved_1f1b,
    "zb-h1": build_zb_h1,
    "zb-v": build_zb_v,
    "dip": build_dip,
    **{f"dip-{rounds}": partial(build_dip, num_rounds=rounds) for rounds in DIP_ROUNDS},
    "encoders-colocated": build_encoders_colocated,
    "encoders-replicated": build_encoders_replicated,
}
"""Every builder by the name that selects it."""
