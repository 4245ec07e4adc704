"""Sends rows to the experts that were chosen for them, and their results back.

Every rank of an expert parallel group holds equally many experts, in order. Rows are sorted by expert, so those for one rank are
consecutive; after the exchange, which is as uneven as the choices, they are sorted by expert again. No row is dropped.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from multimodal.balance.exchange.exchange_rows import exchange_rows


class _Order(NamedTuple):
    """A permutation of rows, and its inverse."""

    forward: Tensor
    backward: Tensor

    @classmethod
    def sorting(cls, keys: Tensor) -> "_Order":
        """Return the stable permutation that sorts by keys."""
        order = keys.argsort(stable=True)
        return cls(order, torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device)))

    @property
    def mirrored(self) -> "_Order":
        """Return the inverse."""
        return _Order(self.backward, self.forward)


def compute_by_experts(
    rows: Tensor, chosen: Tensor, weights: Tensor, *, num_experts: int, group: dist.ProcessGroup, compute: "ComputeExperts"
) -> Tensor:
    """Return for every row the weighted sum of its experts' outputs.

    rows: [num_rows, hidden_size]; chosen, weights: [num_rows, topk]; num_experts: of all ranks of `group`, each of which holds
    equally many and computes the rows of all ranks; compute: a function of rows sorted by this rank's experts, and their numbers
    of rows.
    """
    topk = chosen.shape[1]
    order = _Order.sorting(chosen.flatten())
    counts = torch.bincount(chosen.flatten(), minlength=num_experts)
    copies = _permuted(rows, _Order(order.forward // topk, order.backward), num_copies=topk)
    if group.size() == 1:
        made = compute(copies, counts)
    else:
        made = _compute_on_owners(copies, counts.view(group.size(), -1), group=group, compute=compute)
    parts = _permuted(made, order.mirrored).view(-1, topk, rows.shape[1])
    return (parts * weights.unsqueeze(-1).to(parts.dtype)).sum(1)


ComputeExperts = Callable[[Tensor, Tensor], Tensor]


def _compute_on_owners(copies: Tensor, counts: Tensor, *, group: dist.ProcessGroup, compute: ComputeExperts) -> Tensor:
    """counts: [num_ranks, experts per rank], of this rank's rows."""
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group)
    sent, received = counts.sum(1).tolist(), arriving.sum(1).tolist()
    numbers = torch.arange(counts.shape[1], device=counts.device).repeat(len(counts))
    order = _Order.sorting(numbers.repeat_interleave(arriving.flatten()))
    there = exchange_rows(copies, sent, received, group)
    made = compute(_permuted(there, order), arriving.sum(0))
    return exchange_rows(_permuted(made, order.mirrored), received, sent, group)


def _permuted(rows: Tensor, order: _Order, *, num_copies: int = 1) -> Tensor:
    return _Permute.apply(rows, order, num_copies)  # type: ignore[no-untyped-call]


class _Permute(torch.autograd.Function):
    """Selects rows, each `num_copies` times; a row's gradients are summed in a fixed order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: _Order, num_copies: int) -> Tensor:
        ctx.save_for_backward(order.backward)
        ctx.num_copies = num_copies
        return rows.index_select(0, order.forward)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (backward,) = ctx.saved_tensors
        rows = gradient.index_select(0, backward)
        return rows.view(-1, ctx.num_copies, rows.shape[1]).sum(1) if ctx.num_copies > 1 else rows, None, None
