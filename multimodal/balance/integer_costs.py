"""What items add to a batch's cost, in whole numbers: sums are exact, so every rank decides the same."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from multimodal.balance.unit_cost import CostForm, UnitCost
from multimodal.values.errors import AssignmentError

Integers = NDArray[np.int64]

_LARGEST_COST_BITS = 61
_FINE_COST_BITS = 44
"""Costs are scaled up to here and no further: beside a bin's number they still fit one word."""
_FINEST_SCALE_BITS = 30


@dataclass(frozen=True)
class IntegerCosts:
    """A batch costs the sum of `additive` plus its number of items times its largest `padded`, divided by `scale`.

    Both rise with the length. With a quadratic term costs are rounded down to 1 / scale token: bins that differ by less than
    that count as equal, as in the tolerance interval of OrchMLLM, Alg. 4.
    """

    lengths: Integers
    """[num_items] in tokens; what items are ordered by."""
    additive: Integers | None
    """[num_items]; None: nothing is added."""
    padded: Integers | None
    """[num_items]; None: nothing is padded."""
    scale: int
    """Power of two."""


def integer_costs(lengths: ArrayLike, *, cost: UnitCost) -> IntegerCosts:
    """Turn lengths into costs.

    lengths: [num_items] whole numbers of tokens, at least one. Raises AssignmentError where one is no whole number or is
    negative, and where a batch of all of them could cost 2^61 tokens or more. O(n).
    """
    tokens = validate_lengths(lengths)
    longest, num_items, weight = int(tokens.max()), len(tokens), cost.quadratic_weight
    match cost.form:
        case CostForm.LINEAR:
            most = num_items * longest  # saves the exact sum, which reads a large batch once more
            _scale_bits(most if most < 1 << _LARGEST_COST_BITS else sum(tokens.tolist()))
            return IntegerCosts(tokens, tokens, None, 1)
        case CostForm.PADDED:
            _scale_bits(float(num_items) * longest)
            return IntegerCosts(tokens, None, tokens, 1)
        case CostForm.LINEAR_QUADRATIC | CostForm.PADDED_ATTENTION:
            # From the longest: a sum of floats in numpy may depend on the processor, and all ranks must scale alike.
            bits = _scale_bits(num_items * (longest + weight * (float(longest) * longest)))
            exact = tokens.astype(np.float64)
            exact *= exact
            exact *= weight
            exact *= 2.0**bits
            quadratic, linear = exact.astype(np.int64), tokens << bits
            if cost.form is CostForm.PADDED_ATTENTION:
                return IntegerCosts(tokens, linear, quadratic, 1 << bits)
            linear += quadratic
            return IntegerCosts(tokens, linear, None, 1 << bits)


def validate_lengths(lengths: ArrayLike | Sequence[float]) -> Integers:
    """Return lengths as [num_items] int64; raises AssignmentError with the first one that is wrong. O(n)."""
    given = np.asarray(lengths)
    if given.ndim != 1:
        raise AssignmentError(f"lengths have {given.ndim} dimensions; give one length per item, a list of numbers")
    if not given.size:
        raise AssignmentError("the batch has no items; give at least one length")
    if given.dtype.kind in "iu" and given.min() >= 0 and given.max() < 1 << 62:
        return np.ascontiguousarray(given, dtype=np.int64)
    for index, length in enumerate(given.tolist()):
        if not isinstance(length, int | float) or not 0 <= length < 1 << 62 or length != int(length):
            raise AssignmentError(
                f"item {index} has length {length!r}; lengths must be whole numbers of tokens from 0 to 2^62 - 1"
            )
    return given.astype(np.int64)


def _scale_bits(total: float) -> int:
    """Return how far costs that add up to `total` are shifted to the left."""
    bits = math.frexp(total)[1]
    if not math.isfinite(total) or bits > _LARGEST_COST_BITS:
        raise AssignmentError(
            f"a batch of all items would cost up to {total:.3g} tokens, but only 2^{_LARGEST_COST_BITS} can be compared exactly; "
            "check the lengths and the quadratic weight"
        )
    return min(_FINEST_SCALE_BITS, max(0, _FINE_COST_BITS - bits))
