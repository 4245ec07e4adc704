"""Fits seconds as a quadratic in tokens (Entrain 4.4.1), linear in the number of packed sequences, to measurements."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from multimodal.cost.seconds.layer_curves import Curve, PackedSize, Quadratic


class FitError(NamedTuple):
    """Distance of a curve from measurements, relative to them."""

    mean: float
    worst: float


def fit_quadratic(sizes: Sequence[PackedSize], seconds: Sequence[float], *, is_linear: bool = False) -> Quadratic:
    """Return the quadratic with the least sum of squared *relative* errors and no negative coefficient.

    Relative, or the largest size would decide alone; non-negative, or seconds could be negative between or beyond sizes. Where
    all seconds are 0, so is the curve. is_linear: leave squares and sequences out, for work that does not depend on how tokens
    are cut into sequences: everything but attention. Sequences are left out, too, where all sizes have equally many: then what
    they cost is part of the constant.
    """
    positive = [(size, value) for size, value in zip(sizes, seconds, strict=True) if value > 0]
    if not positive:
        return Quadratic()
    measured = np.array([value for _, value in positive])
    columns = np.array([(1.0, size.num_tokens, size.num_squared, size.num_sequences) for size, _ in positive])
    is_used = np.array([True, True, not is_linear, not is_linear and len({size.num_sequences for size, _ in positive}) > 1])
    scale = columns.max(axis=0)
    coefficients = np.zeros(4)
    coefficients[is_used], _ = nnls((columns / scale)[:, is_used] / measured[:, None], np.ones_like(measured))
    return Quadratic(*(coefficients / scale).tolist())


def fit_error(curve: Curve, sizes: Sequence[PackedSize], seconds: Sequence[float]) -> FitError:
    """Return a curve's relative errors at measured sizes; (0, 0) where nothing took time."""
    errors = [
        abs(curve.at(size.num_tokens, size.num_squared, size.num_sequences) / value - 1)
        for size, value in zip(sizes, seconds, strict=True)
        if value > 0
    ]
    return FitError(sum(errors) / len(errors), max(errors)) if errors else FitError(0.0, 0.0)
