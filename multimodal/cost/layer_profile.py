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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from multimodal.cost.layer_curves import LayerCurves
from multimodal.cost.layer_profile_form import curves_from_plain, curves_to_dict
from multimodal.cost.step_profile import StepProfile
from multimodal.values.errors import ConfigError
from multimodal.values.file_form import read_file, write_mapping
from multimodal.values.model_graph import LayerKind, ModelGraph
from multimodal.values.plan import MOST_RANKS
from multimodal.values.typed_reader import Plain

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
        known = ("device", "dtype", "units", "step")
        top = Plain(value, "layer costs", ConfigError).mapping(known=known, required=("units",))
        units = top["units"].mapping(at_least=1, expected="each unit's name with its kinds of layer")
        curves: dict[ProfileKey, LayerCurves] = {}
        for unit, kinds in units.items():
            for kind, entry in _entries(unit, kinds):
                key = unit, kind, *_sizes(entry)
                if key in curves:
                    entry.fail(f"tp {key[2]}, cp {key[3]} is listed twice; leave one out")
                curves[key] = curves_from_plain(entry, also=_SIZES)
        step = top["step"].build(StepProfile) if "step" in top else None
        device, dtype = (top[key].read(str) if key in top else "" for key in ("device", "dtype"))
        return cls(device, dtype, curves, step)

    @classmethod
    def from_file(cls, path: str | Path) -> "LayerProfile":
        """Read a YAML or JSON file; a ConfigError names the line."""
        return read_file(path, cls.from_dict, error=ConfigError)

    def to_file(self, path: str | Path) -> None:
        """Write a YAML or JSON file."""
        write_mapping(path, self.to_dict(), has_short_lists=True)


def _entries(unit: str, kinds: Plain) -> Iterator[tuple[LayerKind, Plain]]:
    found = replace(kinds, where=f"unit '{unit}'").mapping(expected="a mapping from kinds of layer to lists of curves")
    for name, entries in found.items():
        if name not in tuple(LayerKind):
            entries.fail(f"is no kind of layer; known are {', '.join(LayerKind)}")
        expected = "a list with one mapping of curves per tensor parallel size"
        for entry in entries.entries(called=f"{entries.where}, entry", expected=expected):
            yield LayerKind(name), entry


def _sizes(entry: Plain) -> tuple[int, int]:
    sizes = entry.mapping()
    tensor, context = (sizes[name].read(int, minimum=1, maximum=MOST_RANKS) if name in sizes else 1 for name in _SIZES)
    return tensor, context
