"""Which tokens of a packed microbatch each rank of context parallelism holds."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from multimodal.attention.bitfield import BitfieldMask
from multimodal.attention.block_summary import count_block_workloads
from multimodal.balance.algorithms.distribute_tokens import TokenDistribution, distribute_tokens


@dataclass(frozen=True, eq=False)
class TokenShares:
    """Blocks of tokens by owner; a rank holds its blocks in the order of the sequence: positions and labels follow by index."""

    owners: NDArray[np.int32]
    """[num_blocks]: rank of each block, counted in the context parallel group."""
    num_ranks: int
    num_tokens: int
    block_size: int
    """The last block may be shorter."""

    def blocks_of(self, rank: int) -> tuple[int, ...]:
        """A rank's blocks, ascending."""
        return tuple(np.flatnonzero(self.owners == rank).tolist())

    def positions_of(self, rank: int) -> NDArray[np.int64]:
        """Where a rank's tokens stand in the sequence, ascending."""
        return np.flatnonzero(self._owner_of_token == rank)

    @cached_property
    def num_tokens_of_rank(self) -> NDArray[np.int64]:
        """[num_ranks]."""
        return np.bincount(self._owner_of_token, minlength=self.num_ranks)

    @property
    def num_rows(self) -> int:
        """Tokens of the fullest rank: what every rank's share is padded to where all must be alike."""
        return int(self.num_tokens_of_rank.max(initial=0))

    @cached_property
    def gathered_rows(self) -> NDArray[np.int64]:
        """[num_tokens]: where each token of the sequence is among all ranks' shares, padded and laid end to end."""
        by_owner = np.argsort(self._owner_of_token, kind="stable")
        first = np.cumsum(self.num_tokens_of_rank) - self.num_tokens_of_rank
        rows = np.empty(self.num_tokens, dtype=np.int64)
        owner = self._owner_of_token[by_owner]
        rows[by_owner] = owner * self.num_rows + np.arange(self.num_tokens) - first[owner]
        return rows

    @cached_property
    def _owner_of_token(self) -> NDArray[np.int32]:
        return np.repeat(self.owners, self.block_size)[: self.num_tokens]


def share_tokens(
    mask: BitfieldMask,
    *,
    num_ranks: int,
    method: TokenDistribution | str = TokenDistribution.LPT,
    block_size: int = 128,
    seed: int = 0,
) -> TokenShares:
    """Deal the blocks of a sequence so that every rank's attention takes about as long (Cornstarch, thesis 3.3.2.1).

    A function of the mask alone, which every rank knows from lengths: no rank asks another. Raises AssignmentError or DataError
    when an argument is wrong.
    """
    workloads = count_block_workloads(mask, block_size=block_size).num_blocks
    owners = distribute_tokens(workloads, num_ranks=num_ranks, method=method, seed=seed)
    return TokenShares(owners, num_ranks, mask.num_tokens, block_size)
