"""Search for the best partition of few items, limited by a count of the bins that it examines."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import add
from typing import NamedTuple

from multimodal.balance.algorithms.exchange_refinement import GOOD_ENOUGH, BinLimits, bin_cost

STEPS_PER_GROUP = 1024
"""Most bins that are examined for one group of two or three."""


class _Bin(NamedTuple):
    cost: int = 0
    num_items: int = 0
    padding: int = 0
    """Padded length of its longest item, which is the minimal cost of each further item."""


def search_partition(
    bin_of_item: Sequence[int], additive: Sequence[int], padded: Sequence[int] | None, *, limits: BinLimits, num_steps: int
) -> list[int]:
    """Return a partition whose costliest bin is no costlier than in the given one.

    The items of the costliest bin and one other bin are repeatedly divided anew over these two such that both cost less (branch
    and bound); if no other bin helps, of two other bins; then the items of all bins. Ends when the costliest bin is within a
    thousandth of the bound, when none of these helps, or when the budget is spent. If the budget is not spent, the result is
    optimal.

    bin_of_item, additive, padded: as in `refine_by_exchange`, longest first. num_steps: number of bins to examine. Other bins
    come in ascending order of cost; equal ones by index. Of equally costly bins the last one is relieved.
    """
    members: list[list[int]] = [[] for _ in range(limits.num_bins)]
    for item, index in enumerate(bin_of_item):
        members[index].append(item)
    while num_steps > 0:
        costs = [bin_cost(items, additive, padded) for items in members]
        if max(costs) <= limits.bound + limits.bound // GOOD_ENOUGH:
            break
        *others, costliest = sorted(range(limits.num_bins), key=costs.__getitem__)
        for group in (*_small_groups(others), others):
            bins = (*group, costliest)
            items = sorted(item for index in bins for item in members[index])
            division = _Division(items, additive, padded, limits, num_bins=len(bins), target=costs[costliest])
            num_steps = division.run(num_steps, last_step=0 if group is others else max(0, num_steps - STEPS_PER_GROUP))
            if division.best or num_steps <= 0:
                break
        if not division.best:
            break
        for index in bins:
            members[index] = []
        for item, place in zip(items, division.best, strict=True):
            members[bins[place]].append(item)
    found = {item: index for index, items in enumerate(members) for item in items}
    return [found[item] for item in range(len(found))]


def _small_groups(bins: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield every single bin, then every pair; pairs with early bins first."""
    yield from ((one,) for one in bins)
    yield from ((bins[one], bins[two]) for two in range(1, len(bins)) for one in range(two))


class _Division:
    """Branch and bound: items go, costliest first, into the bin that is cheapest with them, then into the next cheapest."""

    def __init__(
        self,
        items: Sequence[int],
        additive: Sequence[int],
        padded: Sequence[int] | None,
        limits: BinLimits,
        *,
        num_bins: int,
        target: int,
    ) -> None:
        self._additive = [additive[item] for item in items]
        self._padding = [padded[item] if padded is not None else 0 for item in items]
        self._remaining: list[int] = list(accumulate(map(add, reversed(self._additive), reversed(self._padding)), initial=0))[
            ::-1
        ]
        self._limits, self._is_limited = limits, limits.max_items_per_bin < len(additive)
        self._target = target
        self._bins = [_Bin()] * num_bins
        self._placed = [0] * len(items)
        self.best: list[int] = []
        """The bin of each item, once a better division is found."""

    def run(self, num_steps: int, *, last_step: int) -> int:
        """Search for divisions that cost less than the target and each other; returns the number of steps left."""
        self._num_steps, self._last_step = num_steps, last_step
        self._place(0, 0)
        return self._num_steps

    def _place(self, at: int, costliest: int) -> None:
        if at == len(self._placed):
            self._target, self.best = costliest, self._placed.copy()
            return
        self._num_steps -= len(self._bins)
        if not self._has_room(at):
            return
        for after, index in self._choices(at):
            if max(after, costliest) >= self._target or self._target <= self._limits.bound or self._num_steps <= self._last_step:
                return
            before = self._bins[index]
            self._bins[index] = _Bin(after, before.num_items + 1, before.padding if before.num_items else self._padding[at])
            self._placed[at] = index
            self._place(at + 1, max(costliest, after))
            self._bins[index] = before

    def _choices(self, at: int) -> list[tuple[int, int]]:
        """Return (cost afterwards, bin), cheapest first; only one of several bins in the same state, which are equivalent."""
        states: dict[tuple[int, int, int], int] = {}
        for index, current in enumerate(self._bins):
            after = current.cost + self._additive[at] + (current.padding if current.num_items else self._padding[at])
            if after < self._target and current.num_items < self._limits.max_items_per_bin:
                states.setdefault((after, current.padding, current.num_items if self._is_limited else 0), index)
        return sorted((state[0], index) for state, index in states.items())

    def _has_room(self, at: int) -> bool:
        """Return True if bins have room for the remaining items; a bin with less room than the cheapest item has none."""
        cheapest = self._additive[-1] + self._padding[-1]
        left = [self._target - 1 - current.cost for current in self._bins]
        return self._remaining[at] <= sum(room for room in left if room >= cheapest)
