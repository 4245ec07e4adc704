"""Measured costs of a model's layers, written by tools/profile_layers.py and read by every planner.

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
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from math import prod
from typing import Any, ClassVar

from multimodal.cost.layers.registry import LAYER_KINDS
from multimodal.cost.seconds.layer_curves import Curve, Interpolated, LayerCurves, Quadratic
from multimodal.values.errors import ConfigError
from multimodal.values.file_form import FileValue
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import MOST_RANKS
from multimodal.values.typed_reader import Plain

ProfileKey = tuple[str, str, int, int]
"""(unit, layer kind, tensor parallel size, context parallel size)."""
_SIZES = ("tensor_parallel_size", "context_parallel_size")
_REQUIRED_CURVES = ("forward", "input_gradient", "weight_gradient")
_SECONDS = {"minimum": 0, "maximum": 1e9}


@dataclass(frozen=True)
class StepProfile:
    """Seconds of a step on one rank outside of its layers: the runtime's own work, and the optimizer's; measured."""

    seconds: float = field(default=0.0, metadata=_SECONDS)
    """Per step, independent of its work: clearing gradients, starting, summing up."""
    computation_seconds: float = field(default=0.0, metadata=_SECONDS)
    """Per forward and per backward: finding its inputs, handing on its outputs."""
    unit_update_seconds: float = field(default=0.0, metadata=_SECONDS)
    """Gradient norm, clipping and optimizer, per unit that a rank trains."""
    weight_update_seconds: float = field(default=0.0, metadata=_SECONDS)
    """Gradient norm, clipping and optimizer, per weight that a rank updates."""


@dataclass(frozen=True)
class LayerProfile(FileValue):
    """Curves of one rank's computations, without collectives and recomputation."""

    has_short_lists: ClassVar = True
    device: str
    dtype: str
    curves: Mapping[ProfileKey, LayerCurves]
    step: StepProfile | None = None
    """Seconds of steps outside of layers; None: those that follow from the cluster's description."""

    def find(self, unit: str, kind: str, tensor_parallel_size: int, context_parallel_size: int) -> LayerCurves | None:
        """Return a layer's curves, of the nearest profiled size scaled to the ranks; None if no such layer was profiled."""
        known = [(tensor, context) for name, other, tensor, context in self.curves if (name, other) == (unit, kind)]
        if not known:
            return None
        wanted = (tensor_parallel_size, context_parallel_size)
        num_ranks = prod(wanted)
        tensor, context = min(
            known, key=lambda sizes: (sizes != wanted, max(prod(sizes) / num_ranks, num_ranks / prod(sizes)), sizes)
        )
        return self.curves[unit, kind, tensor, context].shared(tensor * context / num_ranks)

    def times(self, factors: Mapping[str, float]) -> "LayerProfile":
        """Return the profile of a device on which each unit's layers take this many times as long."""
        scaled = {key: curves.times(factors.get(key[0], 1.0)) for key, curves in self.curves.items()}
        return replace(self, curves=scaled)

    def check(self, graph: ModelGraph) -> None:
        """Raise ConfigError if the profile has units or layers that the model lacks."""
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
            entry: dict[str, Any] = dict(zip(_SIZES, sizes, strict=True))
            for name, curve in curves._asdict().items():
                is_fitted = isinstance(curve, Quadratic)
                entry[name] = list(curve) if is_fitted else {key: list(points) for key, points in curve._asdict().items()}
            units.setdefault(unit, {}).setdefault(kind, []).append(entry)
        plain = {"device": self.device, "dtype": self.dtype, "units": units}
        return plain if self.step is None else {**plain, "step": asdict(self.step)}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "LayerProfile":
        """Build from the plain form; raises ConfigError naming the offending place."""
        known = ("device", "dtype", "units", "step")
        top = Plain(value, "layer costs", ConfigError).mapping(known=known, required=("units",))
        units = top["units"].mapping(at_least=1, expected="each unit's name with its kinds of layer")
        curves: dict[ProfileKey, LayerCurves] = {}
        for unit, kinds in units.items():
            for kind, entry in _entries(unit, kinds):
                given = entry.mapping()
                sizes = [given[name].read(int, minimum=1, maximum=MOST_RANKS) if name in given else 1 for name in _SIZES]
                key = unit, kind, sizes[0], sizes[1]
                if key in curves:
                    entry.fail(f"tp {key[2]}, cp {key[3]} is listed twice; leave one out")
                parts = entry.mapping(known=(*LayerCurves._fields, *_SIZES), required=_REQUIRED_CURVES)
                of_layer = {name: _curve_from_plain(part) for name, part in parts.items() if name not in _SIZES}
                curves[key] = LayerCurves(**of_layer)
        step = top["step"].build(StepProfile) if "step" in top else None
        device, dtype = (top[key].read(str) if key in top else "" for key in ("device", "dtype"))
        return cls(device, dtype, curves, step)


def _entries(unit: str, kinds: Plain) -> Iterator[tuple[str, Plain]]:
    found = replace(kinds, where=f"unit '{unit}'").mapping(expected="a mapping from kinds of layer to lists of curves")
    for name, entries in found.items():
        if name not in LAYER_KINDS:
            entries.fail(f"is no kind of layer; known are {', '.join(LAYER_KINDS)}")
        expected = "a list with one mapping of curves per tensor parallel size"
        for entry in entries.entries(called=f"{entries.where}, entry", expected=expected):
            yield name, entry


def _curve_from_plain(value: Plain) -> Curve:
    if isinstance(value.value, Mapping):
        points = value.mapping(known=("tokens", "seconds"), required=("tokens", "seconds"))
        tokens, seconds = (_numbers(points[name]) for name in ("tokens", "seconds"))
        if len(tokens) != len(seconds) or len(tokens) < 2 or any(a >= b for a, b in pairwise(tokens)):
            value.fail("expected at least two points with ascending tokens, and as many seconds as tokens")
        return Interpolated(tokens, seconds)
    if not isinstance(value.value, (list, tuple)) or len(value.value) not in (3, 4):  # 3: measured one sequence at a time
        value.refuse("[c0, c1, c2, c3] or {tokens: [...], seconds: [...]}")
    return Quadratic(*_numbers(value))


def _numbers(value: Plain) -> tuple[float, ...]:
    return value.read(tuple[float, ...], minimum=0, maximum=1e12)
