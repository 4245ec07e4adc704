"""The tokens of a packed microbatch that each context parallel rank holds, and how whole items are dealt to ranks.

Where tokens attend only inside their item, in encoders and generators, an item on one rank needs no keys and values of other
ranks. So whole items are dealt, longest first. If that leaves a rank with too much work, one of its items is cut, and the tokens
of cut items even out the ranks. Sequences whose tokens all attend to each other are dealt in blocks by
`multimodal/attention/share_tokens.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heapreplace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from multimodal.cost.flops import UnitFlops, unit_flops
from multimodal.cost.unit_load import UnitLoad, add_loads, item_loads
from multimodal.values.arrays.rows import Bools, Integers
from multimodal.values.model_graph import ModelGraph
from multimodal.values.sample_lengths import ItemLengths

DEFAULT_BLOCK_SIZE = 128
"""Tokens that stay together when an item is cut."""
TOLERANCE = 0.05
"""Work above an even share that a rank may have before an item is cut, as a fraction of that share."""


class TokenShares(ABC):
    """The rank of every token; a rank holds its tokens in the order of the sequence: positions and labels follow by index."""

    num_ranks: int

    @cached_property
    @abstractmethod
    def owner_of_token(self) -> NDArray[np.int32]:
        """[num_tokens]: the rank that holds each token, counted in the context parallel group."""

    @cached_property
    def num_tokens_of_rank(self) -> Integers:
        """[num_ranks]."""
        return np.bincount(self.owner_of_token, minlength=self.num_ranks)


@dataclass(frozen=True, eq=False)
class BlockShares(TokenShares):
    """Blocks of tokens by owner. All keys and values are gathered."""

    owners: NDArray[np.int32]
    """[num_blocks]: rank of each block."""
    num_ranks: int
    num_tokens: int
    block_size: int
    """The last block may be shorter."""

    @cached_property
    def owner_of_token(self) -> NDArray[np.int32]:
        """[num_tokens]."""
        return np.repeat(self.owners, self.block_size)[: self.num_tokens]

    def blocks_of(self, rank: int) -> tuple[int, ...]:
        """Return a rank's blocks, ascending."""
        return tuple(np.flatnonzero(self.owners == rank).tolist())

    @property
    def num_rows(self) -> int:
        """Tokens of the fullest rank, to which every rank's share is padded if all must be equal."""
        return int(self.num_tokens_of_rank.max(initial=0))

    @cached_property
    def gathered_rows(self) -> Integers:
        """[num_tokens]: the row of each token of the sequence in the concatenation of all ranks' padded shares."""
        by_owner = np.argsort(self.owner_of_token, kind="stable")
        first = np.cumsum(self.num_tokens_of_rank) - self.num_tokens_of_rank
        rows = np.empty(self.num_tokens, dtype=np.int64)
        owner = self.owner_of_token[by_owner]
        rows[by_owner] = owner * self.num_rows + np.arange(self.num_tokens) - first[owner]
        return rows


CUT = -1
"""Owner of an item that several ranks share, in place of a rank."""


@dataclass(frozen=True, eq=False)
class WholeItemShares(TokenShares):
    """Items, each whole on one rank unless it is cut: only keys and values of cut items are gathered."""

    lengths: tuple[int, ...]
    """Tokens of every item, in the order of the sequence."""
    owners: NDArray[np.int32]
    """[num_items]: the rank that holds the whole item, or CUT."""
    cut: BlockShares
    """The cut items' tokens, concatenated."""
    num_ranks: int

    @cached_property
    def owner_of_token(self) -> NDArray[np.int32]:
        """[num_tokens]."""
        owners = np.repeat(self.owners, self.lengths)
        owners[owners < 0] = self.cut.owner_of_token
        return owners

    def lengths_of(self, rank: int) -> tuple[int, ...]:
        """Return the tokens of the items that a rank holds as a whole."""
        return tuple(np.array(self.lengths, dtype=np.int64)[self.owners == rank].tolist())

    @property
    def cut_lengths(self) -> tuple[int, ...]:
        """Tokens of the items that are cut."""
        return tuple(np.array(self.lengths, dtype=np.int64)[self.owners < 0].tolist())


