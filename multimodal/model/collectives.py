"""Collectives of tensor parallel ranks that are started in one place and waited for in another, also as autograd functions.

All are started with `async_op=True`: with NCCL they run on its stream, where waiting orders streams and blocks no thread; gloo
runs them in its threads. Waits are reported beforehand (`TensorParallelWaits`), so that other work can run meanwhile.

Between the layers of a stage, every rank has all rows, or under sequence parallelism rank r has the r-th block of them. Entering
a column parallel product and leaving a row parallel one mirror each other in a backward:

                     forward                        backward
    gather_rows      gather (or nothing)            sum
    sum_rows         sum                            gather (or nothing)
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from multimodal.attention.context_parallel import all_gather_single, reduce_scatter_single
from multimodal.model.tensor_parallel_waits import TensorParallelWaits


class Arriving(NamedTuple):
    """A tensor that is complete after `wait`."""

    tensor: Tensor
    works: tuple[dist.Work, ...] = ()

    def wait(self) -> Tensor:
        """Return the tensor when its last part has arrived."""
        for work in self.works:
            work.wait()
        return self.tensor


class RankLink(NamedTuple):
    """The ranks of a layer's collectives, the distribution of rows over them, and the object to which waits are reported."""

    group: dist.ProcessGroup
    is_sequence_parallel: bool
    waits: TensorParallelWaits | None = None

    def start_gathering(self, share: Tensor) -> Arriving:
        """Start gathering the rows of all ranks; without sequence parallelism every rank already has them.

        share: [num_rows, ...], as many rows on every rank; the result is [num_ranks * num_rows, ...].
        """
        if not self.is_sequence_parallel or self.group.size() == 1:
            return Arriving(share)
        rows = share.new_empty((self.group.size() * share.shape[0], *share.shape[1:]))
        return Arriving(rows, (all_gather_single(rows, share.contiguous(), group=self.group, async_op=True),))

    def start_summing(self, rows: Tensor) -> Arriving:
        """Start summing over the ranks, in place; under sequence parallelism the result is this rank's block of the rows."""
        if self.group.size() == 1:
            return Arriving(rows)
        rows = rows.contiguous()
        if not self.is_sequence_parallel:
            return Arriving(rows, (dist.all_reduce(rows, group=self.group, async_op=True),))
        share = rows.new_empty((rows.shape[0] // self.group.size(), *rows.shape[1:]))
        return Arriving(share, (reduce_scatter_single(share, rows, group=self.group, async_op=True),))

    def complete(self, arriving: Arriving) -> Tensor:
        """Wait for a collective; work that fills the wait runs before."""
        if not arriving.works or self.waits is None:
            return arriving.wait()
        with self.waits.filled():
            return arriving.wait()


def gather_rows(share: Tensor, link: RankLink) -> Tensor:
    """Return the rows of all ranks, for use in the same computation on all; in the backward each rank takes its block."""
    rows: Tensor = _Gather.apply(share, link)
    return rows


def share_rows(rows: Tensor, link: RankLink) -> Tensor:
    """Return this rank's block of rows that all ranks have; in the backward gradients are gathered."""
    share: Tensor = _Share.apply(rows, link)
    return share


def sum_rows(rows: Tensor, link: RankLink) -> Tensor:
    """Return the sum over the ranks, or under sequence parallelism this rank's block of it. `rows` must not be used again."""
    if link.group.size() == 1:
        return rows
    summed: Tensor = _Sum.apply(rows, link)
    return summed


def _block(rows: Tensor, link: RankLink) -> Tensor:
    return rows.chunk(link.group.size())[link.group.rank()].contiguous()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, link: RankLink) -> Tensor:
        ctx.link = link
        return link.complete(link.start_gathering(share))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _block(gradient, ctx.link), None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, link: RankLink) -> Tensor:
        ctx.link = link
        return _block(rows, link)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.link.complete(ctx.link.start_gathering(gradient)), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, link: RankLink) -> Tensor:
        ctx.link = link
        summed = link.complete(link.start_summing(rows))
        if summed is rows:
            ctx.mark_dirty(rows)
        return summed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.link.complete(ctx.link.start_gathering(gradient)), None
