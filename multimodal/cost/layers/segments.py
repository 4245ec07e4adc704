"""Segments of layers, and the collectives of tensor parallel ranks that computations wait for in each."""

from enum import Enum
from typing import NamedTuple


class Exchange(Enum):
    """A collective of tensor parallel ranks."""

    GATHER = "gather"
    """Gathers rows before a product; under sequence parallelism only, without which every rank has them."""
    GATHER_AGAIN = "gather again"
    """Gathers the rows of a product whose weight gradient follows; beside another product, so that hardly anything is waited for.
    Under sequence parallelism, where the weight or an adapter of it is trained. A range of segments keeps the rows instead."""
    SUM = "sum"
    """After a product."""

    @property
    def mirrored(self) -> "Exchange":
        """The collective of a gradient, where this is that of the value."""
        return Exchange.GATHER if self is Exchange.SUM else Exchange.SUM


class Segment(NamedTuple):
    """A part of a layer that can run on its own, and its collectives in the order in which a pass comes to them."""

    name: str
    forward: tuple[Exchange, ...] = ()
    """Those in the midst of it."""
    backward: tuple[Exchange, ...] = ()
    behind: Exchange | None = None
    """The one between it and the next segment in a forward; a backward has its mirrored one there."""
    product: str = ""
    """The linear layer in it, of those that may have adapters."""


class SegmentWork(NamedTuple):
    """The computing of one segment, all tensor parallel ranks together."""

    num_weights: int
    traffic: tuple[float, float]
    """Bytes that elementwise work on one token moves in a forward and in a backward, as `LayerTraffic`."""
    attends: bool
    """True if tokens see each other in it."""
