"""Errors that a run can meet whatever its plan: samples, losses, sums of gradients, and what attends to what."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from megatron.runtime.execution import step_messages
from megatron.runtime.gradients import gradients
from megatron.runtime.gradients.gradients import UnitGradients
from megatron.runtime.session import Session
from multimodal.attention.core_attention import PackedAttention
from multimodal.attention.packed_lengths import PackedLengths
from tests.distributed.planted_errors.loss import mean_of_means, mean_over_replicas, scaled_loss
from tests.distributed.planted_errors.routing import (
    gradients_of_other_samples,
    items_of_other_samples,
    reassigned,
    with_a_sample_twice,
    without_last_sample,
)


@contextmanager
def _no_sum_over_replicas() -> Iterator[None]:
    with patch.object(gradients, "start_gradient_reduction", lambda wrapped: lambda: None):
        yield


@contextmanager
def _one_norm_not_summed_over_tensor_parallel_ranks() -> Iterator[None]:
    original = UnitGradients.start_reduction

    def started(gradients: UnitGradients, stage_index: int, layers: Any = None) -> Callable[[], None]:
        norms = [p for n, p in gradients.stages[stage_index].named_parameters() if n.endswith("input_layernorm.weight")]
        for parameter in norms[:1]:
            parameter.sequence_parallel = False  # type: ignore[attr-defined]
        return original(gradients, stage_index)

    with patch.object(UnitGradients, "start_reduction", started):
        yield


@contextmanager
def _samples_attend_to_each_other() -> Iterator[None]:
    original = PackedAttention._attend

    def attended(self: PackedAttention, query: Any, key: Any, value: Any, packed: PackedLengths) -> torch.Tensor:
        return original(self, query, key, value, PackedLengths(lengths=(sum(packed.lengths),)))

    with patch.object(PackedAttention, "_attend", attended):
        yield


PLANTED_ERRORS: Mapping[str, Callable[[], Any]] = {
    "a sample is dropped": lambda: reassigned(without_last_sample),
    "a sample runs twice": lambda: reassigned(with_a_sample_twice),
    "an image goes to another sample": items_of_other_samples,
    "a gradient goes to another sample": gradients_of_other_samples,
    "the loss is a mean of means": lambda: scaled_loss(mean_of_means),
    "the loss is averaged over replicas": lambda: scaled_loss(mean_over_replicas),
    "gradients are not summed over replicas": _no_sum_over_replicas,
    "gradients of tied embeddings are not summed": lambda: patch.object(Session, "finish_gradients"),
    "a norm is not summed under sequence parallelism": _one_norm_not_summed_over_tensor_parallel_ranks,
    "gradients stop at a stage's border": lambda: patch.object(step_messages, "_gradient_of", torch.zeros_like),
    "packed samples attend to each other": _samples_attend_to_each_other,
}
