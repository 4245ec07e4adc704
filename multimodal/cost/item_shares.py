"""Deals items to context parallel ranks where tokens attend only inside their item: in encoders and generators.

An item on one rank needs no keys and values of other ranks, so whole items are dealt, longest first. If that leaves a rank with
too much work, one of its items is cut, and the tokens of cut items even out the ranks.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heapreplace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from multimodal.cost.flops import UnitFlops, unit_flops
from multimodal.cost.unit_load import UnitLoad, add_loads, item_load, num_given
from multimodal.values.model_graph import ModelGraph, Role
from multimodal.values.sample_lengths import ItemLengths

CUT = -1
"""Owner of an item that several ranks share, in place of a rank."""
DEFAULT_BLOCK_SIZE = 128
"""Tokens that stay together when an item is cut."""
TOLERANCE = 0.05
"""Work above an even share that a rank may have before an item is cut, as a fraction of that share."""


@dataclass(frozen=True, slots=True, eq=False)
class ItemShares:
    """The ranks of one microbatch's items."""

    owners: NDArray[np.int32]
    """[num_items] the rank that has the whole item, or CUT."""
    block_owners: NDArray[np.int32]
    """[num_blocks] the rank of each block of the cut items' tokens, concatenated; the last block may be shorter."""


class RankLoad(NamedTuple):
    """One context parallel rank's part of a microbatch."""

    whole: UnitLoad
    """Load of the items that are on this rank as a whole."""
    cut: UnitLoad
    """Load of this rank's blocks of cut items; `num_squared` counts, for each token, the tokens of its item."""


@dataclass(frozen=True)
class ItemDealer:
    """Deals the items of a unit's microbatches to its context parallel ranks, by the FLOPs of forward and backward."""

    graph: ModelGraph
    unit: str
    num_ranks: int
    block_size: int = DEFAULT_BLOCK_SIZE

    def loads_of(self, items: Iterable[ItemLengths]) -> tuple[UnitLoad, ...]:
        """Return the load of each item."""
        is_generator = self.graph.unit(self.unit).role is Role.GENERATOR
        return tuple(item_load(item.num_tokens, num_given(item, is_generator=is_generator)) for item in items)

    def deal(self, items: Sequence[UnitLoad]) -> ItemShares:
        """Deal the items of one microbatch."""
        costs = [round(self._flops.of(item)) for item in items]
        lengths = [item.num_tokens for item in items]
        return share_items(lengths, costs=costs, num_ranks=self.num_ranks, block_size=self._block_size)

    def rank_loads(self, items: Sequence[UnitLoad]) -> tuple[RankLoad, ...]:
        """Return the part of one microbatch that each rank computes."""
        shares = self.deal(items)
        of_owner: dict[int, list[UnitLoad]] = {owner: [] for owner in (CUT, *range(self.num_ranks))}
        for item, owner in zip(items, shares.owners.tolist(), strict=True):
            of_owner[owner].append(item)
        cut = self._cut_loads(of_owner.pop(CUT), shares.block_owners)
        return tuple(RankLoad(add_loads(whole), part) for whole, part in zip(of_owner.values(), cut, strict=True))

    def work(self, load: RankLoad) -> float:
        """FLOPs of the work of one rank."""
        return self._flops.of(load.whole) + self._flops.of(load.cut)

    def _cut_loads(self, items: Sequence[UnitLoad], block_owners: NDArray[np.int32]) -> list[UnitLoad]:
        if not items:
            return [UnitLoad()] * self.num_ranks
        tokens: list[dict[int, int]] = [{} for _ in range(self.num_ranks)]
        owners = block_owners.tolist()
        for block, item, num_tokens in _cut_into_blocks([item.num_tokens for item in items], self.block_size):
            own = tokens[owners[block]]
            own[item] = own.get(item, 0) + num_tokens
        return [
            add_loads(_part(items[item], num_tokens) for item, num_tokens in own.items()) if own else UnitLoad() for own in tokens
        ]

    @property
    def _block_size(self) -> int:
        """Tokens of a block of an item; the whole item where items are not cut."""
        return sys.maxsize if self.graph.unit(self.unit).keeps_items_whole else self.block_size

    @cached_property
    def _flops(self) -> UnitFlops:
        return unit_flops(self.graph, self.unit, vocab_size=1)


