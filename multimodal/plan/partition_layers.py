"""Cuts a unit's layers into pipeline stages so that the slowest is as fast as possible (Cornstarch, thesis 3.4.1)."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from multimodal.values.errors import PlanError
from multimodal.values.model_graph import Unit

Range = tuple[int, int]
"""First layer, and the layer after the last."""


def partition_layers(seconds: Sequence[float], *, num_stages: int) -> tuple[Range, ...]:
    """Return `num_stages` half-open ranges that cover all layers, none empty, with the smallest possible slowest range.

    seconds: one per layer, not negative. Among equally good cuts, each prefix has the least sum of squares, which spreads the
    rest evenly. num_stages: at most the number of layers. O(layers^2 x stages).
    """
    return _table_of(tuple(map(float, seconds))).partition(num_stages)


class _Table:
    """F(., m) for m = 1, 2, ..., computed on demand, so that all numbers of stages share one table."""

    def __init__(self, seconds: tuple[float, ...]) -> None:
        self.num_layers = len(seconds)
        total = np.concatenate(([0.0], np.cumsum(seconds)))
        ends = np.arange(self.num_layers + 1)
        self.of_range = np.where(ends[:, None] < ends[None, :], total[None, :] - total[:, None], np.inf)
        self.slowest = np.where(ends > 0, total, np.inf)
        self.squares = self.slowest**2
        self.cut_of: list[NDArray[np.int64]] = []

    def partition(self, num_stages: int) -> tuple[Range, ...]:
        """Extend the table to the number of stages, and trace the cuts back from the last layer."""
        while len(self.cut_of) < num_stages - 1:
            latest = np.maximum(self.slowest[:, None], self.of_range)
            best = latest.min(axis=0)
            with np.errstate(invalid="ignore"):
                is_best = latest <= best * (1 + 1e-12)
            spread = np.where(is_best, self.squares[:, None] + self.of_range**2, np.inf)
            cut = spread.argmin(axis=0)
            self.cut_of.append(cut)
            self.slowest, self.squares = best, spread[cut, np.arange(self.num_layers + 1)]
        bounds = [self.num_layers]
        for cut in reversed(self.cut_of[: num_stages - 1]):
            bounds.append(int(cut[bounds[-1]]))
        return tuple(pairwise((0, *reversed(bounds))))


_table_of = lru_cache(maxsize=256)(_Table)


def partition_unit(unit: Unit, seconds: Sequence[float], *, num_stages: int) -> tuple[Range, ...]:
    """Partition by the seconds of layers; outermost ones stay with a transformer layer. Raises PlanError if these are too few."""
    pieces = unit_pieces(unit)
    if not 1 <= num_stages <= len(pieces):
        raise PlanError(
            f"unit '{unit.name}': {len(pieces)} transformer layers cannot be cut into {num_stages} stages; use 1 to {len(pieces)}"
        )
    ranges = partition_layers([sum(seconds[first:end]) for first, end in pieces], num_stages=num_stages)
    return tuple((pieces[first][0], pieces[end - 1][1]) for first, end in ranges)


def unit_pieces(unit: Unit) -> tuple[Range, ...]:
    """Return the smallest ranges that a unit's layers may be cut into: each holds one transformer layer, or a whole module."""
    num_layers = len(unit.layers)
    if unit.module is not None:
        return ((0, num_layers),)
    return tuple(
        (layer if layer > 1 else 0, layer + 1 if layer < num_layers - 2 else num_layers) for layer in range(1, num_layers - 1)
    )


def range_seconds(seconds: Sequence[float], ranges: Sequence[Range]) -> tuple[float, ...]:
    """Return the seconds of each range."""
    return tuple(sum(seconds[first:end]) for first, end in ranges)
