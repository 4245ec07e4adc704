"""Which rank of context parallelism gets which block of tokens."""

from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from multimodal.balance.distribute_longest_first import distribute_longest_first
from multimodal.values.errors import AssignmentError


class TokenDistribution(StrEnum):
    """How blocks of tokens are dealt."""

    LPT = "lpt"
    """By workload, longest first (Cornstarch, thesis Alg. 1)."""
    ZIGZAG = "zigzag"
    """Of 2 n chunks, rank i gets chunks i and 2 n - 1 - i: balances one causal sequence exactly (Llama 3)."""
    RING = "ring"
    """Of n chunks, rank i gets chunk i."""
    RANDOM = "random"
    """A permutation from a seed; near to balance if there are many more blocks than ranks (Cornstarch, paper 5.3)."""


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
        `attention.block_summary.count_block_workloads` counts them. All but LPT look at their number only.
    num_ranks: at least 1; with more ranks than blocks some get none.
    has_equal_counts: whether LPT gives every rank equally many blocks, or as nearly as possible. The paper's listing only looks
        at the workload of attention; but the rest of a layer costs time and memory by the token, and sharded tensors of one
        shape communicate best, so equal is the default. False is the listing. The other methods' counts are equal anyway: RANDOM
        and RING within one block, ZIGZAG within two.
    seed: of RANDOM.

    Returns [num_blocks], int32, the same on every rank that asks. Raises AssignmentError when an argument is wrong.
    """
    workloads = _read_workloads(block_workloads)
    if num_ranks < 1:
        raise AssignmentError(f"cannot distribute {len(workloads)} blocks of tokens over {num_ranks} ranks; expected at least 1")
    match _read_method(method):
        case TokenDistribution.LPT:
            return distribute_longest_first(workloads, num_ranks=num_ranks, has_equal_counts=has_equal_counts)
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
