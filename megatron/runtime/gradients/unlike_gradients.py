"""Gradients of a unit whose replicas are not alike: reduced layer by layer, part by part, over the holders of each part.

Parts are cut wherever a replica's tensor parallel ranks cut (`weight_parts`). All ranks take layers from the last
to the first, and the parts of each in order, so those of a group make the same calls in the same order.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron.runtime.communication.units import GroupBook, Membership
from megatron.runtime.gradients.gradients import UnitGradients, main_gradient
from megatron.runtime.gradients.scheduled_collectives import Bucket, start_sum
from megatron.runtime.gradients.state_shares import StateShares
from multimodal.model.parameter_sharding import ParameterSharding
from multimodal.model.unit_stage import UnitStage
from multimodal.plan.communicators import WeightPart, holders_of_embeddings, holders_of_layer, weight_parts, whole_holders
from multimodal.values.action import LayerRange
from multimodal.values.plan import UnitPlan, VirtualStage


class UnlikeGradients(UnitGradients):
    """Gradient buffers and reductions of this rank's stages of one such unit."""

    def __init__(
        self, stages: Mapping[int, UnitStage], *, membership: Membership, unit: UnitPlan, book: GroupBook, shares: StateShares
    ) -> None:
        super().__init__(stages, membership=membership, is_sharded=False, shares=shares)
        self._unit, self._book = unit, book
        self._running: dict[int, list[Callable[[], None]]] = {index: [] for index in stages}

    def _start_at_once(self, stage_index: int, layers: LayerRange | None) -> Callable[[], None]:
        assert layers is not None, "replicas that are not alike reduce by layers"
        first = self.stages[stage_index].layer_range.start
        for layer in reversed(range(first + layers.first, first + layers.end)):
            self._start_layer(stage_index, layer)
        return partial(self._finish, stage_index)

    def _buckets(self, stage_index: int) -> list[Bucket]:
        return [
            Bucket([each for _, each in parameters], partial(self._start_layer, stage_index, layer))
            for layer in reversed(self.stages[stage_index].layer_range)
            if (parameters := self._parameters(stage_index, layer))
        ]

    def sum_shared_embeddings(self) -> None:
        """Give all copies of tied word embeddings, on first and last stages of all replicas, the sum of their gradients."""
        shared = [(stage, stage.shared_parameter) for stage in self.stages.values()]
        copies = [(stage, copy) for stage, copy in shared if copy is not None and copy.requires_grad]
        if not copies:
            return
        gradients = [main_gradient(copy) for _, copy in copies]
        gradients[0].copy_(torch.stack(gradients).sum(0))
        stage, first = copies[0]
        names: dict[Tensor, str] = {each: name for name, each in stage.named_parameters()}
        holders = holders_of_embeddings(self._unit)
        for finish in start_sums(stage, [(names[first], first)], holders=holders, unit=self._unit, book=self._book):
            finish()
        for gradient in gradients[1:]:
            gradient.copy_(gradients[0])

    def _start_layer(self, stage_index: int, layer: int) -> None:
        """Start summing one layer's gradients over all ranks that hold any part of it."""
        parameters = self._parameters(stage_index, layer)
        self._running[stage_index] += start_sums(
            self.stages[stage_index], parameters, holders=holders_of_layer(self._unit, layer), unit=self._unit, book=self._book
        )

    def _finish(self, stage_index: int) -> None:
        for finish in self._running[stage_index]:
            finish()
        self._running[stage_index].clear()

    def _parameters(self, stage_index: int, layer: int) -> list[tuple[str, Parameter]]:
        """Return a layer's trained parameters by name, without tied embeddings."""
        stage = self.stages[stage_index]
        named = stage.layers[str(layer)].named_parameters(prefix=f"layers.{layer}")
        return [(name, each) for name, each in named if each.requires_grad and each is not stage.shared_parameter]


def start_sums(
    stage: UnitStage,
    parameters: Sequence[tuple[str, Tensor]],
    *,
    holders: Sequence[VirtualStage],
    unit: UnitPlan,
    book: GroupBook,
) -> Iterator[Callable[[], None]]:
    """Start the sums of one layer's gradients that this rank takes part in: part by part, then of replicated parameters.

    Yields functions that wait for them.

    A gradient that each tensor parallel rank computes from its own tokens (sequence parallelism) is added for all of them; one
    that is equal on all of them is added for the first.
    """
    rank, size = stage.groups.tp.rank(), stage.groups.tp.size()
    shardings = [(each, stage.sharding(name)) for name, each in parameters]
    sharded = [(each, sharding) for each, sharding in shardings if sharding.dimension is not None]
    whole = [each for each, sharding in shardings if sharding.dimension is None]
    for part in weight_parts(unit, holders) if sharded else ():
        if part.first * size // part.num_parts == rank:
            views = [_part_of(main_gradient(each), sharding, part, rank=rank, size=size) for each, sharding in sharded]
            yield start_sum(views, book[part.ranks])
    if whole:
        is_counted = [rank == 0 or getattr(each, "sequence_parallel", False) for each in whole]
        yield start_sum([main_gradient(each) for each in whole], book[whole_holders(holders)], is_counted=is_counted)


def _part_of(shard: Tensor, sharding: ParameterSharding, part: WeightPart, *, rank: int, size: int) -> Tensor:
    """Return the part of a shard, [num_blocks, ...], with equally much of every block. A view.

    rank, size: of the shard, among tensor parallel ranks.
    """
    dimension, blocks = sharding.dimension, sharding.num_blocks
    assert dimension is not None
    rows = shard.shape[dimension] // blocks
    first, end = (bound * rows * size // part.num_parts - rank * rows for bound in (part.first, part.end))
    return shard.unflatten(dimension, (blocks, rows)).narrow(dimension + 1, first, end - first)
