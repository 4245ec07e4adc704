"""Errors of weights that data parallel ranks share (ZeRO-3)."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock, patch

import torch

from megatron.runtime.gradients import sharded_layer
from megatron.runtime.gradients.sharded_layer import ShardedLayer
from megatron.runtime.session import Session


@contextmanager
def _shares_of_own_gradients_alone() -> Iterator[None]:
    def kept(share: torch.Tensor, whole: torch.Tensor, *, group: Any, async_op: bool) -> Any:
        share.copy_(whole.chunk(group.size())[group.rank()])
        return Mock()

    with patch.object(sharded_layer, "reduce_scatter_single", kept):
        yield


@contextmanager
def _last_microbatch_replaces_the_others() -> Iterator[None]:
    original = ShardedLayer.start_reduction

    def started(layer: ShardedLayer, *, is_joined: bool) -> None:
        layer.finish_reduction()
        assert layer.gradient_share is not None
        layer.gradient_share.zero_()
        original(layer, is_joined=is_joined)

    with patch.object(ShardedLayer, "start_reduction", started):
        yield


@contextmanager
def _sharded_norms_not_summed_over_tensor_parallel_ranks() -> Iterator[None]:
    original = ShardedLayer._take_gradients

    def taken(layer: ShardedLayer, whole: torch.Tensor) -> None:
        with patch.object(layer, "_tensor_parallel_group", Mock(size=lambda: 1)):
            original(layer, whole)

    with patch.object(ShardedLayer, "_take_gradients", taken):
        yield


@contextmanager
def _weights_of_the_rank_before() -> Iterator[None]:
    original = ShardedLayer.finish_gathering

    def finished(layer: ShardedLayer) -> None:
        is_under_way = layer._gathering is not None
        original(layer)
        if is_under_way:
            layer._flat.copy_(layer._flat.roll(layer.share.numel()))

    with patch.object(ShardedLayer, "finish_gathering", finished):
        yield


ERRORS_OF_SHARDED_WEIGHTS: Mapping[str, Callable[[], Any]] = {
    "each rank keeps its share of its own gradients": _shares_of_own_gradients_alone,
    "only the last microbatch's gradients stay": _last_microbatch_replaces_the_others,
    "sharded norms are not summed over tensor parallel ranks": _sharded_norms_not_summed_over_tensor_parallel_ranks,
    "shares of weights come together in another order": _weights_of_the_rank_before,
    "shares of tied embeddings are not summed": lambda: patch.object(Session, "finish_gradients"),
}
