"""Blocks of tokens over the ranks of context parallelism, longest first, then exchanged while the most loaded rank gains."""

from bisect import insort
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from multimodal.kernels import kernels

MAX_EXCHANGES = 1000
"""Enough for every case that was measured; a bound on the time."""
_TOLERANCE_DIVISOR = 10_000
"""Exchanges stop when the most loaded rank is above the mean by one part in so many; the kernel has the same number."""


def distribute_longest_first(workloads: NDArray[np.int64], *, num_ranks: int, has_equal_counts: bool) -> NDArray[np.int32]:
    """Put blocks, longest first, each on the least loaded rank (LPT; Cornstarch, thesis Alg. 1), then exchange.

    An exchange gives a block of the most loaded rank to the least loaded rank for a shorter one; that pair of blocks which
    brings both loads nearest to each other. It stops when no rank can help the most loaded one, or that
    is within 1 / 10,000 of the least possible.

    workloads: [num_blocks], not negative, with a sum that fits int64; checked by `distribute_tokens`.
    has_equal_counts: a rank that has its share of the blocks gets no more, so ranks differ by one block at most.

    Returns the rank of every block. Equal workloads go by block, equal loads by rank. Runs as a C++ kernel where that is built,
    with the same result. O(blocks log blocks + exchanges (ranks log ranks + blocks per rank)).
    """
    if kernels is None:
        return distribute_longest_first_reference(workloads, num_ranks=num_ranks, has_equal_counts=has_equal_counts)
    return kernels.distribute_longest_first(
        workloads, num_ranks=num_ranks, has_equal_counts=has_equal_counts, max_exchanges=MAX_EXCHANGES
    )


def distribute_longest_first_reference(
    workloads: NDArray[np.int64], *, num_ranks: int, has_equal_counts: bool
) -> NDArray[np.int32]:
    """Do in Python what `distribute_longest_first` does; arguments and result are the same."""
    blocks_of_rank = _place(workloads.tolist(), num_ranks, has_equal_counts)
    loads = [sum(workload for workload, _ in blocks) for blocks in blocks_of_rank]
    least = -(-sum(loads) // num_ranks)
    enough = least + least // _TOLERANCE_DIVISOR
    for _ in range(MAX_EXCHANGES):
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


def _place(workloads: list[int], num_ranks: int, has_equal_counts: bool) -> list[_Blocks]:
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
    """Exchange a block with the least loaded rank with which that lessens the larger load; return whether there was one."""
    for other in sorted(range(len(loads)), key=lambda each: (loads[each], each)):
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
    """Return positions of two blocks whose difference is above 0, below the surplus and nearest to its half; (-1, -1) if none."""
    best, take = (surplus, -1, -1), 0
    for give, (workload, _) in enumerate(mine):
        # Both descend: the first block of theirs that is shorter than mine by half of the surplus, and the one before it.
        while take < len(theirs) and 2 * (workload - theirs[take][0]) < surplus:
            take += 1
        for each in range(max(take - 1, 0), min(take + 1, len(theirs))):
            best = min(best, (abs(2 * (workload - theirs[each][0]) - surplus), give, each))
    return best[1:]
