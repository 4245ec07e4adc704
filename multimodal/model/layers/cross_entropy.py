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
"""Number of logits that are held in float32 at a time: 64 MiB."""


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
    losses: Tensor = _VocabParallelCrossEntropy.apply(logits, targets, VocabularyShare(group, first_id, num_known))
    return losses


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, share: VocabularyShare) -> Tensor:
        largest = torch.cat([rows.max(dim=-1).values for _, rows in _wide_chunks(logits, share)])
        all_reduce(largest, op=ReduceOp.MAX, group=share.group)
        local, is_mine = _local_targets(targets, share, width=logits.shape[-1])
        sums = []
        for chunk, rows in _wide_chunks(logits, share, copies=True):
            of_targets = rows.gather(-1, local[chunk, None])[:, 0] - largest[chunk]
            sums.append(torch.stack((_exponentials(rows, largest[chunk]).sum(-1), of_targets)))
        total = torch.cat(sums, dim=1)
        total[1].masked_fill_(~is_mine, 0.0)
        all_reduce(total, group=share.group)
        ctx.save_for_backward(logits, targets, largest, total[0])
        ctx.share = share
        losses: Tensor = total[0].log() - total[1]
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        logits, targets, largest, total = ctx.saved_tensors
        local, is_mine = _local_targets(targets, ctx.share, width=logits.shape[-1])
        of_logits = torch.empty_like(logits)
        for chunk, rows in _wide_chunks(logits, ctx.share, copies=True):
            rows = _exponentials(rows, largest[chunk]).div_(total[chunk, None])
            rows.scatter_add_(-1, local[chunk, None], -is_mine[chunk, None].to(rows.dtype))
            of_logits[chunk] = rows.mul_(gradient[chunk, None])
        return of_logits, None, None


def _local_targets(targets: Tensor, share: VocabularyShare, *, width: int) -> tuple[Tensor, Tensor]:
    """Return the columns of the targets (an arbitrary one for targets on other ranks), and which targets are on this rank."""
    local = targets - share.first_id
    return local.clamp(0, width - 1), (local >= 0) & (local < width)


def _exponentials(rows: Tensor, largest: Tensor) -> Tensor:
    """Replace rows by their exponentials in place; padding columns become 0."""
    return rows.sub_(largest[:, None]).exp_()


def _wide_chunks(logits: Tensor, share: VocabularyShare, *, copies: bool = False) -> Iterator[tuple[slice, Tensor]]:
    """Yield chunks of rows in float32 (or float64), with padding at the lowest value; copies: True if they will be changed."""
    num_rows, width = logits.shape
    size = max(1, CHUNK_ENTRIES // max(1, width))
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    for start in range(0, num_rows, size):
        chunk = slice(start, min(start + size, num_rows))
        rows = logits[chunk].to(dtype, copy=copies or share.num_known < width)
        if share.num_known < width:
            rows[:, share.num_known :] = torch.finfo(logits.dtype).min
        yield chunk, rows
