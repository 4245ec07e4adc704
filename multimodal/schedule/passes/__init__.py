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


_UNDOES: Mapping[tuple[str, str], str] = {
    ("delay-forward", "defer-receives"): "would move delayed forwards back into the warm-up, to where a lane waits",
}
"""(pass, later pass) -> how the later one undoes what the earlier did; nothing in a schedule says why its forwards stand late."""


def passes_named(names: str) -> tuple[Pass, ...]:
    """Look passes up by their names with commas between them.

    Raises ConfigError for an unknown name, one given twice, and an order in which a pass undoes an earlier one.
    """
    found = [name for name in names.split(",") if name]
    if unknown := [name for name in found if name not in PASSES]:
        raise ConfigError(f"--schedule-passes: there is no pass '{unknown[0]}'; choose from {', '.join(PASSES)}")
    if twice := [name for name in found if found.count(name) > 1]:
        raise ConfigError(f"--schedule-passes names {twice[0]} twice; leave one out")
    for (first, second), how in _UNDOES.items():
        if first in found and second in found[found.index(first) :]:
            raise ConfigError(
                f"--schedule-passes {names}: {second} after {first} {how}; put {first} after {second}, such as "
                f"--schedule-passes {second},{first}, or leave one out"
            )
    return tuple(PASSES[name] for name in found)
