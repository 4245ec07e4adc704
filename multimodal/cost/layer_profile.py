"""Measured costs of a model's layers: what tools/profile_layers.py writes and every planner takes.

device: NVIDIA A100-SXM4-80GB
dtype: bfloat16
units:
  llm:
    transformer:
      - tensor_parallel_size: 2
        forward: [2.1e-05, 1.3e-07, 4.0e-12, 3.2e-06]             # c0 + c1 x tokens + c2 x squares + c3 x sequences
        input_gradient: {tokens: [64, 1024], seconds: [1.0e-04, 4.1e-04]}   # or points, interpolated linearly
        weight_gradient: [...]
        attention: [...]                                           # core attention, a part of forward
step: {computation_seconds: 1.9e-04, weight_update_seconds: 4.6e-09, ...}   # beside the layers; see StepProfile
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from multimodal.cost.layer_curves import LayerCurves
from multimodal.cost.layer_profile_form import curves_from_dict, curves_to_dict
from multimodal.cost.step_profile import StepProfile
from multimodal.values.errors import ConfigError
from multimodal.values.file_form import read_mapping, write_mapping
from multimodal.values.model_graph import LayerKind, ModelGraph

ProfileKey = tuple[str, LayerKind, int, int]
"""(unit, layer kind, tensor parallel size, context parallel size)."""
_SIZES = ("tensor_parallel_size", "context_parallel_size")


@dataclass(frozen=True)
class LayerProfile:
    """Curves of one rank's computations, without collectives and recomputation."""

    device: str
    dtype: str
    curves: Mapping[ProfileKey, LayerCurves]
    step: StepProfile | None = None
    """What steps take beside their layers; None: nothing but what the cluster's description says."""

    def find(self, unit: str, kind: LayerKind, tensor_parallel_size: int, context_parallel_size: int) -> LayerCurves | None:
        """Return a layer's curves; where other sizes were profiled, the nearest, with its work shared by more or fewer ranks.

        None when this kind of layer was not profiled in this unit.
        """
        known = [(tensor, context) for name, other, tensor, context in self.curves if (name, other) == (unit, kind)]
        if not known:
            return None
        wanted = (tensor_parallel_size, context_parallel_size)
        num_ranks = prod(wanted)
        tensor, context = min(
            known, key=lambda sizes: (sizes != wanted, max(prod(sizes) / num_ranks, num_ranks / prod(sizes)), sizes)
        )
        return self.curves[unit, kind, tensor, context].shared(tensor * context / num_ranks)

    def check(self, graph: ModelGraph) -> None:
        """Raise ConfigError when the profile is of units or layers that the model lacks."""
        for unit, kind, *_ in self.curves:
            if unit not in graph.unit_names or kind not in graph.unit(unit).layers:
                raise ConfigError(
                    f"the layer costs list '{kind}' of unit '{unit}', which the model lacks (its units are "
                    f"{', '.join(graph.unit_names)}); profile this model with tools/profile_layers.py"
                )

    def to_dict(self) -> dict[str, Any]:
        """Plain form, read back by `from_dict`."""
        units: dict[str, dict[str, list[dict[str, Any]]]] = {}
        for (unit, kind, *sizes), curves in self.curves.items():
            entry = {**dict(zip(_SIZES, sizes, strict=True)), **curves_to_dict(curves)}
            units.setdefault(unit, {}).setdefault(str(kind), []).append(entry)
        plain = {"device": self.device, "dtype": self.dtype, "units": units}
        return plain if self.step is None else {**plain, "step": self.step.to_dict()}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "LayerProfile":
        """Build from the plain form; raises ConfigError naming the offending place."""
        if unknown := [key for key in value if key not in ("device", "dtype", "units", "step")]:
            raise ConfigError(f"layer costs: unknown key '{unknown[0]}'; known keys are device, dtype, units, step")
        units = value.get("units")
        if not isinstance(units, Mapping) or not units:
            raise ConfigError("layer costs: 'units' must map each unit's name to its kinds of layer")
        curves: dict[ProfileKey, LayerCurves] = {}
        for unit, kinds in units.items():
            for kind, entry, where in _entries(str(unit), kinds):
                sizes = [_size(entry, name, where) for name in _SIZES]
                key = str(unit), kind, sizes[0], sizes[1]
                if key in curves:
                    raise ConfigError(f"{where}: tp {sizes[0]}, cp {sizes[1]} is listed twice; leave one out")
                curves[key] = curves_from_dict({name: part for name, part in entry.items() if name not in _SIZES}, where=where)
        step = StepProfile.from_dict(value["step"]) if "step" in value else None
        return cls(str(value.get("device", "")), str(value.get("dtype", "")), curves, step)

    @classmethod
    def from_file(cls, path: str | Path) -> "LayerProfile":
        """Read a YAML or JSON file."""
        try:
            return cls.from_dict(read_mapping(path, error=ConfigError))
        except ConfigError as problem:
            raise problem if str(problem).startswith(str(path)) else ConfigError(f"{path}: {problem}") from None

    def to_file(self, path: str | Path) -> None:
        """Write a YAML or JSON file."""
        write_mapping(path, self.to_dict(), has_short_lists=True)


def _entries(unit: str, kinds: Any) -> list[tuple[LayerKind, Mapping[str, Any], str]]:
    if not isinstance(kinds, Mapping):
        raise ConfigError(f"unit '{unit}': expected a mapping from kinds of layer to lists of curves, found {kinds!r}")
    found = []
    for name, entries in kinds.items():
        where = f"unit '{unit}', {name}"
        if name not in list(LayerKind):
            raise ConfigError(f"{where}: is no kind of layer; known are {', '.join(LayerKind)}")
        if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
            raise ConfigError(f"{where}: expected a list with one mapping of curves per tensor parallel size")
        found += [(LayerKind(name), entry, f"{where}, entry {index}") for index, entry in enumerate(entries)]
    return found


def _size(entry: Mapping[str, Any], name: str, where: str) -> int:
    size = entry.get(name, 1)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigError(f"{where}: {name} must be a positive integer, found {size!r}")
    return size