@dataclass(frozen=True, eq=False)
class RankShare:
    """The tokens of one rank; it holds them in the order of the sequence."""

    shares: TokenShares
    rank: int

    @property
    def num_tokens(self) -> int:
        """Tokens that this rank holds; may be 0."""
        return int(self.shares.num_tokens_of_rank[self.rank])

    @cached_property
    def positions(self) -> Integers:
        """[num_tokens]: the positions of this rank's tokens in the sequence, ascending."""
        return np.flatnonzero(self.shares.owner_of_token == self.rank)

    def local_rows(self, rows: Integers) -> tuple[Bools, Integers]:
        """Return which rows of the sequence this rank holds, [num_rows], and the indices of those among its tokens, in order."""
        local = np.full(len(self.shares.owner_of_token), -1)
        local[self.positions] = np.arange(self.num_tokens)
        local_rows = local[rows]
        is_held = local_rows >= 0
        return is_held, local_rows[is_held]


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

    def deal(self, items: Sequence[UnitLoad]) -> WholeItemShares:
        """Deal the items of one microbatch (`item_loads`)."""
        lengths, costs = [item.num_tokens for item in items], [round(self._flops.of(item)) for item in items]
        is_whole = self.graph.unit(self.unit).keeps_items_whole
        return deal_items(lengths, costs=costs, num_ranks=self.num_ranks, block_size=self.block_size, keeps_whole=is_whole)

    def rank_loads(self, items: Sequence[ItemLengths]) -> tuple[RankLoad, ...]:
        """Return the part of one microbatch that each rank computes."""
        loads = item_loads(self.graph.unit(self.unit), items)
        shares = self.deal(loads)
        of_owner: dict[int, list[UnitLoad]] = {owner: [] for owner in (CUT, *range(self.num_ranks))}
        for item, owner in zip(loads, shares.owners.tolist(), strict=True):
            of_owner[owner].append(item)
        cut = of_owner.pop(CUT)
        num_tokens = np.zeros((self.num_ranks, len(cut)), np.int64)
        np.add.at(num_tokens, (shares.cut.owner_of_token, np.repeat(np.arange(len(cut)), shares.cut_lengths)), 1)
        return tuple(
            RankLoad(add_loads(whole), add_loads(_part(item, count) for item, count in zip(cut, counts, strict=True) if count))
            for whole, counts in zip(of_owner.values(), num_tokens.tolist(), strict=True)
        )

    def work(self, load: RankLoad) -> float:
        """FLOPs of the work of one rank."""
        return self._flops.of(load.whole) + self._flops.of(load.cut)

    @cached_property
    def _flops(self) -> UnitFlops:
        return unit_flops(self.graph, self.unit, vocab_size=1)


def deal_items(
    lengths: Sequence[int],
    *,
    costs: Sequence[int],
    num_ranks: int,
    block_size: int = DEFAULT_BLOCK_SIZE,
    keeps_whole: bool = False,
) -> WholeItemShares:
    """Deal items whole, longest first onto the least loaded rank; cut items of ranks that have too much.

    lengths, costs: tokens and FLOPs of every item, in the order of the sequence. While a rank has more than 1 + TOLERANCE even
    shares, it gives up the shortest item that is enough, else its longest one; an item of a single block cannot be cut. The
    blocks of these items are dealt in the same way, so a rank that gets any has at most an even share and one block. keeps_whole:
    True if no item is ever cut.

    Ties go by item and by rank, so that every rank decides alike. O(items log items + cut tokens + blocks log ranks).
    """
    owners, loads = np.array(_place_longest_first(costs, [0] * num_ranks), np.int32), [0] * num_ranks
    for rank in range(num_ranks):
        items = sorted(np.flatnonzero(owners == rank).tolist(), key=lambda item: -costs[item])
        kept = items if keeps_whole else _keep_whole(items, lengths, costs, sum(costs) / num_ranks, block_size)
        owners[list(set(items).difference(kept))] = CUT
        loads[rank] = sum(costs[item] for item in kept)
    cut = np.flatnonzero(owners == CUT)
    num_tokens = np.array(lengths, np.int64)[cut]
    of_block = [0] * -(-int(num_tokens.sum()) // block_size)
    position = 0
    for item, length in zip(cut.tolist(), num_tokens.tolist(), strict=True):
        end = position + length
        while position < end:
            block = position // block_size
            inside = min(end, (block + 1) * block_size) - position
            of_block[block] += costs[item] * inside // length
            position += inside
    blocks = BlockShares(np.array(_place_longest_first(of_block, loads), np.int32), num_ranks, position, block_size)
    return WholeItemShares(tuple(lengths), owners, blocks, num_ranks)


def _place_longest_first(costs: Sequence[int], loads: Sequence[int]) -> list[int]:
    """Return the rank of each item or block: longest first onto the least loaded one; loads: what each rank has before."""
    owners, ranks = [0] * len(costs), list(zip(loads, range(len(loads)), strict=True))
    heapify(ranks)
    for item in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        load, owners[item] = ranks[0]
        heapreplace(ranks, (load + costs[item], owners[item]))
    return owners


def _keep_whole(items: Sequence[int], lengths: Sequence[int], costs: Sequence[int], even: float, block_size: int) -> list[int]:
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


def _part(item: UnitLoad, num_tokens: int) -> UnitLoad:
    """Return the load of some of an item's tokens, each of which attends to the whole item."""
    return UnitLoad(num_tokens, num_tokens * item.num_tokens, num_tokens * item.num_outputs // item.num_tokens, 1)
