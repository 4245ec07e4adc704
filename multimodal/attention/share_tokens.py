"""Deals the blocks of a masked sequence to the ranks of context parallelism by the work that they are."""

from enum import StrEnum
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from multimodal.attention.bitfield import BitfieldMask
from multimodal.attention.block_summary import count_block_workloads
from multimodal.cost.token_shares import BlockShares
from multimodal.kernels import kernels

MAX_EXCHANGES = 1000
"""A bound on the time that was sufficient in every measured case."""


class TokenDistribution(StrEnum):
    """The rule by which ranks get blocks of tokens."""

    BY_ITEM = "by-item"
    """Whole items, and blocks of items that are too long, where tokens attend only inside their item (`deal_items`); blocks
    of other sequences as in LPT."""
    LPT = "lpt"
    """By workload, longest first (Cornstarch, thesis Alg. 1), followed by exchanges while they help the most loaded rank."""
    ZIGZAG = "zigzag"
    """Rank i gets chunks i and 2 n - 1 - i of 2 n: balances one causal sequence exactly (Llama 3)."""
    RING = "ring"
    """Rank i gets chunk i of n."""
    RANDOM = "random"
    """A permutation from a seed; nearly balanced if there are many more blocks than ranks (Cornstarch, paper 5.3)."""


def share_tokens(
    mask: BitfieldMask,
    *,
    num_ranks: int,
    method: TokenDistribution | str = TokenDistribution.LPT,
    block_size: int = 128,
    seed: int = 0,
) -> BlockShares:
    """Deal blocks so that every rank's attention takes as long (Cornstarch, thesis 3.3.2.1), from the mask alone."""
    workloads = count_block_workloads(mask, block_size=block_size).num_blocks
    owners = distribute_tokens(workloads, num_ranks=num_ranks, method=method, seed=seed)
    return BlockShares(owners, num_ranks, mask.num_tokens, block_size)


def distribute_tokens(
    block_workloads: NDArray[np.integer],
    *,
    num_ranks: int,
    method: TokenDistribution | str = TokenDistribution.LPT,
    seed: int = 0,
) -> NDArray[np.int32]:
    """Return the rank of every block of tokens, [num_blocks].

    block_workloads: [num_blocks], whole numbers of at least 0 whose sum fits int64: key blocks to compute or pairs to evaluate,
        as `count_block_workloads` counts them. All methods but LPT only use their number.
    num_ranks: at least 1; with more ranks than blocks some get none. seed: of RANDOM.

    LPT gives every rank equally many blocks, or as nearly as possible. The paper's listing considers only the workload of
    attention; but the rest of a layer costs time and memory per token, and sharded tensors of one shape communicate best. The
    other methods' counts are equal anyway: RANDOM and RING within one block, ZIGZAG within two.

    LPT puts each block, longest first, on the least loaded rank. Then the most loaded rank exchanges a block for a shorter one of
    the least loaded rank: the pair that brings both loads closest to each other. It stops when no rank can help the most loaded
    one, or when that is within 1 / 10,000 of the minimum. Equal workloads are ordered by block, equal loads by rank. It runs as a
    C++ kernel in O(blocks log blocks + exchanges (ranks log ranks + blocks per rank)); without the kernels, nothing is exchanged.
    """
    workloads = np.asarray(block_workloads).astype(np.int64)
    match TokenDistribution(method):
        case TokenDistribution.BY_ITEM | TokenDistribution.LPT:
            if kernels is None:
                return _place_longest_first(workloads, num_ranks=num_ranks)
            options = {"num_ranks": num_ranks, "max_exchanges": MAX_EXCHANGES}
            return kernels.distribute_longest_first(workloads, has_equal_counts=True, **options)
        case TokenDistribution.ZIGZAG:
            chunks = _chunk_of_block(len(workloads), 2 * num_ranks)
            return np.minimum(chunks, 2 * num_ranks - 1 - chunks).astype(np.int32)
        case TokenDistribution.RING:
            return _chunk_of_block(len(workloads), num_ranks)
        case TokenDistribution.RANDOM:
            owners = np.arange(len(workloads), dtype=np.int32) % np.int32(num_ranks)
            return np.random.default_rng(seed).permutation(owners)


def _chunk_of_block(num_blocks: int, num_chunks: int) -> NDArray[np.int32]:
    """Cut blocks into chunks of consecutive ones whose sizes differ by one at most."""
    return (np.arange(num_blocks, dtype=np.int64) * num_chunks // max(1, num_blocks)).astype(np.int32)


def _place_longest_first(workloads: NDArray[np.int64], *, num_ranks: int) -> NDArray[np.int32]:
    """Put each block, longest first, on the least loaded rank that has room for it."""
    fair_count, num_extra = divmod(len(workloads), num_ranks)
    owners, counts = np.empty(len(workloads), dtype=np.int32), [0] * num_ranks
    open_ranks = [(0, rank) for rank in range(num_ranks)]
    for block in np.argsort(-workloads, kind="stable").tolist():
        load, rank = heappop(open_ranks)
        while counts[rank] >= fair_count + (num_extra > 0):
            load, rank = heappop(open_ranks)
        num_extra -= counts[rank] == fair_count
        counts[rank] += 1
        owners[block] = rank
        heappush(open_ranks, (load + int(workloads[block]), rank))
    return owners
