"""Chooses the linear layers that get adapters (LoRA): patterns, matched against the linear layers of a model's layers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from multimodal.values.errors import ConfigError, ModelError
from multimodal.values.model_graph import Lora, ModelGraph, Unit

LinearLayers = Mapping[str, Mapping[str, bool]]
"""Unit -> its linear layers that may have adapters, as `<kind of layer>.<module>` -> True if they are between the unit's ends."""


def resolve_adapters(graph: ModelGraph, linear_layers: LinearLayers) -> ModelGraph:
    """Return the model with the patterns of each `lora` replaced by what they match; raises ModelError if one matches nothing."""
    return replace(graph, units=tuple(_resolved(unit, linear_layers[unit.name]) for unit in graph.units))


def adapt_units(
    graph: ModelGraph, linear_layers: LinearLayers, *, rank: int, alpha: float | None, targets: Sequence[str]
) -> ModelGraph:
    """Return the model with adapters of this rank; targets: patterns of `<unit>.<kind>.<module>` or of the end of such a name.

    `llm` stands for the backbone, whatever its name. Without targets, all linear layers of the backbone except its output get
    adapters. Units without a target stay as they are. Raises ConfigError for a pattern that matches nothing.
    """
    chosen: dict[str, dict[str, None]] = {name: {} for name in linear_layers}
    for pattern in targets or (f"{graph.backbone.name}.*",):
        matched = {
            name: _matching(pattern, (name, "llm") if name == graph.backbone.name else (name,), layers, only_inside=not targets)
            for name, layers in linear_layers.items()
        }
        if not any(matched.values()):
            known = ", ".join(f"{name}.{layer}" for name, layers in linear_layers.items() for layer in layers) or "none"
            raise ConfigError(
                f"--lora-targets {pattern}: no linear layer that may have an adapter is called so; expected one of {known}"
            )
        for name, layers in matched.items():
            chosen[name] |= dict.fromkeys(layers)
    loras = {name: Lora(rank, alpha, tuple(layers)) for name, layers in chosen.items() if layers}
    return replace(graph, units=tuple(replace(unit, lora=loras.get(unit.name, unit.lora)) for unit in graph.units))


def _resolved(unit: Unit, layers: Mapping[str, bool]) -> Unit:
    if unit.lora is None:
        return unit
    chosen: dict[str, None] = {}
    for index, pattern in enumerate(unit.lora.targets):
        matched = _matching(pattern, (unit.name,), layers, only_inside=pattern == "*")
        if not matched:
            raise ModelError(
                f"unit '{unit.name}', lora, targets[{index}]: '{pattern}' matches no linear layer that may have an adapter; they "
                f"are {', '.join(layers) or 'none'}",
                place=("units", unit.name, "lora", "targets", index),
            )
        chosen |= dict.fromkeys(matched)
    return replace(unit, lora=replace(unit.lora, targets=tuple(chosen)))


def _matching(pattern: str, units: Sequence[str], layers: Mapping[str, bool], *, only_inside: bool) -> list[str]:
    """Return the linear layers whose name, with or without unit and kind, matches the pattern."""

    def matches(layer: str) -> bool:
        kind, module = layer.split(".")
        names = (module, layer, *(f"{unit}.{each}" for unit in units for each in (module, layer, kind)))
        return any(fnmatchcase(name, pattern) for name in names)

    return [layer for layer, is_inside in layers.items() if matches(layer) and (is_inside or not only_inside)]
