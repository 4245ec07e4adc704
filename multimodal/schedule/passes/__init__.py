"""Passes: functions from one schedule to another, one file each."""

from collections.abc import Mapping
from typing import Protocol

from multimodal.schedule.passes.defer_receives import defer_receives
from multimodal.schedule.passes.delay_forward import delay_forward
from multimodal.schedule.passes.fill import fill
from multimodal.schedule.passes.gather_parameters import gather_parameters
from multimodal.schedule.passes.reduce_by_layer import reduce_by_layer
from multimodal.schedule.passes.split_backward import split_backward
from multimodal.values.assignment import Assignment
from multimodal.values.errors import ConfigError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Schedule


class Pass(Protocol):
    """What every pass over the compute dialect looks like."""

    def __call__(self, schedule: Schedule, *, graph: ModelGraph, plan: Plan, assignment: Assignment) -> Schedule:
        """Rewrite a schedule of the compute dialect."""


PASSES: Mapping[str, Pass] = {
    "split-backward": split_backward,
    "defer-receives": defer_receives,
    "delay-forward": delay_forward,
    "fill": fill,
    "gather-parameters": gather_parameters,
    "reduce-by-layer": reduce_by_layer,
}
"""Every pass that can be chosen by name. `reorder` needs an order, so a balancer calls it; lowering is always the last one."""


def passes_named(names: str) -> tuple[Pass, ...]:
    """Look passes up by their names with commas between them; raises ConfigError for a name that is none."""
    found = [name for name in names.split(",") if name]
    if unknown := [name for name in found if name not in PASSES]:
        raise ConfigError(f"--schedule-passes: there is no pass '{unknown[0]}'; choose from {', '.join(PASSES)}")
    return tuple(PASSES[name] for name in found)
