"""An all-to-all of rows, as uneven as needed, whose gradients go back the same way."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def exchange_rows(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send consecutive rows to each rank of the group and return those received, by rank; collective, and so is its backward.

    rows: [sum(sent), ...]; sent, received: rows to and from each rank.
    """
    if torch.is_grad_enabled() and not rows.requires_grad and rows.is_floating_point():
        rows = rows.detach().requires_grad_()  # other ranks' rows may need a gradient, whose exchange all ranks must take part in
    return _Exchange.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]


def start_exchange(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    """Start the same without gradients; returns what is complete when the work is."""
    arriving = rows.new_empty((sum(received), *rows.shape[1:]))
    work = dist.all_to_all_single(arriving, rows.contiguous(), received, sent, group=group, async_op=True)
    assert work is not None, "this rank is not in the group"
    return arriving, work


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.back = received, sent, group
        arrived, work = start_exchange(rows, sent, received, group)
        work.wait()
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        arrived, work = start_exchange(gradient, *ctx.back)
        work.wait()
        return arrived, None, None, None
