"""Megatron's collectives over replicas, started and finished when the schedule says so.

Megatron ties both to hooks of modules and parameters, which its two `overlap_` settings enable. Here they are enabled only while
Megatron's own starting and finishing functions run.

A reduction may also go bucket by bucket while the backward that completes the gradients still runs. Megatron starts a bucket as
soon as it is full. Here buckets start in one fixed order, so that replicas make the same calls even if one of them has other
microbatches, or none; and the schedule determines the backward in which they start.
"""

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.nn import Parameter

from multimodal.model.unit_stage import UnitStage


class Bucket(NamedTuple):
    """Parameters whose gradients are reduced at once."""

    parameters: Sequence[Parameter]
    start: Callable[[], None]
    """Starts reducing their gradients, once these are complete; collective."""


class ReductionByLayer:
    """One stage's buckets, in the order in which backwards fill them: the last layers come first."""

    def __init__(self, wrapped: DistributedDataParallel, *, buckets: Sequence[Bucket], finish: Callable[[], None]) -> None:
        """finish: waits for all buckets that were started."""
        self.buckets, self._finish = buckets, finish
        self._bucket_of = {each: index for index, bucket in enumerate(buckets) for each in bucket.parameters}
        self._missing: list[set[Parameter]] = []
        self.num_started = 0
        """Buckets whose reduction has started."""
        self.is_expecting = False
        """True if the reduction has begun and some of it has not started."""
        trained = [each for each in wrapped.module.parameters() if each.requires_grad]
        for parameter, accumulator in zip(trained, wrapped.grad_accs, strict=True):
            # Hooks run in the order of their registration: the gradient is in its buffer by then.
            accumulator.register_hook(partial(_note, weakref.ref(self), weakref.ref(parameter)))

    def expect_last_backward(self) -> None:
        """Announce that the next backward through this stage completes its gradients; for several pieces, once is enough."""
        if self.is_expecting:
            return
        self._missing = [set(bucket.parameters) for bucket in self.buckets]
        self.num_started, self.is_expecting = 0, True

    def complete(self) -> Callable[[], None]:
        """Start the buckets that the backward did not start, such as those of unused parameters; returns a wait for all."""
        while self.num_started < len(self.buckets):
            self._start_next()
        self.is_expecting = False
        return self._finish

    def note(self, parameter: Parameter) -> None:
        """Record that a backward has added a parameter's gradient to its buffer."""
        if not self.is_expecting or parameter not in self._bucket_of:
            return
        index = self._bucket_of[parameter]
        assert index >= self.num_started, "a gradient came after its bucket was reduced"
        self._missing[index].discard(parameter)
        while self.num_started < len(self.buckets) and not self._missing[self.num_started]:
            self._start_next()

    def _start_next(self) -> None:
        self.buckets[self.num_started].start()
        self.num_started += 1


def buckets_of_replicas(wrapped: DistributedDataParallel, *, prepare: Callable[[Iterable[Parameter]], None]) -> Iterator[Bucket]:
    """Yield Megatron's buckets of a stage.

    prepare: called with the parameters of a bucket, whose gradients are complete, before it is reduced; collective.
    """

    def start(bucket: Any, parameters: Sequence[Parameter]) -> None:
        prepare(parameters)
        with overlapping(wrapped, "overlap_grad_reduce"):
            bucket.start_grad_sync()

    for bucket in (*wrapped.bucket_groups, *wrapped.expert_parallel_bucket_groups):
        parameters = [each for part in bucket.buckets for each in part.params_list]
        yield Bucket(parameters, partial(start, bucket, parameters))


def _note(
    watcher: "weakref.ref[ReductionByLayer]", parameter: "weakref.ref[Parameter]", _: object, gradients: tuple[Tensor | None, ...]
) -> None:
    """Record a gradient; an input gradient that defers a weight's has none for it.

    Hooks of autograd's nodes are invisible to the garbage collector, so they must keep nothing alive.
    """
    found, noted = watcher(), parameter()
    if found is not None and noted is not None and gradients[0] is not None:
        found.note(noted)


