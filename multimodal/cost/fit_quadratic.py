"""Fits seconds as a quadratic in tokens to measurements (Entrain 4.4.1)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from multimodal.cost.layer_curves import Curve
from multimodal.cost.quadratic import Quadratic


class FitError(NamedTuple):
    """How far a curve is from measurements, relative to them."""

    mean: float
    worst: float


def fit_quadratic(tokens: Sequence[float], seconds: Sequence[float], *, is_linear: bool = False) -> Quadratic:
    """Return the quadratic with the least sum of squared *relative* errors and no negative coefficient.

    Relative, or the largest size would decide alone; non-negative, or seconds could be negative between or beyond sizes. Where
    all seconds are 0, so is the curve. tokens: of one sequence each. is_linear: leave the square out, for work that does not
    depend on how tokens are cut into sequences: everything but attention.
    """
    measured = np.asarray(seconds, dtype=float)
    is_positive = measured > 0
    if not is_positive.any():
        return Quadratic()
    sizes, measured = np.asarray(tokens, dtype=float)[is_positive], measured[is_positive]
    scale = sizes.max()
    columns = np.stack((np.ones_like(sizes), sizes / scale, (sizes / scale) ** 2), axis=1)
    columns = columns[:, : 2 if is_linear else 3]
    coefficients, _ = nnls(columns / measured[:, None], np.ones_like(measured))
    return Quadratic(*(float(value / scale**power) for power, value in enumerate(coefficients)))


def fit_error(curve: Curve, tokens: Sequence[float], seconds: Sequence[float]) -> FitError:
    """Return a curve's relative errors at measured sizes; (0, 0) where nothing took time."""
    errors = [abs(curve.at(size, size**2) / value - 1) for size, value in zip(tokens, seconds, strict=True) if value > 0]
    return FitError(sum(errors) / len(errors), max(errors)) if errors else FitError(0.0, 0.0)
