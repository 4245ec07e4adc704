"""Fits seconds as a quadratic in tokens (Entrain 4.4.1), linear in the number of packed sequences, to measurements."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from multimodal.cost.seconds.layer_curves import Curve, PackedSize, Quadratic


class FitError(NamedTuple):
    """Relative distance of a curve from measurements."""

    mean: float
    worst: float


def fit_quadratic(sizes: Sequence[PackedSize], seconds: Sequence[float], *, is_linear: bool = False) -> Quadratic:
    """Return the quadratic with the least sum of squared *relative* errors and no negative coefficient.

    Errors are relative because the largest size would decide alone otherwise; coefficients are non-negative because seconds could
    become negative between or beyond sizes otherwise. If all seconds are 0, so is the curve. is_linear: leave out squares and
    sequences, for work that does not depend on the cutting of tokens into sequences: everything but attention. Sequences are left
    out, too, if all sizes have equally many; their cost is then part of the constant.
    """
    from scipy.optimize import nnls  # which every rank would wait for at its start otherwise

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
    """Return a curve's relative errors at measured sizes; (0, 0) if nothing took time."""
    errors = [
        abs(curve.at(size.num_tokens, size.num_squared, size.num_sequences) / value - 1)
        for size, value in zip(sizes, seconds, strict=True)
        if value > 0
    ]
    return FitError(sum(errors) / len(errors), max(errors)) if errors else FitError(0.0, 0.0)
