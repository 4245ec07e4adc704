"""What a batch costs the unit that runs it, as a function of the lengths in it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from multimodal.values.errors import AssignmentError


class CostForm(StrEnum):
    """How cost grows with length; l is an item's length, n the number of items in the batch, w the quadratic weight."""

    LINEAR = "linear"
    """sum(l): packed sequences, attention negligible."""
    LINEAR_QUADRATIC = "linear+quadratic"
    """sum(l) + w sum(l^2): packed sequences with attention."""
    PADDED = "padded"
    """n max(l): every item is padded to the longest, attention negligible."""
    PADDED_ATTENTION = "padded-attention"
    """sum(l) + w n max(l)^2: only attention pads, as in a ConvTransformer."""


@dataclass(frozen=True)
class UnitCost:
    """The cost function that a unit declares (OrchMLLM, Eq. 1 and 2 and Appendix A), in units of one token's linear work."""

    form: CostForm = CostForm.LINEAR
    quadratic_weight: float = 0.0
    """The paper's lambda = beta / alpha, per token: at length 1 / lambda, attention costs as much as all else. The forms
    without a quadratic term do not read it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "form", CostForm(self.form))
        if not (math.isfinite(self.quadratic_weight) and self.quadratic_weight >= 0):
            raise AssignmentError(
                f"a unit's cost has quadratic weight {self.quadratic_weight}; give a finite number that is not negative"
            )

    def batch_cost(self, lengths: Sequence[float]) -> float:
        """Return the cost of a batch of these lengths, in tokens; an empty batch costs nothing. O(n)."""
        if not len(lengths):
            return 0
        match self.form:
            case CostForm.LINEAR:
                return sum(lengths)
            case CostForm.LINEAR_QUADRATIC:
                return sum(lengths) + self.quadratic_weight * sum(length * length for length in lengths)
            case CostForm.PADDED:
                return len(lengths) * max(lengths)
            case CostForm.PADDED_ATTENTION:
                longest = max(lengths)
                return sum(lengths) + self.quadratic_weight * (len(lengths) * longest * longest)


LINEAR_COST = UnitCost()
"""One per token."""
