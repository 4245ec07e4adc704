"""One line of the comparison: a published figure, the simulated one, and the distance between them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """One published figure."""

    paper: str
    what: str
    published: tuple[float, float]
    """From, to; the same twice for a single figure."""
    simulated: float
    source: str
    """The place of the figure in the paper."""
    unit: str = "x"
    calibrated_speed: float | None = None
    """If the paper's cluster was calibrated on this figure: its computing speed over that of the cluster file. The row itself
    then says nothing."""
    is_bound: bool = False
    """True if the figure is an "up to": a simulated one inside it agrees."""
    not_counted: str = ""
    """The reason for which the figure is shown and not counted: its paper contradicts it, or its data is not at hand."""

    @property
    def is_compared(self) -> bool:
        """True if the figure counts: not calibrated on, no "up to", not left out for a reason."""
        return not (self.is_calibrated or self.is_bound or self.not_counted)

    @property
    def is_calibrated(self) -> bool:
        """True if the paper's cluster was calibrated on this figure."""
        return self.calibrated_speed is not None

    @property
    def error(self) -> float:
        """Signed distance to the nearest end of the published range, relative to that end; 0 inside."""
        low, high = self.published
        nearest = min(max(self.simulated, low), high)
        return self.simulated / nearest - 1

    def to_dict(self) -> Mapping[str, Any]:
        """Plain form."""
        return {
            "paper": self.paper,
            "what": self.what,
            "published": list(self.published),
            "simulated": self.simulated,
            "unit": self.unit,
            "error": self.error,
            "calibrated_speed": self.calibrated_speed,
            "is_bound": self.is_bound,
            "source": self.source,
            "not_counted": self.not_counted,
        }


def single(value: float) -> tuple[float, float]:
    """Return a figure as a range."""
    return value, value
