"""Megatron's collectives over replicas, started at one moment and finished at a later one that the schedule chooses.

Megatron ties both moments to hooks of modules and parameters, which its two `overlap_` settings turn on. Here a schedule says
when, so they are on only while Megatron's own starting and finishing functions run.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from megatron.core.distributed import DistributedDataParallel


def start_gradient_reduction(wrapped: DistributedDataParallel) -> Callable[[], None]:
    """Start summing gradients over replicas (reduce-scatter under a sharded optimizer); returns what waits for it."""
    with overlapping(wrapped, "overlap_grad_reduce"):
        wrapped.start_grad_sync()
    return partial(finish_gradient_reduction, wrapped)


def finish_gradient_reduction(wrapped: DistributedDataParallel) -> None:
    """Wait for what was started of it."""
    with overlapping(wrapped, "overlap_grad_reduce"):
        wrapped.finish_grad_sync()


def start_parameter_gathering(wrapped: DistributedDataParallel) -> Callable[[], None]:
    """Start gathering what each replica's optimizer updated; returns what waits for it."""
    with overlapping(wrapped, "overlap_param_gather"):
        wrapped.start_param_sync()

    def finish() -> None:
        with overlapping(wrapped, "overlap_param_gather"):
            for bucket_group in wrapped.bucket_groups:
                bucket_group.finish_param_sync(skip_next_bucket_dispatch=True)

    return finish


@contextmanager
def overlapping(wrapped: DistributedDataParallel, setting: str) -> Iterator[None]:
    """Turn on one of Megatron's overlap settings for what runs inside."""
    setattr(wrapped.ddp_config, setting, True)
    try:
        yield
    finally:
        setattr(wrapped.ddp_config, setting, False)
