"""The tokens of a packed microbatch that each context parallel rank holds."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


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

    def local_rows(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Return the indices of rows of the whole sequence among this rank's tokens.

        rows: [num_rows]. Returns (is_held: [num_rows]; local: [num_held], in the order of rows).
        """
        local = np.full(len(self.shares.owner_of_token), -1)
        local[self.positions] = np.arange(self.num_tokens)
        local_rows = local[rows]
        is_held = local_rows >= 0
        return is_held, local_rows[is_held]
