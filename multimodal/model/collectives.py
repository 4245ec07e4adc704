"""Collectives of tensor parallel ranks that are started in one place and waited for in another, also as autograd functions.

All are started with `async_op=True`: with NCCL they run on its stream, where waiting orders streams and blocks no thread; gloo
runs them in its threads. Waits are reported beforehand (`TensorParallelWaits`), so that other work can run meanwhile.

Between the layers of a stage, every rank has all rows, or under sequence parallelism rank r has the r-th block of them. Entering
a column parallel product and leaving a row parallel one mirror each other in a backward:

                        forward                        backward
    gather_for_products gather (or nothing)            sum
    sum_rows            sum                            gather (or nothing)

A collective may be cut into parts, each beside the product of another part (`overlapped_product.py`). Under sequence parallelism
a part is the same slice of every rank's block.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from multimodal.attention.context_parallel import all_gather_single, reduce_scatter_single

COLLECTIVES = ("allreduce", "gather_along_first_dim", "reduce_scatter_along_first_dim")
MODULES = ("base", "linear", "layernorm_linear")
"""Modules of `transformer_engine.pytorch.module`; each imports some of the collectives."""
LEAST_FILLED = 0.9
"""The least share of a buffer's rows for which a microbatch is padded to all of them."""
_OVERLAPS = ("ub_overlap_ag_fprop", "ub_overlap_rs_fprop", "ub_overlap_ag_dgrad", "ub_overlap_rs_dgrad")
_SCATTERED = {"method": "ring_exchange"}


