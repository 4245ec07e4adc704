"""The loss of tokens whose logits are split over several ranks, computed a few rows at a time.

Apart from the logits, neither direction holds more than a few rows of them in float32: the forward keeps two numbers per token,
and the backward recomputes probabilities directly into the gradient.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

CHUNK_ENTRIES = 2**24
"""Number of logits that are held in float32 at a time: 64 MiB, or more if it were above MOST_CHUNKS times."""
MOST_CHUNKS = 16
"""Each takes four kernels forward and five backward."""


class VocabularyShare(NamedTuple):
    """A rank's contiguous part of the padded vocabulary."""

    group: ProcessGroup
    first_id: int
    num_known: int
    """Columns before those that pad the vocabulary, which are excluded from the softmax."""


def vocab_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, *, group: ProcessGroup, num_tokens_known: int | None = None
) -> Tensor:
    """Return the loss of each token, in float32 (float64 for float64 logits).

    megatron-core has the same function, but it reads its process group from global state, casts to float32 (which exact checks in
    float64 must not do), and holds all logits three times.

    logits: [num_tokens, vocab_size / tp], this rank's contiguous share; targets: [num_tokens], int64; num_tokens_known: of the
    vocabulary without its padding, None for all.
    Returns [num_tokens], the same on every rank of the group.
    """
    if logits.shape[0] == 0:
        return logits.sum(-1)
    width = logits.shape[-1]
    first_id = group.rank() * width
    num_known = width if num_tokens_known is None else min(max(num_tokens_known - first_id, 0), width)
    return _VocabParallelCrossEntropy.apply(logits, targets, VocabularyShare(group, first_id, num_known))


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, share: VocabularyShare) -> Tensor:
        known, local, is_mine = _known_columns(logits, targets, share)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        largest = known.amax(-1).to(dtype) if share.num_known else logits.new_full(targets.shape, -torch.inf, dtype=dtype)
        all_reduce(largest, op=ReduceOp.MAX, group=share.group)
        total = logits.new_zeros(2, len(logits), dtype=dtype)
        if share.num_known:
            for rows in _chunks(known):
                torch.sum(_exponentials(known, largest, rows), -1, out=total[0, rows])
            total[1] = (known.gather(-1, local[:, None])[:, 0] - largest).masked_fill_(~is_mine, 0.0)
        all_reduce(total, group=share.group)
        ctx.save_for_backward(logits, targets, largest, total[0])
        ctx.share = share
        return total[0].log() - total[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        logits, targets, largest, total = ctx.saved_tensors
        known, local, is_mine = _known_columns(logits, targets, ctx.share)
        of_logits = torch.empty_like(logits)
        of_logits[:, ctx.share.num_known :] = 0.0
        of_targets, scale = torch.where(is_mine, -total, 0.0), gradient / total
        for rows in _chunks(known) if ctx.share.num_known else ():
            found = _exponentials(known, largest, rows)
            found.scatter_add_(-1, local[rows, None], of_targets[rows, None])
            of_logits[rows, : ctx.share.num_known] = found.mul_(scale[rows, None])
        return of_logits, None, None


def _known_columns(logits: Tensor, targets: Tensor, share: VocabularyShare) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits without padding, columns of targets (an arbitrary one for other ranks'), and which targets are here."""
    local = targets - share.first_id
    is_mine = (local >= 0) & (local < share.num_known)
    return logits[:, : share.num_known], local.clamp(0, max(share.num_known - 1, 0)), is_mine


def _exponentials(logits: Tensor, largest: Tensor, rows: slice) -> Tensor:
    """Return the exponentials of some rows' distances to their largest entries, in the wider of the two types."""
    return logits[rows].to(largest.dtype, copy=True).sub_(largest[rows, None]).exp_()


def _chunks(logits: Tensor) -> Iterator[slice]:
    """Yield rows to be computed at a time."""
    num_rows, width = logits.shape
    size = max(1, max(CHUNK_ENTRIES, logits.numel() // MOST_CHUNKS) // width)
    return (slice(start, start + size) for start in range(0, num_rows, size))
