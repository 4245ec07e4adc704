"""Errors that some plans can meet: context parallelism, shared weights, unlike replicas, shared experts, work inside waits."""

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import replace
from typing import Any
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist

from megatron.runtime.communication import units
from megatron.runtime.communication.broker import RowShares
from megatron.runtime.execution.segment_pass import SegmentPass
from megatron.runtime.feed import step_inputs
from megatron.runtime.gradients import gradients, sharded_layer, unlike_gradients
from megatron.runtime.gradients.sharded_layer import ShardedLayer
from megatron.runtime.gradients.sharded_unit import ShardedUnit
from megatron.runtime.gradients.unlike_gradients import UnlikeGradients
from megatron.runtime.session import Session
from multimodal.attention import context_parallel
from multimodal.attention.core_attention import CoreAttention
from multimodal.attention.packed_lengths import ItemParts, PackedLengths
from multimodal.model import deferrable_linear, expert_mlp
from multimodal.model.collectives import Arriving
from multimodal.model.deferrable_linear import DeferrableColumnParallelLinear
from multimodal.model.layers import transformer_segments
from multimodal.model.layers.layer_kind import Exchange
from multimodal.model.stage_input import PackedInput
from multimodal.model.unit_stage import UnitStage
from tests.distributed.planted_errors.in_any_plan import Error, replaced, scaled_loss


def counted_in_the_share(right: Any, batch: PackedInput, share: Any) -> PackedInput:
    """Rotary angles as if a rank's tokens were a sequence of their own."""
    found: PackedInput = right(batch, share)
    return replace(found, positions=batch.positions[: len(found.positions)])


def summed_over_replicas_alone(right: Any, stage: UnitStage, *, groups: Any, **options: bool) -> Any:
    groups = copy(groups)
    groups.dp_cp = groups.intra_dp_cp = groups.dp
    return right(stage, groups=groups, **options)


def only_own(right: Any, share: torch.Tensor, whole: torch.Tensor, *, group: Any, async_op: bool) -> Any:
    """Each rank keeps what it has itself for its share, and forgets what it has for others'."""
    share.copy_(whole.chunk(group.size())[group.rank()])
    return Mock()


IN_CONTEXT_PARALLELISM: Mapping[str, Error] = {
    "positions are counted in a rank's own share": replaced(step_inputs, "share_input", counted_in_the_share),
    "gradients are not summed over context parallel ranks": replaced(
        gradients, "wrap_in_gradient_buffers", summed_over_replicas_alone
    ),
    "gradients of keys and values do not come home": replaced(context_parallel, "reduce_scatter_single", only_own),
    "a row's gradients from several ranks do not add up": lambda: patch.object(
        torch.Tensor, "index_add_", torch.Tensor.index_copy_
    ),
    "targets count on one rank alone": scaled_loss(
        lambda run, action, loss: float(run.executor.groups[action.unit].cp.rank() == 0)
    ),
    "encoder outputs go to other tokens of the rank": replaced(
        RowShares, "positions_given", lambda right, rows, *ends: right(rows, *ends).flip(0)
    ),
}


def parts_alone(right: Any, attention: CoreAttention, own: tuple[torch.Tensor, ...], packed: PackedLengths) -> Any:
    lengths = (own[0].shape[0],) if own[0].shape[0] else ()
    return attention._attend_alone(own, PackedLengths(lengths=lengths), attention.choice.alone)  # type: ignore[arg-type]


OF_CUT_ITEMS: Mapping[str, Error] = {
    "a part of an item attends to itself alone": replaced(CoreAttention, "_attend_across_ranks", parts_alone),
    "gradients of cut items' keys and values do not come home": replaced(context_parallel, "reduce_scatter_single", only_own),
    "rows of cut and whole items are exchanged": replaced(
        ItemParts, "on", lambda right, parts, device: parts._replace(places=torch.arange(len(parts.places)))
    ),
}


def last_microbatch_alone(right: Any, layer: ShardedLayer) -> None:
    """The last one's gradients replace the others'."""
    layer.finish_reduction()
    assert layer.gradient_share is not None
    layer.gradient_share.zero_()
    right(layer)


def earlier_gradients_forgotten(right: Any, layer: ShardedLayer) -> None:
    layer._unreduced = None
    right(layer)


def norms_not_summed(right: Any, layer: ShardedLayer) -> None:
    with patch.object(layer, "_tensor_parallel_group", Mock(size=lambda: 1)):
        right(layer)


def weights_of_the_rank_before(right: Any, layer: ShardedLayer) -> None:
    """Shares come together in another order."""
    is_under_way = layer._gathering is not None
    right(layer)
    if is_under_way:
        layer._flat.copy_(layer._flat.roll(layer.share.numel()))


OF_SHARDED_WEIGHTS: Mapping[str, Error] = {
    "each rank keeps its share of its own gradients": replaced(sharded_layer, "reduce_scatter_single", only_own),
    "only the last microbatch's gradients stay": replaced(ShardedLayer, "start_reduction", last_microbatch_alone),
    "sharded norms are not summed over tensor parallel ranks": replaced(ShardedLayer, "start_reduction", norms_not_summed),
    "shares of weights come together in another order": replaced(ShardedLayer, "finish_gathering", weights_of_the_rank_before),
}
OF_COPIES_OF_WEIGHTS: Mapping[str, Error] = {
    "each copy keeps its own gradients": replaced(ShardedUnit, "sum_shared_embeddings", lambda *_: None),
}
OF_GRADIENTS_REDUCED_ONCE: Mapping[str, Error] = {
    "gradients are not added up until they are reduced": replaced(ShardedLayer, "take_gradients", earlier_gradients_forgotten),
    "shares of tied embeddings are not summed": lambda: patch.object(Session, "finish_gradients"),
}