class TensorParallelWaits:
    """Numbers the waits of one computation from 0, in the order in which they occur, and calls the work that fills them.

    The work behind a wait is called when its collective is complete: it starts the collectives of the work that filled the wait,
    so that these have the links to themselves while the computation continues.

    A forward and a backward each count from 0, recomputed collectives included. The layers of a stage hold one such object, so
    every thread in which autograd runs a backward finds it.

    Optimus, 4.2. Braid's layers report their waits. Autograd functions of Transformer Engine wait for collectives wherever they
    need the result, as those of megatron-core do, and find collectives among the names of their modules. There is no class to
    derive from, so these names are replaced. Waits come in the order of Braid's own layers; those of a backward come behind its
    weight gradient, if any.
    """

    current: "ClassVar[TensorParallelWaits | None]" = None
    """Those of the computation of this process whose waits are filled."""

    def __init__(self) -> None:
        self._fill: Callable[[int], None] | None = None
        self._go_on: Callable[[], None] = lambda: None
        self.count = 0
        """Waits of the computation so far."""

    @property
    def are_filled(self) -> bool:
        """True while something may run in the waits of a computation."""
        return self._fill is not None

    @contextmanager
    def filled_by(self, fill: Callable[[int], None], *, go_on: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Call `fill` with the number of each wait that occurs inside, while its collective is under way, then `go_on`."""
        assert self._fill is None, "one computation at a time has waits to fill"
        self._fill, self._go_on, self.count = fill, go_on, 0
        TensorParallelWaits.current = self
        try:
            yield
        finally:
            self._fill = TensorParallelWaits.current = None

    @contextmanager
    def filled(self) -> Iterator[None]:
        """Waits inside for a collective that is under way; work that fills the wait runs first, without waits of its own."""
        fill, number = self._fill, self.count
        if fill is None:
            yield
            return
        self._fill, self.count = None, number + 1
        try:
            fill(number)
            yield
            self._go_on()
        finally:
            self._fill = fill


def report_engine_waits() -> None:
    """Replace the collectives of these modules, once in a process; outside of computations with work in waits nothing changes."""
    for module in (import_module(f"transformer_engine.pytorch.module.{name}") for name in MODULES):
        for name in COLLECTIVES:
            call = getattr(module, name, None)
            if call is not None and not hasattr(call, "reports_waits"):
                setattr(module, name, _reporting(call))


def _reporting(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def reporting(tensor: Any, group: Any, async_op: bool = False, **options: Any) -> Any:
        waits = TensorParallelWaits.current
        if waits is None:
            return call(tensor, group, async_op, **options)
        result, work = call(tensor, group, True, **options)
        reported = None if work is None else _ReportedWork(work, waits)
        if reported is None or async_op:
            return result, reported
        reported.wait()
        return result, None

    reporting.reports_waits = True  # type: ignore[attr-defined]
    return reporting


class _ReportedWork:
    """A collective under way."""

    def __init__(self, work: Any, waits: TensorParallelWaits) -> None:
        self._work, self._waits = work, waits

    def wait(self) -> None:
        """Wait for it; work that fills the wait runs before."""
        with self._waits.filled():
            self._work.wait()


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
    num_parts: int = 1
    """Parts into which collectives beside products are cut."""

    def start_gathering(self, share: Tensor) -> Arriving:
        """Start gathering [num_rows, ...] of every rank into [num_ranks * num_rows, ...], where ranks do not have all rows."""
        if not self.is_sequence_parallel or self.group.size() == 1:
            return Arriving(share)
        share = share.contiguous()
        blocks = share.new_empty((self.group.size(), *share.shape))
        rows = blocks.flatten(0, 1)
        if self.num_parts == 1:
            return Arriving(rows, (all_gather_single(rows, share, group=self.group, async_op=True),))
        works = [
            dist.all_gather([block[part] for block in blocks], share[part], group=self.group, async_op=True)
            for part in sequence_parts(len(share), num_parts=self.num_parts)
        ]
        return Arriving(rows, tuple(works))

    def start_summing(self, rows: Tensor) -> Arriving:
        """Start summing over the ranks, in place; under sequence parallelism the result is this rank's block of the rows."""
        if self.group.size() == 1:
            return Arriving(rows)
        rows = rows.contiguous()
        if not self.is_sequence_parallel:
            return Arriving(rows, (dist.all_reduce(rows, group=self.group, async_op=True),))
        share = rows.new_empty((rows.shape[0] // self.group.size(), *rows.shape[1:]))
        return Arriving(share, (reduce_scatter_single(share, rows, group=self.group, async_op=True),))

    def start_summing_copy(self, rows: Tensor) -> Arriving:
        """Start summing over the ranks, and leave `rows` as they are."""
        is_overwritten = self.group.size() > 1 and not self.is_sequence_parallel
        return self.start_summing(rows.clone() if is_overwritten else rows)

    def take_block(self, rows: Tensor) -> Arriving:
        """Return this rank's block of rows that all ranks have."""
        return Arriving(rows.chunk(self.group.size())[self.group.rank()].contiguous())

    def complete(self, arriving: Arriving) -> Tensor:
        """Wait for a collective; work that fills the wait runs before."""
        if not arriving.works or self.waits is None:
            return arriving.wait()
        with self.waits.filled():
            return arriving.wait()


def gather_for_products(share: Tensor, link: RankLink) -> Tensor:
    """Return the rows of all ranks, for column parallel products; the ranks' gradients of them are summed."""
    return _Collective.apply(share, link, RankLink.start_gathering, RankLink.start_summing_copy)


def gather_rows(share: Tensor, link: RankLink) -> Tensor:
    """Return the rows of all ranks, for the same computation on all; in the backward each rank takes its block, if it had one."""
    if not link.is_sequence_parallel:
        return share
    return _Collective.apply(share, link, RankLink.start_gathering, RankLink.take_block)


def share_rows(rows: Tensor, link: RankLink) -> Tensor:
    """Return this rank's block of rows that all ranks have; in the backward gradients are gathered."""
    return _Collective.apply(rows, link, RankLink.take_block, RankLink.start_gathering)


def sum_rows(rows: Tensor, link: RankLink) -> Tensor:
    """Return the sum over the ranks, or under sequence parallelism this rank's block of it. `rows` must not be used again."""
    if link.group.size() == 1:
        return rows
    return _Collective.apply(rows, link, RankLink.start_summing, RankLink.start_gathering)


_Start = Callable[[RankLink, Tensor], Arriving]


class _Collective(torch.autograd.Function):
    """One collective in the forward, another in the backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, link: RankLink, there: _Start, back: _Start) -> Tensor:
        ctx.link, ctx.back = link, back
        found = link.complete(there(link, rows))
        if found is rows and there is RankLink.start_summing:
            ctx.mark_dirty(rows)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return ctx.link.complete(ctx.back(ctx.link, gradient)), None, None, None


def sequence_parts(num_rows: int, *, num_parts: int) -> tuple[slice, ...]:
    """Return `num_parts` slices of `num_rows` rows, of sizes that differ by at most one; fewer if there are fewer rows.

    Ranks with equally many rows cut alike. The larger parts are last: the first one, which is waited for, is not longer.
    """
    count = max(1, min(num_parts, num_rows))
    bounds = [num_rows * index // count for index in range(count + 1)]
    return tuple(slice(first, last) for first, last in itertools.pairwise(bounds))


def open_user_buffers(num_rows: int, hidden_size: int, *, tensor_parallel_size: int, dtype: torch.dtype) -> None:
    """Make the buffers in which Transformer Engine's kernels gather and scatter the LLM's rows beside their own products.

    They take tensors of exactly their size: a microbatch that nearly fills them is padded to that with a sequence of its own,
    others do without. Collective over all ranks, of which each block of `tensor_parallel_size` shares some.
    """
    from transformer_engine.pytorch.module.base import destroy_ub, initialize_ub  # type: ignore[import-not-found,unused-ignore]

    destroy_ub()  # those of a plan before
    initialize_ub(
        [num_rows, hidden_size],
        tensor_parallel_size,
        dtype=dtype,
        # Gradients of inputs are scattered beside their own product: beside that of a weight, frozen ones would have none.
        ub_cfgs={"qkv_dgrad": _SCATTERED, "fc1_dgrad": _SCATTERED},
        bootstrap_backend=dist.get_backend(),
    )


def overlaps_of(layer: Module) -> list[tuple[Module, str]]:
    """Return the settings of a layer's products by which they use buffers."""
    return [(module, name) for module in layer.modules() for name in _OVERLAPS if getattr(module, name, False)]
