"""The tokens of a packed microbatch that each context parallel rank holds."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from multimodal.attention.bitfield import BitfieldMask
from multimodal.attention.block_summary import count_block_workloads
from multimodal.balance.algorithms.distribute_tokens import TokenDistribution, distribute_tokens


class TokenShares(ABC):
    """The rank of every token; a rank holds its tokens in the order of the sequence: positions and labels follow by index."""

    num_ranks: int

    @cached_property
    @abstractmethod
    def owner_of_token(self) -> NDArray[np.int32]:
        """[num_tokens]: the rank that holds each token, counted in the context parallel group."""

    def positions_of(self, rank: int) -> NDArray[np.int64]:
        """Return the positions of a rank's tokens in the sequence, ascending."""
        return np.flatnonzero(self.owner_of_token == rank)

    @cached_property
    def num_tokens_of_rank(self) -> NDArray[np.int64]:
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
    def gathered_rows(self) -> NDArray[np.int64]:
        """[num_tokens]: the row of each token of the sequence in the concatenation of all ranks' padded shares."""
        by_owner = np.argsort(self.owner_of_token, kind="stable")
        first = np.cumsum(self.num_tokens_of_rank) - self.num_tokens_of_rank
        rows = np.empty(self.num_tokens, dtype=np.int64)
        owner = self.owner_of_token[by_owner]
        rows[by_owner] = owner * self.num_rows + np.arange(self.num_tokens) - first[owner]
        return rows


@dataclass(frozen=True, eq=False)
class WholeItemShares(TokenShares):
    """Items, each whole on one rank unless it is cut: only keys and values of cut items are gathered."""

    lengths: tuple[int, ...]
    """Tokens of every item, in the order of the sequence."""
    owners: NDArray[np.int32]
    """[num_items]: the rank that holds the whole item; below 0: it is cut."""
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

    def is_cut_token(self, rank: int) -> NDArray[np.bool_]:
        """[tokens of the rank]: True if the token's item is cut."""
        return np.repeat(self.owners < 0, self.lengths)[self.positions_of(rank)]


@dataclass(frozen=True, eq=False)
class RankShare:
    """The tokens of one rank; it holds them in the order of the sequence."""

    shares: TokenShares
    rank: int
    """Index in the context parallel group."""

    @property
    def num_tokens(self) -> int:
        """Tokens that this rank holds; may be 0."""
        return int(self.shares.num_tokens_of_rank[self.rank])

    @cached_property
    def positions(self) -> NDArray[np.int64]:
        """[num_tokens]: the positions of this rank's tokens in the sequence, ascending."""
        return self.shares.positions_of(self.rank)

    def local_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices of rows of the whole sequence among this rank's tokens.

        rows: [num_rows], int64, on the CPU. Returns (is_held: [num_rows], bool; local: [num_held], int64, in the order of rows).
        """
        local = torch.full((len(self.shares.owner_of_token),), -1)
        local[torch.from_numpy(self.positions)] = torch.arange(self.num_tokens)
        local_rows = local[rows]
        is_held = local_rows >= 0
        return is_held, local_rows[is_held]


def share_tokens(
    mask: BitfieldMask,
    *,
    num_ranks: int,
    method: TokenDistribution | str = TokenDistribution.LPT,
    block_size: int = 128,
    seed: int = 0,
) -> BlockShares:
    """Deal the blocks of a sequence so that every rank's attention takes nearly as long (Cornstarch, thesis 3.3.2.1).

    A function of the mask alone, which every rank knows from lengths, so no communication is needed. Raises AssignmentError or
    DataError if an argument is wrong.
    """
    workloads = count_block_workloads(mask, block_size=block_size).num_blocks
    owners = distribute_tokens(workloads, num_ranks=num_ranks, method=method, seed=seed)
    return BlockShares(owners, num_ranks, mask.num_tokens, block_size)
