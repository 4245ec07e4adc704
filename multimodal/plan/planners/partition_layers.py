"""Cuts a list of layers into stages so that the slowest stage is as fast as can be, by dynamic programming.

Optimus, Appendix B and Entrain, Eq. 4.1: F(l, m) = min over j < l of max(F(j, m - 1), t_{j+1} + ... + t_l).
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from multimodal.values.errors import PlanError
from multimodal.values.model_graph import Unit

Range = tuple[int, int]


def partition_layers(seconds: Sequence[float], *, num_stages: int) -> tuple[Range, ...]:
    """Return `num_stages` half-open ranges that cover all layers, none empty, with the smallest possible slowest range.

    seconds: one per layer, not negative. Among equally good cuts, each prefix has the least sum of squares, which spreads the
    rest evenly. Raises PlanError when there are fewer layers than stages. O(layers^2 x stages).
    """
    if not 1 <= num_stages <= len(seconds):
        raise PlanError(f"{len(seconds)} layers cannot be cut into {num_stages} stages; use 1 to {len(seconds)}")
    return _table_of(tuple(map(float, seconds))).partition(num_stages)


def even_out_lanes(seconds: Sequence[float], ranges: Sequence[Range], *, num_lanes: int) -> tuple[Range, ...]:
    """Move layers between neighbouring ranges, which are dealt to lanes in turn, while that makes the busiest lane less busy.

    The smallest slowest range does not give even lanes: where one range holds a heavy layer (the head), its lane is as much
    busier in every microbatch. Of moves that help equally, the one with the least sum of squares of all ranges. No range becomes
    empty. O(moves x ranges).
    """
    bounds = [0, *(end for _, end in ranges)]
    total = np.concatenate(([0.0], np.cumsum(seconds)))

    def key(candidate: Sequence[int]) -> tuple[float, float]:
        of_range = np.diff(total[candidate])
        lanes = [float(of_range[lane::num_lanes].sum()) for lane in range(num_lanes)]
        return max(lanes), float((of_range**2).sum())

    best = key(bounds)
    while True:
        moved = [
            [*bounds[:index], bounds[index] + step, *bounds[index + 1 :]]
            for index in range(1, len(bounds) - 1)
            for step in (-1, 1)
            if bounds[index - 1] < bounds[index] + step < bounds[index + 1]
        ]
        found = min(((key(each), each) for each in moved), default=(best, bounds))
        if found[0] >= (best[0] * (1 - 1e-9), best[1]):
            return tuple(pairwise(bounds))
        best, bounds = found


class _Table:
    """F(., m) for m = 1, 2, ..., computed as far as asked for, so that all numbers of stages share one table."""

    def __init__(self, seconds: tuple[float, ...]) -> None:
        self.num_layers = len(seconds)
        total = np.concatenate(([0.0], np.cumsum(seconds)))
        ends = np.arange(self.num_layers + 1)
        self.of_range = np.where(ends[:, None] < ends[None, :], total[None, :] - total[:, None], np.inf)
        self.slowest = np.where(ends > 0, total, np.inf)
        self.squares = self.slowest**2
        self.cut_of: list[NDArray[np.int64]] = []

    def _extend(self) -> None:
        latest = np.maximum(self.slowest[:, None], self.of_range)
        best = latest.min(axis=0)
        with np.errstate(invalid="ignore"):
            is_best = latest <= best * (1 + 1e-12)
        spread = np.where(is_best, self.squares[:, None] + self.of_range**2, np.inf)
        cut = spread.argmin(axis=0)
        self.cut_of.append(cut)
        self.slowest, self.squares = best, spread[cut, np.arange(self.num_layers + 1)]

    def partition(self, num_stages: int) -> tuple[Range, ...]:
        """Follow the cuts back from the last layer."""
        while len(self.cut_of) < num_stages - 1:
            self._extend()
        bounds = [self.num_layers]
        for cut in reversed(self.cut_of[: num_stages - 1]):
            bounds.append(int(cut[bounds[-1]]))
        bounds.append(0)
        bounds.reverse()
        return tuple(pairwise(bounds))


@lru_cache(maxsize=256)
def _table_of(seconds: tuple[float, ...]) -> _Table:
    return _Table(seconds)


def partition_unit(unit: Unit, seconds: Sequence[float], *, num_stages: int) -> tuple[Range, ...]:
    """Partition a unit's layers; the first and the last one (embedding, projector, head) stay with a transformer layer.

    seconds: one per layer of `unit.layers`. Raises PlanError when there are fewer transformer layers than stages.
    """
    pieces = unit_pieces(unit)
    if not 1 <= num_stages <= len(pieces):
        raise PlanError(
            f"unit '{unit.name}': {len(pieces)} transformer layers cannot be cut into {num_stages} stages; use 1 to {len(pieces)}"
        )
    ranges = partition_layers([sum(seconds[first:end]) for first, end in pieces], num_stages=num_stages)
    return tuple((pieces[first][0], pieces[end - 1][1]) for first, end in ranges)


def unit_pieces(unit: Unit) -> tuple[Range, ...]:
    """Return the smallest ranges that a unit's layers are cut into: each holds one transformer layer."""
    num_layers = len(unit.layers)
    return tuple(
        (layer if layer > 1 else 0, layer + 1 if layer < num_layers - 2 else num_layers) for layer in range(1, num_layers - 1)
    )


def range_seconds(seconds: Sequence[float], ranges: Sequence[Range]) -> tuple[float, ...]:
    """Return the seconds of each range."""
    return tuple(sum(seconds[first:end]) for first, end in ranges)
