"""Judges by a run's own steps whether balancing makes them shorter, and how much it must be predicted to gain."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class TriedStep:
    """A step that was measured, with its predictions by the same layers."""

    seconds: float
    predicted_seconds: float
    """As it ran."""
    in_order_seconds: float
    """Predicted for the same samples in the data's order."""
    deciding_seconds: float | None
    """In which its assignment was chosen; None if it was left in the data's order."""
    is_balanced: bool
    """True if its samples were not in the data's order."""


class Verdict(NamedTuple):
    """The worth of balancing."""

    margin: float
    """Share of a step that balancing must be predicted to gain over the data's order."""
    keeps_order: bool
    """True if steps are better left in the data's order, undecided."""
    took: float | None
    """Seconds of balanced steps over those that their samples would have taken in the data's order; None: none was balanced."""

    @property
    def said(self) -> str:
        """The verdict in words."""
        if not self.keeps_order:
            return f"balance keeps the data's order unless it gains {self.margin:.1%}"
        why = "it gained nothing" if self.took is None else f"what it balanced took {self.took:.2f} times as long"
        return f"balance keeps the data's order until it is tried again, as {why}"


def judge_balance(steps: Sequence[TriedStep], *, num_cores: int) -> Verdict | None:
    """Return what the measured steps say of balancing; None unless some of them were decided, and others left in order.

    num_cores: the cores that decide and compute; 0 where deciding takes none from computing.

    Steps are compared by their seconds over those predicted for their samples in the data's order, so that batches may differ.
    Balanced ones must gain more than what deciding costs. Where none was balanced, nothing shows that others would not gain, and
    deciding goes on unless it costs something.
    """
    decided = [each.deciding_seconds for each in steps if each.deciding_seconds is not None]
    if len(decided) in (0, len(steps)):
        return None
    deciding = median(decided) / (median(each.seconds for each in steps) * num_cores) if num_cores else 0.0
    kinds = [[each for each in steps if each.is_balanced is is_balanced] for is_balanced in (True, False)]
    balanced, in_order = ([each.seconds / each.predicted_seconds for each in kind] for kind in kinds)
    if not balanced:
        return Verdict(deciding + prediction_error(in_order), keeps_order=deciding > 0, took=None)
    of_balanced, of_others = (median(each.seconds / each.in_order_seconds for each in kind) for kind in kinds)
    margin = deciding + prediction_error(balanced, in_order) + lost_by_exchanging(balanced, in_order)
    return Verdict(margin, keeps_order=of_balanced * (1 + deciding) >= of_others, took=of_balanced / of_others)


def lost_by_exchanging(balanced: Sequence[float], in_order: Sequence[float]) -> float:
    """Return the share of a step that exchanging samples costs beyond what is predicted; 0 unless all such steps show it.

    balanced, in_order: measured over predicted seconds of steps whose samples were exchanged, and of steps in the data's order.
    """
    return 1 - median(in_order) / median(balanced) if min(balanced) > max(in_order) else 0.0


def prediction_error(*kinds: Sequence[float]) -> float:
    """Return the median distance of measured over predicted seconds, which are given by kind of step, from a kind's median."""
    return median(abs(ratio / median(kind) - 1) for kind in kinds for ratio in kind)
