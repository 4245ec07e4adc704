"""Segments of layers, and the collectives of tensor parallel ranks that computations wait for in each."""

from enum import Enum
from typing import NamedTuple


class Exchange(Enum):
    """A collective of tensor parallel ranks."""

    GATHER = "gather"
    """Of rows, before a product; under sequence parallelism only, without which every rank has them."""
    GATHER_AGAIN = "gather again"
    """Of the rows of a product whose weight gradient follows; beside another product, so that as good as nothing is waited for.
    Under sequence parallelism, where the weight is trained. A range of segments keeps the rows instead."""
    SUM = "sum"
    """After a product, at the end of its segment; what follows is light: norms and residual sums."""


class Segment(NamedTuple):
    """A part of a layer that can run on its own, and its collectives in the order in which a pass comes to them."""

    name: str
    forward: tuple[Exchange, ...] = ()
    backward: tuple[Exchange, ...] = ()


class SegmentWork(NamedTuple):
    """The computing of one segment, all tensor parallel ranks together."""

    num_weights: int
    traffic: tuple[float, float]
    """Bytes that elementwise work on one token moves in a forward and in a backward, as `LayerTraffic`."""
    attends: bool
    """True if tokens see each other in it."""


COLUMN_FORWARD = (Exchange.GATHER,)
COLUMN_BACKWARD = (Exchange.GATHER_AGAIN, Exchange.SUM)
"""A product whose weight is split by outputs."""
ROW_FORWARD = (Exchange.SUM,)
ROW_BACKWARD = (Exchange.GATHER,)
"""A product whose weight is split by inputs."""
