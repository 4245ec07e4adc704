"""Errors of context parallelism, of cut sequences and of cut items."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import Any
from unittest.mock import Mock, patch

import torch

from megatron.runtime.communication.broker import RowShares
from megatron.runtime.feed import step_inputs
from megatron.runtime.gradients import gradients
from multimodal.attention import context_parallel
from multimodal.attention.core_attention import MaskedAttention
from multimodal.attention.packed_lengths import ItemParts, PackedLengths
from multimodal.model.stage_input import PackedInput
from multimodal.model.unit_stage import UnitStage
from tests.distributed.planted_errors.loss import scaled_loss

_POSITIONS_GIVEN = RowShares.positions_given


@contextmanager
def _positions_counted_in_the_share() -> Iterator[None]:
    """Rotary angles as if a rank's tokens were a sequence of their own."""
    original = step_inputs.share_input

    def shared(batch: PackedInput, share: Any) -> PackedInput:
        found = original(batch, share)
        return replace(found, positions=batch.positions[: len(found.positions)])

    with patch.object(step_inputs, "share_input", shared):
        yield


@contextmanager
def _gradients_summed_over_replicas_alone() -> Iterator[None]:
    original = gradients.wrap_in_gradient_buffers

    def wrapped(stage: UnitStage, *, groups: Any, **options: bool) -> Any:
        groups = copy(groups)
        groups.dp_cp = groups.intra_dp_cp = groups.dp
        return original(stage, groups=groups, **options)

    with patch.object(gradients, "wrap_in_gradient_buffers", wrapped):
        yield


@contextmanager
def _key_gradients_not_sent_home() -> Iterator[None]:
    """Each rank keeps what its own queries give its keys and values, and forgets what they give to others'."""

    def kept(own: torch.Tensor, padded: torch.Tensor, *, group: Any, async_op: bool) -> Any:
        own.copy_(padded.chunk(group.size())[group.rank()])
        return Mock()

    with patch.object(context_parallel, "reduce_scatter_single", kept):
        yield


@contextmanager
def _last_gradient_counts() -> Iterator[None]:
    """Where several ranks give gradients of one row, one of them overwrites the others."""
    with patch.object(torch.Tensor, "index_add_", torch.Tensor.index_copy_):
        yield


def _loss_of_first_context_parallel_rank(run: Any, action: Any, loss: torch.Tensor) -> float:
    return float(run.executor.context_parallel_rank(action.unit) == 0)


ERRORS_OF_CONTEXT_PARALLELISM: Mapping[str, Callable[[], Any]] = {
    "positions are counted in a rank's own share": _positions_counted_in_the_share,
    "gradients are not summed over context parallel ranks": _gradients_summed_over_replicas_alone,
    "gradients of keys and values do not come home": _key_gradients_not_sent_home,
    "a row's gradients from several ranks do not add up": _last_gradient_counts,
    "targets count on one rank alone": lambda: scaled_loss(_loss_of_first_context_parallel_rank),
    "encoder outputs go to other tokens of the rank": lambda: patch.object(
        RowShares, "positions_given", lambda rows, *ends: _POSITIONS_GIVEN(rows, *ends).flip(0)
    ),
}


@contextmanager
def _parts_of_items_attend_alone() -> Iterator[None]:
    def alone(attention: MaskedAttention, own: tuple[torch.Tensor, ...], packed: PackedLengths) -> torch.Tensor:
        lengths = (own[0].shape[0],) if own[0].shape[0] else ()
        return attention._attend_alone(own, PackedLengths(lengths=lengths))  # type: ignore[arg-type]

    with patch.object(MaskedAttention, "_attend_across_ranks", alone):
        yield


ERRORS_OF_CUT_ITEMS: Mapping[str, Callable[[], Any]] = {
    "a part of an item attends to itself alone": _parts_of_items_attend_alone,
    "gradients of cut items' keys and values do not come home": _key_gradients_not_sent_home,
    "rows of cut and whole items are exchanged": lambda: patch.object(
        ItemParts, "on", lambda parts, device: parts._replace(places=torch.arange(len(parts.places)))
    ),
}
