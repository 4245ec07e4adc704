"""Distributes blocks of tokens over the ranks of context parallelism."""

from enum import StrEnum
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from multimodal.kernels import kernels
from multimodal.values.errors import AssignmentError

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


def distribute_tokens(
    block_workloads: NDArray[np.integer],
    *,
    num_ranks: int,
    method: TokenDistribution | str = TokenDistribution.LPT,
    has_equal_counts: bool = True,
    seed: int = 0,
) -> NDArray[np.int32]:
    """Return the rank of every block of tokens.

    block_workloads: [num_blocks], whole numbers of at least 0: key blocks to compute or pairs to evaluate, as
        `attention.block_summary.count_block_workloads` counts them. All methods but LPT only use their number.
    num_ranks: at least 1; with more ranks than blocks some get none.
    has_equal_counts: LPT gives every rank equally many blocks, or as nearly as possible. The paper's listing considers only the
    workload of attention; but the rest of a layer costs time and memory per token, and sharded tensors of one shape communicate
    best, so equal counts are the default. False is the listing. The other methods' counts are equal anyway: RANDOM and RING
    within one block, ZIGZAG within two.
    seed: of RANDOM.

    LPT puts each block, longest first, on the least loaded rank. Then the most loaded rank exchanges a block for a shorter one of
    the least loaded rank: the pair that brings both loads closest to each other. It stops when no rank can help the most loaded
    one, or when that is within 1 / 10,000 of the minimum. Equal workloads are ordered by block, equal loads by rank.

    Returns [num_blocks], int32, the same on every rank. LPT runs as a C++ kernel in O(blocks log blocks + exchanges (ranks log
    ranks + blocks per rank)); without the kernels, nothing is exchanged. Raises AssignmentError if an argument is wrong.
    """
    workloads = _read_workloads(block_workloads)
    if num_ranks < 1:
        raise AssignmentError(f"cannot distribute {len(workloads)} blocks of tokens over {num_ranks} ranks; expected at least 1")
    match _read_method(method):
        case TokenDistribution.BY_ITEM | TokenDistribution.LPT:
            if kernels is None:
                return _place_longest_first(workloads, num_ranks=num_ranks, has_equal_counts=has_equal_counts)
            return kernels.distribute_longest_first(
                workloads, num_ranks=num_ranks, has_equal_counts=has_equal_counts, max_exchanges=MAX_EXCHANGES
            )
        case TokenDistribution.ZIGZAG:
            chunks = _chunk_of_block(len(workloads), 2 * num_ranks)
            return np.minimum(chunks, 2 * num_ranks - 1 - chunks).astype(np.int32)
        case TokenDistribution.RING:
            return _chunk_of_block(len(workloads), num_ranks)
        case TokenDistribution.RANDOM:
            owners = np.arange(len(workloads), dtype=np.int32) % np.int32(num_ranks)
            return np.random.default_rng(seed).permutation(owners)


def rank_workloads(block_workloads: NDArray[np.integer], owners: NDArray[np.integer], *, num_ranks: int) -> NDArray[np.int64]:
    """Return [num_ranks], int64: the workload of all blocks of each rank; its maximum over its mean is the imbalance."""
    loads = np.zeros(num_ranks, dtype=np.int64)
    np.add.at(loads, owners, block_workloads)
    return loads


def _chunk_of_block(num_blocks: int, num_chunks: int) -> NDArray[np.int32]:
    """Cut blocks into chunks of consecutive ones whose sizes differ by one at most."""
    return (np.arange(num_blocks, dtype=np.int64) * num_chunks // max(1, num_blocks)).astype(np.int32)


def _read_method(method: TokenDistribution | str) -> TokenDistribution:
    try:
        return TokenDistribution(method)
    except ValueError:
        raise AssignmentError(f"'{method}' is no token distribution; expected one of {', '.join(TokenDistribution)}") from None


def _read_workloads(block_workloads: NDArray[np.integer]) -> NDArray[np.int64]:
    workloads = np.asarray(block_workloads)
    if workloads.ndim != 1 or (workloads.dtype.kind not in "iu" and len(workloads)):
        raise AssignmentError(
            f"the workloads are of type {workloads.dtype} and shape {workloads.shape}; expected whole numbers, one per "
            "block of tokens"
        )
    if len(workloads) and workloads.min() < 0:
        block = int(workloads.argmin())
        raise AssignmentError(f"block {block} has a workload of {workloads[block]}; expected at least 0")
    if workloads.sum(dtype=np.float64) >= 2**63:
        raise AssignmentError(
            f"the workloads of {len(workloads)} blocks add up to {workloads.sum(dtype=np.float64):.3g}, which does not fit "
            "int64; give a coarser unit"
        )
    return workloads.astype(np.int64)


def _place_longest_first(workloads: NDArray[np.int64], *, num_ranks: int, has_equal_counts: bool) -> NDArray[np.int32]:
    """Put each block, longest first, on the least loaded rank that has room for it."""
    num_blocks, owners = len(workloads), np.empty(len(workloads), dtype=np.int32)
    fair_count = num_blocks // num_ranks if has_equal_counts else num_blocks
    num_extra = num_blocks - min(num_blocks, fair_count * num_ranks)
    counts, open_ranks = [0] * num_ranks, [(0, rank) for rank in range(num_ranks)]
    for block in np.argsort(-workloads, kind="stable").tolist():
        load, rank = heappop(open_ranks)
        while counts[rank] >= fair_count + (num_extra > 0):
            load, rank = heappop(open_ranks)
        num_extra -= counts[rank] == fair_count
        counts[rank] += 1
        owners[block] = rank
        heappush(open_ranks, (load + int(workloads[block]), rank))
    return owners
