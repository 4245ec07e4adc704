"""The plain form of a layer's curves: four coefficients, or points."""

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from multimodal.cost.interpolated import Interpolated
from multimodal.cost.layer_curves import Curve, LayerCurves
from multimodal.cost.quadratic import Quadratic
from multimodal.values.errors import ConfigError

_REQUIRED = ("forward", "input_gradient", "weight_gradient")


def curves_to_dict(curves: LayerCurves) -> dict[str, Any]:
    """Plain form, read back by `curves_from_dict`."""
    return {name: _curve_to_plain(curve) for name, curve in curves._asdict().items()}


def curves_from_dict(value: Mapping[str, Any], *, where: str) -> LayerCurves:
    """Build from the plain form; raises ConfigError naming the offending place."""
    if unknown := [key for key in value if key not in LayerCurves._fields]:
        raise ConfigError(f"{where}: unknown key '{unknown[0]}'; known keys are {', '.join(LayerCurves._fields)}")
    if missing := [name for name in _REQUIRED if name not in value]:
        raise ConfigError(f"{where}: '{missing[0]}' is missing")
    return LayerCurves(**{name: _curve_from_plain(part, where=f"{where}, {name}") for name, part in value.items()})


def _curve_to_plain(curve: Curve) -> Any:
    if isinstance(curve, Quadratic):
        return list(curve)
    return {"tokens": list(curve.tokens), "seconds": list(curve.seconds)}


def _curve_from_plain(value: Any, *, where: str) -> Curve:
    if isinstance(value, Mapping) and set(value) == {"tokens", "seconds"}:
        tokens, seconds = (_numbers(value[name], where=f"{where}, {name}") for name in ("tokens", "seconds"))
        if len(tokens) != len(seconds) or len(tokens) < 2 or any(a >= b for a, b in pairwise(tokens)):
            raise ConfigError(f"{where}: expected at least two points with ascending tokens, and as many seconds as tokens")
        return Interpolated(tokens, seconds)
    if isinstance(value, list) and len(value) in (3, 4):  # three where every sequence was measured alone
        return Quadratic(*_numbers(value, where=where))
    raise ConfigError(f"{where}: expected [c0, c1, c2, c3] or {{tokens: [...], seconds: [...]}}, found {value!r}")


def _numbers(value: Any, *, where: str) -> tuple[float, ...]:
    if not isinstance(value, list):
        raise ConfigError(f"{where}: expected a list of numbers, found {value!r}")
    for number in value:
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not is_number or not math.isfinite(number) or number < 0:
            raise ConfigError(f"{where}: expected numbers of at least 0, found {number!r}")
    return tuple(float(number) for number in value)
