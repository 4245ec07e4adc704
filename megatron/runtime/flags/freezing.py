"""Freeze the units that the flags name."""

import difflib
from dataclasses import replace

from megatron.runtime.flags.configuration import RunConfig
from megatron.runtime.flags.unit_flags import LLM
from multimodal.values.errors import ConfigError
from multimodal.values.model_graph import ModelGraph


def apply_freezing(graph: ModelGraph, config: RunConfig) -> ModelGraph:
    """Apply `--freeze` and `--freeze-projector` on top of what the model file freezes.

    The backbone may be called `llm` whatever its name. Raises ConfigError for a unit that does not exist, and for the projector
    of the backbone, which has none.
    """
    modules = {_unit_name(graph, name, flag="--freeze") for name in config.model.freeze}
    projectors = {_unit_name(graph, name, flag="--freeze-projector") for name in config.model.freeze_projector}
    if graph.backbone.name in projectors:
        owners = ", ".join(unit.name for unit in (*graph.encoders, *graph.generators)) or "none"
        raise ConfigError(
            f"--freeze-projector {graph.backbone.name}: the backbone has no projector; units with one are: {owners} "
            f"(to freeze the backbone itself, use --freeze {graph.backbone.name})"
        )
    units = tuple(
        replace(
            unit,
            freeze_module=unit.freeze_module or unit.name in modules,
            freeze_projector=unit.freeze_projector or unit.name in projectors,
        )
        for unit in graph.units
    )
    return replace(graph, units=units)


def _unit_name(graph: ModelGraph, name: str, *, flag: str) -> str:
    if name in graph.unit_names:
        return name
    if name == LLM:
        return graph.backbone.name
    close = difflib.get_close_matches(name, graph.unit_names, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    units = ", ".join(f"{unit.name} ({unit.role})" for unit in graph.units)
    raise ConfigError(f"{flag} {name}: the model has no such unit; its units are {units}{hint}")
