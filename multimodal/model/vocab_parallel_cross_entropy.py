"""Cross entropy over a vocabulary that is split over tensor parallel ranks.

megatron-core has the same, but reads its process group from global state and casts to float32, which exact checks in float64
must not do.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first_id: int, group: ProcessGroup) -> Tensor:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        largest = wide.max(dim=-1, keepdim=True).values
        all_reduce(largest, op=ReduceOp.MAX, group=group)
        exponentials = (wide - largest).exp_()
        local = targets - first_id
        is_mine = (local >= 0) & (local < logits.shape[-1])
        local = local.clamp(0, logits.shape[-1] - 1)
        target_logit = torch.where(is_mine, wide.gather(-1, local[:, None])[:, 0] - largest[:, 0], 0.0)
        total = torch.stack((exponentials.sum(-1), target_logit))
        all_reduce(total, group=group)
        ctx.save_for_backward(exponentials.div_(total[0][:, None]), local, is_mine)
        ctx.dtype = logits.dtype
        losses: Tensor = total[0].log() - total[1]
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        probabilities, local, is_mine = ctx.saved_tensors
        grad_logits = probabilities.clone()
        rows = torch.arange(len(local), device=local.device)
        grad_logits[rows, local] -= is_mine.to(grad_logits.dtype)
        return (grad_logits * gradient[:, None]).to(ctx.dtype), None, None, None


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, *, group: ProcessGroup) -> Tensor:
    """Loss of each token, in float32 (float64 for float64 logits).

    logits: [num_tokens, vocab_size / tp], this rank's contiguous share; targets: [num_tokens], int64.
    Returns [num_tokens], the same on every rank of the group.
    """
    if logits.shape[0] == 0:
        return logits.sum(-1)
    losses: Tensor = _VocabParallelCrossEntropy.apply(logits, targets, group.rank() * logits.shape[-1], group)
    return losses
