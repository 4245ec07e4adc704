"""Local search on a partition: the costliest bin gives an item to a cheaper bin, or swaps one with it."""

from bisect import insort
from collections.abc import Iterator, Sequence
from typing import NamedTuple

GOOD_ENOUGH = 1000
"""Inverse tolerance: a costliest bin that exceeds the lower bound by less than 1 / GOOD_ENOUGH is not improved."""


class BinLimits(NamedTuple):
    """Limits that a partition must observe, and the cost below which no bin can be the costliest."""

    num_bins: int
    max_items_per_bin: int
    bound: int


class _Exchange(NamedTuple):
    """The costly bin gives its item at index `give` for the cheap bin's at `take`, or for nothing if that is past the end."""

    costlier: int
    """Cost of the costlier of the two bins afterwards."""
    give: int
    take: int


class _Pair(NamedTuple):
    """A costly and a cheap bin with the items (ranks, ascending) that they hold."""

    costly_cost: int
    cheap_cost: int
    givers: list[int]
    takers: list[int]
    may_move: bool
    """True if the cheap bin has room for another item."""


def refine_by_exchange(
    bin_of_item: Sequence[int],
    additive: Sequence[int],
    padded: Sequence[int] | None,
    *,
    limits: BinLimits,
    num_steps: int,
) -> tuple[list[int], int]:
    """Return a partition whose costliest bin is no costlier than in the given one, and the rest of the budget.

    The costliest bin is repeatedly relieved: the cheapest bins are tried first, and of the first bin that allows an exchange
    after which both cost less than the costliest did, the best exchange is made. Ends when the costliest bin is within a
    thousandth of the bound, when no exchange helps it, or when the budget is spent.

    bin_of_item, additive, padded: per item, longest first; a bin costs the sum of `additive` plus its number of items times
        its largest `padded` (None: nothing is padded).
    num_steps: items to examine (pairs of items if there is padding); a count rather than a time, so that all ranks agree.

    Of equally cheap bins the lower index is taken, of equally costly ones the higher, and of equal exchanges the first by the
    given, then the taken item. An exchange takes O(items in two bins), or its square if there is padding.
    """
    members: list[list[int]] = [[] for _ in range(limits.num_bins)]
    for item, index in enumerate(bin_of_item):
        members[index].append(item)
    by_cost = sorted((bin_cost(items, additive, padded), index) for index, items in enumerate(members))
    while num_steps > 0 and by_cost[-1][0] > limits.bound + limits.bound // GOOD_ENOUGH:
        cost, costly = by_cost[-1]
        for cheap_cost, cheap in by_cost:
            if cheap_cost >= cost or num_steps <= 0:
                return _bins(members), num_steps
            pair = _Pair(cost, cheap_cost, members[costly], members[cheap], len(members[cheap]) < limits.max_items_per_bin)
            num_steps -= _num_looks(pair, padded)
            offers = _differences(pair, additive) if padded is None else _all_pairs(pair, additive, padded)
            best = min(offers, key=lambda offer: offer.costlier, default=None)
            if best is not None and best.costlier < cost:
                break
        else:
            return _bins(members), num_steps
        by_cost = [entry for entry in by_cost if entry[1] not in (costly, cheap)]
        given = members[costly].pop(best.give)
        if best.take < len(members[cheap]):
            insort(members[costly], members[cheap].pop(best.take))
        insort(members[cheap], given)
        for index in (costly, cheap):
            insort(by_cost, (bin_cost(members[index], additive, padded), index))
    return _bins(members), num_steps


def bin_cost(items: Sequence[int], additive: Sequence[int], padded: Sequence[int] | None) -> int:
    """Return the cost of a bin of these items, longest first: their additive costs, and their number times the largest padded."""
    padding = len(items) * padded[items[0]] if padded is not None and items else 0
    return sum(additive[item] for item in items) + padding


def _num_looks(pair: _Pair, padded: Sequence[int] | None) -> int:
    if padded is None:
        return len(pair.givers) + len(pair.takers)
    return len(pair.givers) * (len(pair.takers) + pair.may_move)


def _differences(pair: _Pair, additive: Sequence[int]) -> Iterator[_Exchange]:
    """Yield, per given item, the two exchanges closest to making both bins equal; passes through both lists once."""
    difference = pair.costly_cost - pair.cheap_cost
    takes = [additive[item] for item in pair.takers] + [0]
    take = 0
    for give, item in enumerate(pair.givers):
        while take < len(pair.takers) and 2 * (additive[item] - takes[take]) < difference:
            take += 1
        for index in (take, take - 1):
            if 0 <= index < len(pair.takers) + pair.may_move:
                moved = additive[item] - takes[index]
                yield _Exchange(max(pair.costly_cost - moved, pair.cheap_cost + moved), give, index)


def _all_pairs(pair: _Pair, additive: Sequence[int], padded: Sequence[int]) -> Iterator[_Exchange]:
    """Yield every exchange: padding depends on the longest item, so the best exchange may be anywhere."""
    for give, given in enumerate(pair.givers):
        others = pair.givers[:give] + pair.givers[give + 1 :]
        for take in range(len(pair.takers) + pair.may_move):
            costly = sorted(others + pair.takers[take : take + 1])
            cheap = sorted([given, *pair.takers[:take], *pair.takers[take + 1 :]])
            yield _Exchange(max(bin_cost(costly, additive, padded), bin_cost(cheap, additive, padded)), give, take)


def _bins(members: Sequence[Sequence[int]]) -> list[int]:
    bin_of_item = {item: index for index, items in enumerate(members) for item in items}
    return [bin_of_item[item] for item in range(len(bin_of_item))]
