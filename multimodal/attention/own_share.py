"""The tokens of a packed microbatch that one rank of context parallelism holds."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from multimodal.attention.token_shares import TokenShares


@dataclass(frozen=True, eq=False)
class OwnShare:
    """One rank's part of `shares`; it holds its tokens in the order of the sequence."""

    shares: TokenShares
    rank: int
    """In the context parallel group."""

    @property
    def num_tokens(self) -> int:
        """Tokens that this rank holds; may be 0."""
        return int(self.shares.num_tokens_of_rank[self.rank])

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Blocks that this rank holds, ascending."""
        return self.shares.blocks_of(self.rank)

    @cached_property
    def positions(self) -> NDArray[np.int64]:
        """[num_tokens]: where this rank's tokens stand in the sequence, ascending."""
        return self.shares.positions_of(self.rank)

    def local_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Where rows of the whole sequence are among this rank's tokens.

        rows: [num_rows], int64, on the CPU. Returns (is_held: [num_rows], bool; local: [num_held], int64, in the order of rows).
        """
        local = torch.full((self.shares.num_tokens,), -1)
        local[torch.from_numpy(self.positions)] = torch.arange(self.num_tokens)
        found = local[rows]
        is_held = found >= 0
        return is_held, found[is_held]