def share_items(
    lengths: Sequence[int], *, costs: Sequence[int], num_ranks: int, block_size: int = DEFAULT_BLOCK_SIZE
) -> ItemShares:
    """Deal items whole, longest first onto the least loaded rank; cut items of ranks that have too much.

    lengths, costs: tokens and FLOPs of every item, in the order of the sequence. While a rank has more than 1 + TOLERANCE even
    shares, it gives up the shortest item that is enough, else its longest one; an item of a single block cannot be cut. The
    blocks of these items are dealt in the same way, so a rank that gets any has at most an even share and one block.

    Ties go by item and by rank, so that every rank decides alike. O(items log items + cut tokens + blocks log ranks).
    """
    even = sum(costs) / num_ranks
    items_of_rank = _place_longest_first(costs, num_ranks)
    owners = np.full(len(lengths), CUT, dtype=np.int32)
    loads: list[int] = []
    for rank, items in enumerate(items_of_rank):
        kept = _keep_whole(items, lengths=lengths, costs=costs, even=even, block_size=block_size)
        owners[kept] = rank
        loads.append(sum(costs[item] for item in kept))
    cut = np.flatnonzero(owners == CUT).tolist()
    return ItemShares(owners, _fill_up(loads, [lengths[item] for item in cut], [costs[item] for item in cut], block_size))


def _place_longest_first(costs: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Return the items of every rank, longest first."""
    items_of_rank: list[list[int]] = [[] for _ in range(num_ranks)]
    ranks = [(0, rank) for rank in range(num_ranks)]
    heapify(ranks)
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        load, rank = ranks[0]
        items_of_rank[rank].append(item)
        heapreplace(ranks, (load + costs[item], rank))
    return items_of_rank


def _keep_whole(items: Sequence[int], *, lengths: Sequence[int], costs: Sequence[int], even: float, block_size: int) -> list[int]:
    """Return the items that a rank keeps; items: longest first."""
    kept, load = list(items), sum(costs[item] for item in items)
    while load > (1 + TOLERANCE) * even:
        can_be_cut = [item for item in kept if lengths[item] > block_size]
        if not can_be_cut:
            break
        enough = [item for item in can_be_cut if load - costs[item] <= even]
        given_up = enough[-1] if enough else can_be_cut[0]
        kept.remove(given_up)
        load -= costs[given_up]
    return kept


def _fill_up(loads: Sequence[int], lengths: Sequence[int], costs: Sequence[int], block_size: int) -> NDArray[np.int32]:
    """Return the rank of each block of the cut items: longest first onto the least loaded rank."""
    of_block = [0] * -(-sum(lengths) // block_size)
    for block, item, num_tokens in _cut_into_blocks(lengths, block_size):
        of_block[block] += costs[item] * num_tokens // lengths[item]
    ranks = list(zip(loads, range(len(loads)), strict=True))
    heapify(ranks)
    owners = [0] * len(of_block)
    for block in sorted(range(len(of_block)), key=of_block.__getitem__, reverse=True):
        load, owners[block] = ranks[0]
        heapreplace(ranks, (load + of_block[block], owners[block]))
    return np.array(owners, dtype=np.int32)


def _cut_into_blocks(lengths: Sequence[int], block_size: int) -> Iterator[tuple[int, int, int]]:
    """Yield (block, item, tokens of the item in the block) of concatenated items."""
    position = 0
    for item, length in enumerate(lengths):
        end = position + length
        while position < end:
            block = position // block_size
            num_tokens = min(end, (block + 1) * block_size) - position
            yield block, item, num_tokens
            position += num_tokens


def _part(item: UnitLoad, num_tokens: int) -> UnitLoad:
    """Return the load of some of an item's tokens, each of which attends to the whole item."""
    return UnitLoad(num_tokens, num_tokens * item.num_tokens, num_tokens * item.num_outputs // item.num_tokens, 1)
