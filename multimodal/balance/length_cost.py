"""The cost of a batch in one unit as a function of the lengths in it: as a number, and in exact integers."""

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import ArrayLike

from multimodal.values.arrays.rows import Floats, Integers, row_sums
from multimodal.values.errors import AssignmentError

_LARGEST_COST_BITS = 61
_FINE_COST_BITS = 44
"""Bits up to which costs are scaled: together with a bin's number they still fit into one word."""
_FINEST_SCALE_BITS = 30


class CostForm(StrEnum):
    """The growth of cost with length; l is an item's length, n the number of items in the batch, w the quadratic weight."""

    LINEAR = "linear"
    """sum(l): packed sequences, attention negligible."""
    LINEAR_QUADRATIC = "linear+quadratic"
    """sum(l) + w sum(l^2): packed sequences with attention."""
    PADDED = "padded"
    """n max(l): every item is padded to the longest, attention negligible."""
    PADDED_ATTENTION = "padded-attention"
    """sum(l) + w n max(l)^2: only attention pads, as in a ConvTransformer."""


@dataclass(frozen=True)
class LengthCost:
    """The cost function that a unit declares (OrchMLLM, Eq. 1 and 2 and Appendix A), in units of one token's linear work."""

    form: CostForm = CostForm.LINEAR
    quadratic_weight: float = 0.0
    """The paper's lambda = beta / alpha, per token: at length 1 / lambda, attention costs as much as all else. Forms without a
    quadratic term ignore it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "form", CostForm(self.form))
        if not (math.isfinite(self.quadratic_weight) and self.quadratic_weight >= 0):
            raise AssignmentError(
                f"a unit's cost has quadratic weight {self.quadratic_weight}; give a finite number that is not negative"
            )

    @classmethod
    def from_text(cls, text: str) -> "LengthCost":
        """Parse a text such as `padded` or `linear+quadratic:0.001`; raises ValueError (or AssignmentError, its subclass)."""
        form, _, weight = text.partition(":")
        return cls(CostForm(form), float(weight or 0))

    def row_costs(self, starts: Integers, lengths: Integers) -> Integers | Floats:
        """Return the cost of each of several batches, in tokens; starts: [num_batches + 1] into `lengths`. O(n)."""
        totals = row_sums(starts, lengths)
        if self.form is CostForm.LINEAR:
            return totals
        if self.form is CostForm.LINEAR_QUADRATIC:
            return totals + self.quadratic_weight * row_sums(starts, lengths * lengths)
        counts = np.diff(starts)
        longest = np.zeros(len(counts), np.int64)
        longest[counts > 0] = np.maximum.reduceat(lengths, starts[:-1][counts > 0]) if len(lengths) else 0
        if self.form is CostForm.PADDED:
            return counts * longest
        return totals + self.quadratic_weight * (counts * longest * longest)


LINEAR_COST = LengthCost()
"""One per token."""


@dataclass(frozen=True)
class IntegerCosts:
    """Costs of items in integers, whose sums are exact, so that every rank decides the same.

    A batch costs the sum of `additive` plus its number of items times its largest `padded`, divided by `scale`. Both rise with
    the length. With a quadratic term costs are rounded down to 1 / scale token: bins that differ by less count as equal, as in
    the tolerance interval of OrchMLLM, Alg. 4.
    """

    lengths: Integers
    """[num_items] in tokens, which give the order of items."""
    additive: Integers | None
    """[num_items]; None: there is no additive part."""
    padded: Integers | None
    """[num_items]; None: there is no padded part."""
    scale: int
    """Power of two."""


def integer_costs(lengths: ArrayLike, *, cost: LengthCost) -> IntegerCosts:
    """Turn at least one length into integer costs; raises AssignmentError for one that is no count, or 2^61 tokens in all."""
    tokens, longest = _read_lengths(lengths)
    num_items, weight = len(tokens), cost.quadratic_weight
    match cost.form:
        case CostForm.LINEAR:
            most = num_items * longest  # an upper bound, which avoids another pass over a large batch
            _scale_bits(most if most < 1 << _LARGEST_COST_BITS else sum(tokens.tolist()))
            return IntegerCosts(tokens, tokens, None, 1)
        case CostForm.PADDED:
            _scale_bits(float(num_items) * longest)
            return IntegerCosts(tokens, None, tokens, 1)
        case CostForm.LINEAR_QUADRATIC | CostForm.PADDED_ATTENTION:
            # Summed from the longest: a sum of floats in numpy may depend on the processor, and all ranks must scale alike.
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


def _read_lengths(lengths: ArrayLike) -> tuple[Integers, int]:
    """Return lengths as [num_items] int64, and the longest; raises AssignmentError with the first one that is wrong. O(n)."""
    values = np.asarray(lengths)
    if values.dtype.kind in "iu":
        tokens = np.ascontiguousarray(values, dtype=np.int64)
        longest = int(tokens.view(np.uint64).max())  # one pass over a large batch: negative or oversized numbers are large here
        if longest < 1 << 62:
            return tokens, longest
    for index, length in enumerate(values.tolist()):
        if not isinstance(length, int | float) or not 0 <= length < 1 << 62 or length != int(length):
            raise AssignmentError(
                f"item {index} has length {length!r}; lengths must be whole numbers of tokens from 0 to 2^62 - 1"
            )
    tokens = values.astype(np.int64)
    return tokens, int(tokens.max())


def _scale_bits(total: float) -> int:
    """Return the bits by which costs that add up to `total` are shifted to the left."""
    bits = math.frexp(total)[1]
    if not math.isfinite(total) or bits > _LARGEST_COST_BITS:
        raise AssignmentError(
            f"a batch of all items would cost up to {total:.3g} tokens, but only 2^{_LARGEST_COST_BITS} can be compared exactly; "
            "check the lengths and the quadratic weight"
        )
    return min(_FINEST_SCALE_BITS, max(0, _FINE_COST_BITS - bits))
