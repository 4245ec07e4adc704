"""Passes: functions from one schedule to another, one file each."""

from collections.abc import Mapping

from multimodal.schedule.passes.defer_receives import defer_receives
from multimodal.schedule.passes.delay_forward import delay_forward
from multimodal.schedule.passes.fill import fill
from multimodal.schedule.passes.gather_parameters import gather_parameters
from multimodal.schedule.passes.reduce_by_layer import reduce_by_layer
from multimodal.schedule.passes.schedule_pass import Pass
from multimodal.schedule.passes.split_backward import split_backward
from multimodal.values.errors import ConfigError

__all__ = ["PASSES", "Pass", "passes_named"]


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
    """Look passes up by their names with commas between them; raises ConfigError for an unknown name or one that stands twice."""
    found = [name for name in names.split(",") if name]
    if unknown := [name for name in found if name not in PASSES]:
        raise ConfigError(f"--schedule-passes: there is no pass '{unknown[0]}'; choose from {', '.join(PASSES)}")
    if twice := [name for name in found if found.count(name) > 1]:
        raise ConfigError(f"--schedule-passes names {twice[0]} twice; leave one out")
    return tuple(PASSES[name] for name in found)
