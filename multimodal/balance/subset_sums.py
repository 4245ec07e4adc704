"""Which sums the subsets of some loads have, and which subset comes closest to a target."""

from bisect import bisect_left
from collections.abc import Sequence


class SubsetSums:
    """The reachable sums up to a limit, by dynamic programming over the loads.

    Entrain (4.5.2) rounds loads and fills a table over the rounded sum. Here the table is a sorted list of true sums, of which
    one per cell of `limit / max_sums` is kept once there are more than `max_sums` (trimming; Ibarra and Kim 1975): nothing is
    lost as long as there are fewer, which holds for log2(max_sums) loads of any size and for integers with a limit below
    `max_sums`; the sum of a subset is never rounded; and one list serves all partners of a microbatch. O(loads x max_sums).
    """

    def __init__(self, loads: Sequence[float], *, limit: float, max_sums: int) -> None:
        self._sum, self._before, self._item = [0.0], [-1], [-1]
        self._nodes = [0]
        for item, load in enumerate(loads):
            self._add(item, load, limit, max_sums)

    def _add(self, item: int, load: float, limit: float, max_sums: int) -> None:
        """Merge the sums without and with one load; of equal sums the one without it stays."""
        old = [(self._sum[node], node, False) for node in self._nodes]
        new = [(total + load, node, True) for total, node, _ in old if total + load <= limit]
        merged = sorted(old + new, key=lambda each: (each[0], each[2]))
        kept = [each for index, each in enumerate(merged) if index == 0 or each[0] != merged[index - 1][0]]
        if len(kept) > max_sums:
            width = limit / max_sums
            cells = [int(each[0] / width) for each in kept]
            kept = [each for index, each in enumerate(kept) if index == 0 or cells[index] != cells[index - 1]]
        self._nodes = [self._append(total, node, item) if is_new else node for total, node, is_new in kept]

    def _append(self, total: float, before: int, item: int) -> int:
        self._sum.append(total)
        self._before.append(before)
        self._item.append(item)
        return len(self._sum) - 1

    def closest(self, target: float) -> int:
        """Return the subset whose sum is closest to the target, the smaller sum of two that are equally close."""
        index = bisect_left(self._nodes, target, key=self._sum.__getitem__)
        if index == len(self._nodes):
            return self._nodes[-1]
        if index > 0 and target - self._sum[self._nodes[index - 1]] <= self._sum[self._nodes[index]] - target:
            return self._nodes[index - 1]
        return self._nodes[index]

    def sum_of(self, subset: int) -> float:
        """Return the sum of a subset."""
        return self._sum[subset]

    def items_of(self, subset: int) -> list[int]:
        """Return the indices of a subset's loads, the last first."""
        items = []
        while subset > 0:
            items.append(self._item[subset])
            subset = self._before[subset]
        return items
