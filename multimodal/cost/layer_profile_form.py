"""The plain form of a layer's curves: four coefficients, or points."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from multimodal.cost.interpolated import Interpolated
from multimodal.cost.layer_curves import Curve, LayerCurves
from multimodal.cost.quadratic import Quadratic
from multimodal.values.typed_reader import Plain

_REQUIRED = ("forward", "input_gradient", "weight_gradient")


def curves_to_dict(curves: LayerCurves) -> dict[str, Any]:
    """Plain form, read back by `curves_from_plain`."""
    return {name: _curve_to_plain(curve) for name, curve in curves._asdict().items()}


def curves_from_plain(value: Plain, *, also: tuple[str, ...] = ()) -> LayerCurves:
    """Build from the plain form; also: further keys that may stand there. Raises the error of `value`, naming the place."""
    parts = value.mapping(known=(*LayerCurves._fields, *also), required=_REQUIRED)
    return LayerCurves(**{name: _curve_from_plain(part) for name, part in parts.items() if name not in also})


def _curve_to_plain(curve: Curve) -> Any:
    if isinstance(curve, Quadratic):
        return list(curve)
    return {"tokens": list(curve.tokens), "seconds": list(curve.seconds)}


def _curve_from_plain(value: Plain) -> Curve:
    if isinstance(value.value, Mapping):
        points = value.mapping(known=("tokens", "seconds"), required=("tokens", "seconds"))
        tokens, seconds = (_numbers(points[name]) for name in ("tokens", "seconds"))
        if len(tokens) != len(seconds) or len(tokens) < 2 or any(a >= b for a, b in pairwise(tokens)):
            value.fail("expected at least two points with ascending tokens, and as many seconds as tokens")
        return Interpolated(tokens, seconds)
    if not isinstance(value.value, (list, tuple)) or len(value.value) not in (3, 4):  # 3: every sequence was measured alone
        value.refuse("[c0, c1, c2, c3] or {tokens: [...], seconds: [...]}")
    return Quadratic(*_numbers(value))


def _numbers(value: Plain) -> tuple[float, ...]:
    numbers: tuple[float, ...] = value.read(tuple[float, ...], minimum=0, maximum=1e12)
    return numbers