def parts_not_summed(right: Any, views: Any, group: dist.ProcessGroup, **options: Any) -> Any:
    """What a rank of each replica has; what is not cut is held by three."""
    return (lambda: None) if group.size() == 2 else right(views, group, **options)


def other_half(right: Any, shard: torch.Tensor, sharding: Any, part: Any, *, rank: int, size: int) -> torch.Tensor:
    mirrored = part._replace(first=part.num_parts - part.end, end=part.num_parts - part.first)
    given: torch.Tensor = right(shard, sharding, part if size > 1 else mirrored, rank=rank, size=size)
    return given


def norms_of_the_first_rank(right: Any, stage: UnitStage, *args: Any, **options: Any) -> Iterator[Callable[[], None]]:
    def started(start: Any, views: Any, group: dist.ProcessGroup, **_: Any) -> Any:
        is_counted = [stage.groups.tp.rank() == 0] * len(views) if group.size() == 3 else None
        return start(views, group, is_counted=is_counted)

    with replaced(unlike_gradients, "start_sum", started)():
        yield from right(stage, *args, **options)


def first_range_finished(right: Any, found: UnlikeGradients, stage_index: int) -> None:
    if stage_index == min(found.stages):
        right(found, stage_index)


OF_UNLIKE_REPLICAS: Mapping[str, Error] = {
    "parts are not summed over replicas": replaced(unlike_gradients, "start_sum", parts_not_summed),
    "a whole matrix gives its other half": replaced(unlike_gradients, "_part_of", other_half),
    "norms of one tensor parallel rank's tokens alone": replaced(unlike_gradients, "start_sums", norms_of_the_first_rank),
    "tied embeddings of every replica and stage apart": replaced(UnlikeGradients, "sum_shared_embeddings", lambda *_: None),
    "sums of a stage's second layer range do not arrive": replaced(UnlikeGradients, "_finish", first_range_finished),
}


def expert_gradients_alone(right: Any, *args: Any, **options: Any) -> Any:
    """Experts' gradients as a rank's group alone has them."""
    member = right(*args, **options)
    member.groups.expt_dp = member.groups.intra_expt_dp = member.groups.pp
    return member


OF_EXPERTS: Mapping[str, Error] = {
    "gradients of experts are not summed over their copies": replaced(units, "_membership", expert_gradients_alone),
    "rows of experts go back in the order in which they came": lambda: patch.object(
        expert_mlp._Order, "mirrored", property(lambda order: order)
    ),
}
OF_SLICED_EXPERTS: Mapping[str, Error] = {
    "experts are balanced by a rank's part of a sequence": replaced(
        expert_mlp,
        "sequence_balance_loss",
        lambda right, routing, sequences, **given: right(routing, sequences._replace(groups=()), **given),
    )
}
OF_ADAPTERS: Mapping[str, Error] = {
    "the half that all ranks have is taken for the other": lambda: patch.object(
        DeferrableColumnParallelLinear, "splits_inputs", not DeferrableColumnParallelLinear.splits_inputs
    )
}


def rows_of_other_ranks(right: Any, share: torch.Tensor, product: torch.Tensor, **options: Any) -> Any:
    """Every rank is sent the sums of its neighbour's rows."""
    return right(share, product.roll(len(share), 0), **options)


OF_OVERLAPPED_PRODUCTS: Mapping[str, Error] = {
    "rows are taken for another rank's": replaced(deferrable_linear, "reduce_scatter_single", rows_of_other_ranks)
}


def without(exchange: Exchange, *, is_backward: bool) -> Error:
    def started(right: Any, self: Exchange, tensor: torch.Tensor, link: Any, **options: Any) -> Any:
        skips = self is exchange and options.get("is_backward", False) is is_backward
        return Arriving(tensor) if skips else right(self, tensor, link, **options)

    return replaced(Exchange, "start", started)


def swapped_on_one_rank(right: Any, self: Exchange, tensor: torch.Tensor, link: Any, **options: Any) -> Any:
    """One rank gives the rows of its sums in another order than the others."""
    swaps = self is Exchange.SUMMED and dist.get_rank() == 1 and not options.get("is_backward", False)
    return right(self, tensor.flip(0) if swaps else tensor, link, **options)


def without_residual_gradients(right: Any, self: SegmentPass, graph: Any) -> None:
    """Where a graph ends between two parts, only the branch gets its gradient."""
    right(self, graph)
    found = self._point.tensors
    if len(found) > 1 and found[0] is not None:
        self._point = self._point._replace(tensors=(torch.zeros_like(found[0]), *found[1:]))


def gradients_twice(right: Any, self: SegmentPass, first: int) -> None:
    right(self, first)
    if first == 0:
        for parameter in self._stage.parameters():
            parameter.main_grad.add_(parameter.main_grad)


INSIDE_WAITS: Mapping[str, Error] = {
    "a collective at the end of a forward piece is left out": without(Exchange.SUMMED, is_backward=False),
    "a collective at the end of a backward piece is left out": without(Exchange.GATHERED, is_backward=True),
    "a collective at the end of a forward piece is swapped on one rank": replaced(Exchange, "start", swapped_on_one_rank),
    "gradients of the residual stream stop between pieces": replaced(SegmentPass, "_retreat", without_residual_gradients),
    "biases are left out at a cut": replaced(
        transformer_segments, "_residual_sum", lambda right, layer, add, branch, bias, residual: residual + branch
    ),
    "gradients of pieces are added twice": replaced(SegmentPass, "backward", gradients_twice),
}
