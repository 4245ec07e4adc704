"""Distributes blocks of tokens over the ranks of context parallelism."""

from bisect import insort
from enum import StrEnum
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from multimodal.kernels import kernels
from multimodal.values.errors import AssignmentError

MAX_EXCHANGES = 1000
"""A bound on the time that was sufficient in every measured case."""
_TOLERANCE_DIVISOR = 10_000
"""Inverse tolerance of exchanges, relative to the mean load of ranks; the kernel has the same number."""


class TokenDistribution(StrEnum):
    """The rule by which ranks get blocks of tokens."""

    BY_ITEM = "by-item"
    """Whole items, and blocks of items that are too long, where tokens attend only inside their item (`cost.item_shares`); blocks
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

    Returns [num_blocks], int32, the same on every rank. LPT runs as a C++ kernel, with the same result, if the kernels are built,
    in O(blocks log blocks + exchanges (ranks log ranks + blocks per rank)). Raises AssignmentError if an argument is wrong.
    """
    workloads = _read_workloads(block_workloads)
    if num_ranks < 1:
        raise AssignmentError(f"cannot distribute {len(workloads)} blocks of tokens over {num_ranks} ranks; expected at least 1")
    match _read_method(method):
        case TokenDistribution.BY_ITEM | TokenDistribution.LPT:
            distribute = distribute_longest_first_reference if kernels is None else kernels.distribute_longest_first
            return distribute(workloads, num_ranks=num_ranks, has_equal_counts=has_equal_counts, max_exchanges=MAX_EXCHANGES)
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


def distribute_longest_first_reference(
    workloads: NDArray[np.int64], *, num_ranks: int, has_equal_counts: bool, max_exchanges: int
) -> NDArray[np.int32]:
    """Compute the kernel's result in Python for `TokenDistribution.LPT`."""
    blocks_of_rank = _place_longest_first(workloads.tolist(), num_ranks, has_equal_counts)
    loads = [sum(workload for workload, _ in blocks) for blocks in blocks_of_rank]
    least = -(-sum(loads) // num_ranks)
    enough = least + least // _TOLERANCE_DIVISOR
    for _ in range(max_exchanges):
        most_loaded = loads.index(max(loads))
        if loads[most_loaded] <= enough or not _exchange_from(most_loaded, blocks_of_rank, loads):
            break
    owners = np.empty(len(workloads), dtype=np.int32)
    for rank, blocks in enumerate(blocks_of_rank):
        owners[[block for _, block in blocks]] = rank
    return owners


_Blocks = list[tuple[int, int]]
"""(workload, block) of the blocks of a rank, longest first."""


def _descending(workload_and_block: tuple[int, int]) -> tuple[int, int]:
    return -workload_and_block[0], workload_and_block[1]


def _place_longest_first(workloads: list[int], num_ranks: int, has_equal_counts: bool) -> list[_Blocks]:
    num_blocks = len(workloads)
    fair_count = num_blocks // num_ranks if has_equal_counts else num_blocks
    num_extra = num_blocks - min(num_blocks, fair_count * num_ranks)
    blocks_of_rank: list[_Blocks] = [[] for _ in range(num_ranks)]
    open_ranks = [(0, rank) for rank in range(num_ranks)]
    for block in sorted(range(num_blocks), key=workloads.__getitem__, reverse=True):
        load, rank = heappop(open_ranks)
        while len(blocks_of_rank[rank]) >= fair_count + (num_extra > 0):
            load, rank = heappop(open_ranks)
        num_extra -= len(blocks_of_rank[rank]) == fair_count
        blocks_of_rank[rank].append((workloads[block], block))
        heappush(open_ranks, (load + workloads[block], rank))
    return blocks_of_rank


def _exchange_from(rank: int, blocks_of_rank: list[_Blocks], loads: list[int]) -> bool:
    """Exchange a block with the least loaded rank for which that lowers the larger load; returns True if there was one."""
    for other in sorted(range(len(loads)), key=loads.__getitem__):
        surplus = loads[rank] - loads[other]
        if surplus < 2:
            return False
        give, take = _best_pair(blocks_of_rank[rank], blocks_of_rank[other], surplus)
        if give < 0:
            continue
        given, taken = blocks_of_rank[rank].pop(give), blocks_of_rank[other].pop(take)
        insort(blocks_of_rank[rank], taken, key=_descending)
        insort(blocks_of_rank[other], given, key=_descending)
        loads[rank] -= given[0] - taken[0]
        loads[other] += given[0] - taken[0]
        return True
    return False


def _best_pair(mine: _Blocks, theirs: _Blocks, surplus: int) -> tuple[int, int]:
    """Return positions of two blocks whose difference is positive, below the surplus and nearest to its half; else (-1, -1)."""
    best, take = (surplus, -1, -1), 0
    for give, (workload, _) in enumerate(mine):
        # Both descend: find the first block of `theirs` that is shorter than mine by half of the surplus, and the one before it.
        while take < len(theirs) and 2 * (workload - theirs[take][0]) < surplus:
            take += 1
        for index in range(max(take - 1, 0), min(take + 1, len(theirs))):
            best = min(best, (abs(2 * (workload - theirs[index][0]) - surplus), give, index))
    return best[1:]
