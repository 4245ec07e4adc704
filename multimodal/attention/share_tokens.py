"""Deals the blocks of a masked sequence to context parallel ranks by the work that they are."""

from multimodal.attention.bitfield import BitfieldMask
from multimodal.attention.block_summary import count_block_workloads
from multimodal.balance.algorithms.distribute_tokens import TokenDistribution, distribute_tokens
from multimodal.cost.tokens.token_shares import BlockShares


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
