"""Seconds of a layer's computations as curves over tokens, for the analytic model and for profiles, and their fits."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from multimodal.cost.unit_load import UnitLoad

Counts = Literal["inside", "leaving", "given", "made"]
"""The tokens that a layer's cost depends on: those inside its unit, those that leave it, or those that other units give a
generator; the LLM gives it one for each of its sequences. Made: patches of a generator, and how sequences attend."""


class PackedSize(NamedTuple):
    """`num_tokens` tokens, packed as `num_sequences` sequences of equal length."""

    num_tokens: int
    num_sequences: int = 1

    @property
    def num_squared(self) -> float:
        """Sum of the squares of the sequences' lengths."""
        return self.num_tokens**2 / self.num_sequences


class Quadratic(NamedTuple):
    """Seconds (Entrain 4.4.1): `constant + linear x tokens + quadratic x squares + sequence x sequences`.

    For packed sequences, `squares` is the sum of the squares of their lengths: tokens attend only inside their own sequence, so
    the form is exact for packing, too. `sequence` is the cost of each sequence whatever its length, such as the calls of an
    attention that takes one sequence at a time.
    """

    constant: float = 0.0
    linear: float = 0.0
    quadratic: float = 0.0
    sequence: float = 0.0

    def at(self, num_tokens: float, num_squared: float, num_sequences: float = 1) -> float:
        """Evaluate."""
        return self.constant + self.linear * num_tokens + self.quadratic * num_squared + self.sequence * num_sequences

    def shared(self, factor: float) -> "Quadratic":
        """Return the curve of `factor` times the work, as on more or fewer ranks; the constant cost of calls stays."""
        return Quadratic(self.constant, factor * self.linear, factor * self.quadratic, self.sequence)

    def times(self, factor: float) -> "Quadratic":
        """Return the curve with all seconds multiplied by `factor`."""
        return Quadratic(*(factor * coefficient for coefficient in self))

    def plus(self, *others: "Quadratic") -> "Quadratic":
        """Return the sum of quadratics."""
        return Quadratic(*map(sum, zip(self, *others, strict=True)))


class Interpolated(NamedTuple):
    """Straight lines between at least two measured points (DistTrain's profiler); the outermost lines continue beyond them."""

    tokens: tuple[float, ...]
    """Ascending."""
    seconds: tuple[float, ...]

    def at(self, num_tokens: float, num_squared: float, num_sequences: float = 1) -> float:
        """Evaluate; packed sequences cost as much as equal ones of their mean length (weighted by tokens), one by one."""
        if isinstance(num_tokens, np.ndarray):
            sizes = zip(num_tokens.tolist(), np.asarray(num_squared).tolist(), strict=True)
            return np.array([self.at(*size) for size in sizes])
        if not num_tokens:
            return 0.0
        length = num_squared / num_tokens
        right = min(max(bisect_right(self.tokens, length), 1), len(self.tokens) - 1)
        (before, after), (low, high) = self.tokens[right - 1 : right + 1], self.seconds[right - 1 : right + 1]
        return num_tokens / length * max(0.0, low + (high - low) * (length - before) / (after - before))

    def shared(self, factor: float) -> "Interpolated":
        """Return the curve of `factor` times the work, as on more or fewer ranks."""
        return Interpolated(self.tokens, tuple(factor * value for value in self.seconds))

    def times(self, factor: float) -> "Interpolated":
        """Return the curve with all seconds multiplied by `factor`."""
        return self.shared(factor)


Curve = Quadratic | Interpolated
"""Has `at(num_tokens, num_squared, num_sequences)`: seconds of packed sequences, given the sum of their squared lengths."""


class LayerCurves(NamedTuple):
    """Seconds of one rank's computations, without collectives and without recomputation."""

    forward: Curve
    input_gradient: Curve
    weight_gradient: Curve
    attention: Curve = Quadratic()
    """Core attention, which selective recomputation repeats; a part of `forward`."""

    def shared(self, factor: float) -> "LayerCurves":
        """Return the curves of `factor` times the work."""
        return LayerCurves(*(curve.shared(factor) for curve in self))

    def times(self, factor: float) -> "LayerCurves":
        """Return the curves with all seconds multiplied by `factor`."""
        return LayerCurves(*(curve.times(factor) for curve in self))


def counted_tokens(load: UnitLoad, *, counts: Counts) -> tuple[int, int, int]:
    """Return the tokens, sum of squares and sequences that a layer's cost depends on; counts: `Layer.counts`."""
    num_tokens, num_squared, num_outputs, num_sequences = load
    if counts == "given":
        return num_tokens - num_outputs + num_sequences, 0, num_sequences
    if counts == "leaving":
        return num_outputs, num_outputs * num_outputs, num_sequences
    return num_outputs if counts == "made" else num_tokens, num_squared, num_sequences


class FitError(NamedTuple):
    """Relative distance of a curve from measurements."""

    mean: float
    worst: float


def fit_quadratic(sizes: Sequence[PackedSize], seconds: Sequence[float], *, is_linear: bool = False) -> Quadratic:
    """Return the quadratic (Entrain 4.4.1) with the least sum of squared *relative* errors and no negative coefficient.

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
    measured = [(size, value) for size, value in zip(sizes, seconds, strict=True) if value > 0]
    errors = [abs(curve.at(size.num_tokens, size.num_squared, size.num_sequences) / value - 1) for size, value in measured]
    return FitError(sum(errors) / len(errors), max(errors)) if errors else FitError(0.0, 0.0)
