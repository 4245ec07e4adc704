"""Weights and gradients of one unit, sharded over its replicas and context parallel ranks (ZeRO-3)."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.runtime.communication.units import Membership
from megatron.runtime.gradients.sharded_layer import ShardedLayer, WeightPiece
from megatron.runtime.gradients.sharded_stage import ShardedStage
from multimodal.model.unit_stage import UnitStage
from multimodal.values.model_graph import ModelGraph


class ShardedUnit:
    """This rank's stages of one unit; stands where `UnitGradients` stands when weights are not sharded.

    Every microbatch's gradients are reduced with its backward, and every layer's weights gathered when it computes, so there is
    nothing left for the actions that do so once a step.
    """

    has_whole_parameters = True
    """Nothing waits to be gathered: weights that an optimizer updated are complete as shares."""

    def __init__(self, stages: Mapping[int, UnitStage], *, graph: ModelGraph, membership: Membership) -> None:
        """stages: virtual stage -> module, newly initialised."""
        self.membership, self.stages = membership, stages
        self.sharded = {index: ShardedStage(stage, graph=graph, membership=membership) for index, stage in stages.items()}

    @property
    def layers(self) -> Iterator[ShardedLayer]:
        """All layers of all stages, in one order on all ranks that share them."""
        for index in sorted(self.sharded):
            yield from self.sharded[index].layers.values()

    @property
    def pieces(self) -> tuple[WeightPiece, ...]:
        """What this rank keeps."""
        return tuple(piece for layer in self.layers for piece in layer.pieces)

    def zero(self) -> None:
        """Forget the gradients of the last step."""
        for layer in self.layers:
            if layer.gradient_share is not None:
                layer.gradient_share.zero_()

    def start_reduction(self, stage_index: int) -> Callable[[], None]:
        """Nothing: gradients are reduced microbatch by microbatch."""
        return _nothing

    def expect_last_backward(self, stage_index: int) -> Callable[[], None]:
        """Nothing, likewise."""
        return _nothing

    @contextmanager
    def gathering_later(self) -> Iterator[None]:
        """Nothing: weights are gathered layer by layer."""
        yield

    def start_gathering(self, stage_index: int) -> Callable[[], None]:
        """Nothing, likewise."""
        return _nothing

    def complete_parameters(self) -> None:
        """Nothing, likewise."""

    def sum_shared_embeddings(self) -> None:
        """Give both copies of tied word embeddings the sum of their gradients, share by share; checks that all are reduced."""
        for layer in self.layers:
            layer.check_reduced()
        copies = [
            self.sharded[index].layers[0].gradient_share
            for index, stage in self.stages.items()
            if getattr(stage.shared_embedding_weight, "shared_embedding", False)
        ]
        shares: list[Tensor] = [share for share in copies if share is not None]
        if not shares:
            return
        total = torch.stack(shares).sum(0)
        assert self.membership.embedding_group is not None
        if self.membership.embedding_group.size() > 1:
            dist.all_reduce(total, group=self.membership.embedding_group)
        for share in shares:
            share.copy_(total)


def _nothing() -> None:
    """What waits for nothing."""
