"""Segments of layers, and the tensor parallel collectives for which computations wait in each segment."""

from enum import Enum
from typing import NamedTuple


class Exchange(Enum):
    """A collective of tensor parallel ranks."""

    GATHER = "gather"
    """Gathers rows before a product; only under sequence parallelism, as all ranks have all rows without it."""
    GATHER_AGAIN = "gather again"
    """Gathers the rows of a product again for its weight gradient, beside another product, so that ranks hardly wait for it. Only
    under sequence parallelism, if the weight or its adapter is trained. A range of segments keeps the rows instead."""
    SUM = "sum"
    """Sums the results of a product."""

    @property
    def mirrored(self) -> "Exchange":
        """The collective of a gradient whose value has this collective in the forward."""
        return Exchange.GATHER if self is Exchange.SUM else Exchange.SUM


class Segment(NamedTuple):
    """A part of a layer that can run on its own, and its collectives in the order of a pass."""

    name: str
    forward: tuple[Exchange, ...] = ()
    """Collectives inside the segment."""
    backward: tuple[Exchange, ...] = ()
    behind: Exchange | None = None
    """The collective between this segment and the next one in a forward; a backward has the mirrored one there."""
    product: str = ""
    """The linear layer in the segment, if it may have adapters."""


class SegmentWork(NamedTuple):
    """The computing of one segment, all tensor parallel ranks together."""

    num_weights: int
    traffic: tuple[float, float]
    """Bytes per token that elementwise work moves in a forward and in a backward, as in `LayerTraffic`."""
    attends: bool
    """True if tokens attend to each other in it."""