def wrap_with_layer_buckets(
    stage: UnitStage, config: DistributedDataParallelConfig, *, groups: ProcessGroupCollection
) -> DistributedDataParallel:
    """Give a stage gradient buffers that are cut into buckets of about one layer.

    Megatron makes buckets only if it overlaps by itself, and only in the first pipeline stage, so both are simulated for it;
    afterwards only what a schedule says is overlapped.
    """
    sizes = [sum(each.numel() for each in layer.parameters() if each.requires_grad) for layer in stage.layers.values()]
    config.overlap_grad_reduce = True
    config.bucket_size = min((size for size in sizes if size), default=1)
    first = copy.copy(groups)
    first.pp = SimpleNamespace(rank=lambda: 0)
    wrapped = DistributedDataParallel(stage.config, config, stage, pg_collection=first)
    wrapped.ddp_config.overlap_grad_reduce = False
    wrapped.ddp_config.bucket_size = None  # a stage's own; an optimizer requires all its stages to be configured alike
    return wrapped


def start_parameter_gathering(wrapped: DistributedDataParallel) -> Callable[[], None]:
    """Start gathering the parameters that replicas' optimizers updated; returns a function that waits for it."""
    with overlapping(wrapped, "overlap_param_gather"):
        wrapped.start_param_sync()

    def finish() -> None:
        with overlapping(wrapped, "overlap_param_gather"):
            for bucket_group in (*wrapped.bucket_groups, *wrapped.expert_parallel_bucket_groups):
                bucket_group.finish_param_sync(skip_next_bucket_dispatch=True)

    return finish


@contextmanager
def overlapping(wrapped: DistributedDataParallel, setting: str) -> Iterator[None]:
    """Enable one of Megatron's overlap settings for the code inside."""
    setattr(wrapped.ddp_config, setting, True)
    try:
        yield
    finally:
        setattr(wrapped.ddp_config, setting, False)


@torch.no_grad()
def start_sum(
    views: Sequence[Tensor], group: dist.ProcessGroup, *, is_counted: Sequence[bool] | None = None
) -> Callable[[], None]:
    """Start adding up gradients over a group, all in one collective; returns a function that waits for the sums and stores them.

    is_counted: False for those to which this rank adds nothing.
    """
    counted = zip(views, is_counted or [True] * len(views), strict=True)
    flat = torch.cat([(view if counts else torch.zeros_like(view)).reshape(-1) for view, counts in counted])
    work = dist.all_reduce(flat, group=group, async_op=True)

    @torch.no_grad()
    def finish() -> None:
        work.wait()
        totals = flat.split([view.numel() for view in views])
        torch._foreach_copy_(list(views), [total.view(view.shape) for view, total in zip(views, totals, strict=True)])

    return finish


def sum_over_tokens(gradients: Iterable[tuple[Parameter, Tensor]], group: dist.ProcessGroup) -> None:
    """Add up, over tensor parallel ranks, gradients that each computes from its own tokens: norms and biases, which are small."""
    partial_sums = [gradient for parameter, gradient in gradients if getattr(parameter, "sequence_parallel", False)]
    if group.size() > 1 and partial_sums:
        start_sum(partial_sums, group)()


def sum_copies(copies: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Give all copies of a gradient, on this rank and in `group`, their sum; does nothing if this rank has none."""
    if not copies:
        return
    total = torch.stack(list(copies)).sum(0)
    assert group is not None
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    for copy_of_gradient in copies:
        copy_of_gradient.copy_(total)


def nothing_to_wait_for() -> None:
    """Do nothing, in place of the wait for a collective that was not needed."""


def is_by_gloo_on_device(group: dist.ProcessGroup) -> bool:
    """Return True where gloo reduces and gathers tensors of GPUs."""
    return torch.cuda.is_available() and dist.get_backend(group) == "gloo"


@contextmanager
def call_one_by_one(
    group: dist.ProcessGroup | None = None, device: torch.device | None = None, async_ops: bool = False
) -> Iterator[dist.distributed_c10d._CoalescingManager]:
    """Start the collectives of a block at its end, each by itself: torch's `_coalescing_manager` for gloo on GPUs.

    Megatron's gradient buffers coalesce the collectives of their buckets, which gloo does with host memory only: given tensors
    of a GPU, it refuses to reduce them, and ends the process when it gathers them.
    """
    group = group or dist.distributed_c10d._get_default_group()
    noted = dist.distributed_c10d._world.pg_coalesce_state
    noted[group] = []
    works = dist.distributed_c10d._CoalescingManager()
    yield works
    for each in noted.pop(group):
        buffers = (each.tensor,) if each.dst_tensor is None else (each.dst_tensor, each.tensor)
        operation = {} if each.redop is None else {"op": each.redop}
        works.append(each.op(*buffers, **operation, group=group, async_op=True))
    if not async_ops:
        works.wait()
