"""Split backwards of a loop's own layers: their weight gradients wait for the schedule (zero bubble)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from torch.nn import Module

from multimodal.model.adapter import is_engine_linear
from multimodal.model.collectives import RankLink
from multimodal.model.deferrable_linear import (
    DeferrableColumnParallelLinear,
    DeferrableRowParallelLinear,
    deferrable_linear,
    queue_of,
)
from multimodal.model.weight_gradient_queue import defer_in_modules
from multimodal.values.errors import ConfigError

_deferring = WeakSet[Module]()
"""Chunks whose layers were told to leave weight gradients to the active queue."""
_ADVICE = "give patches.apply(schedule=...) '1f1b' or another schedule of whole backwards"


def prepare_split(chunk: Module, config: Any, *, is_encoder: bool = False) -> None:
    """Let linear layers leave weight gradients to the active queue; without one they stay as they are.

    is_encoder: it may have any layers, whose backwards stay whole. Raises ConfigError for other layers that cannot.
    """
    if chunk in _deferring:
        return
    if config.recompute_granularity is not None:
        raise ConfigError(
            "the schedule splits backwards, but recompute_granularity lets backwards run forwards, whose layers would not know; "
            f"leave it out, or {_ADVICE}"
        )
    linears: list[Any] = [each for each in chunk.modules() if isinstance(each, ColumnParallelLinear | RowParallelLinear)]
    engine: list[Any] = [each for each in chunk.modules() if is_engine_linear(each)]
    if any(not each.wgrad_store.delay_wgrad_compute() for each in engine):
        raise ConfigError(
            "the schedule splits backwards, but layers of Transformer Engine were built without delay_wgrad_compute; set the "
            f"config's delay_wgrad_compute=True before, or {_ADVICE}"
        )
    if not linears and not engine and not is_encoder:
        raise ConfigError(f"the schedule splits backwards, but the model has no linear layer of megatron-core's; {_ADVICE}")
    defer_in_modules(chunk)
    for linear in linears:
        if not isinstance(linear, DeferrableColumnParallelLinear | DeferrableRowParallelLinear):
            linear._forward_impl = partial(_multiply, linear._forward_impl)
    _deferring.add(chunk)


def find_overlapped(chunks: Sequence[Module]) -> list[Any]:
    """Return the configs of Megatron's gradient buffers that start reductions in backwards."""
    configs = [config for chunk in chunks for each in chunk.modules() if (config := getattr(each, "ddp_config", None))]
    return [config for config in configs if config.overlap_grad_reduce]


@contextmanager
def without_overlap(overlapped: Sequence[Any]) -> Iterator[None]:
    """Let the hooks of gradient buffers take gradients as they come, and neither expect all nor start a reduction."""
    for config in overlapped:
        config.overlap_grad_reduce = False
    try:
        yield
    finally:
        for config in overlapped:
            config.overlap_grad_reduce = True


def _multiply(usual: Callable[..., Tensor], input: Tensor, weight: Tensor, **options: Any) -> Tensor:
    """Multiply as megatron-core's layer does; with an active queue the weight gradient is left to it."""
    if queue_of(weight, None) is None or options.get("grad_output_buffer") is not None:
        return usual(input=input, weight=weight, **options)
    link = None
    if options["sequence_parallel"] or options["allreduce_dgrad"]:
        link = RankLink(options["tp_group"], options["sequence_parallel"])
    return deferrable_linear(input, weight, options["bias"], gathered=link)
