"""Weights and gradients of one unit, sharded over its replicas and context parallel ranks (ZeRO-3).

The layers of its stages gather their weights when they compute, in forward and in backward, and release them afterwards.
"""

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.runtime.communication.units import GroupBook, Membership
from megatron.runtime.gradients.gradients import UnitGradients
from megatron.runtime.gradients.scheduled_collectives import nothing_to_wait_for, sum_copies
from megatron.runtime.gradients.sharded_layer import LayerPass, ShardedLayer, Visit, WeightPiece
from multimodal.model.layers.layer_kind import HeadOutput
from multimodal.model.unit_stage import UnitStage
from multimodal.plan.communicators import cut_into_copies
from multimodal.values.action import ActionKind, LayerRange
from multimodal.values.backward_need import layers_backward_need
from multimodal.values.model_graph import ModelGraph


class LayerKey(NamedTuple):
    """The parameters that are sharded together: a layer's, with trained adapters apart from the frozen weights."""

    layer: int
    is_trained: bool


class Copies(NamedTuple):
    """The ranks around one, where weights are kept in several copies (hybrid sharding); in one, they all share it."""

    group: dist.ProcessGroup
    """Those that share this rank's copy."""
    across: dist.ProcessGroup
    """Those that keep the same share of the other copies."""
    is_copy: bool
    """True if the first copy, which is counted and written, is another one."""

    @classmethod
    def of(cls, holders: tuple[int, ...], num_copies: int, book: GroupBook) -> "Copies":
        """Return the place of this rank among the ranks that hold the same parameters, ascending."""
        copies, rank = cut_into_copies(holders, num_copies), dist.get_rank()
        own = next(each for each in copies if rank in each)
        across = next(each for each in zip(*copies, strict=True) if rank in each)
        return cls(book[own], book[across], own != copies[0])


class ShardedStage:
    """Shards the parameters of `stage` and gathers and releases its layers' weights from then on."""

    def __init__(self, stage: UnitStage, *, graph: ModelGraph, copies: "Copies", reduces_once: bool) -> None:
        self.stage, self._reduces_once = stage, reduces_once
        self.num_backwards = 0
        """Passes back through the stage that are left in this step, of whatever kind, joined ones included."""
        self.layers: Mapping[LayerKey, ShardedLayer] = {
            LayerKey(int(name), is_trained): ShardedLayer(parameters, copies.group, stage.groups.tp, is_copy=copies.is_copy)
            for name, layer in stage.layers.items()
            for is_trained in (False, True)
            if (parameters := [each for each in layer.parameters() if each.requires_grad == is_trained])
        }
        self._visits = _visits(stage, graph, self.layers)
        self._pass: LayerPass | None = None
        stage.guard = self
        for index, layer in stage.layers.items():
            for parameter in layer.parameters():
                if parameter.requires_grad and parameter is not stage.shared_parameter:
                    parameter.register_post_accumulate_grad_hook(self._reached(int(index)))

    @contextmanager
    def collectives(self, kind: ActionKind) -> Iterator[None]:
        """Gather weights for the computation inside, if there is any, and reduce its gradients, or those of all in the last."""
        assert self._pass is None, "computations of a stage follow each other"
        self.num_backwards -= kind is not ActionKind.FORWARD
        reduces = not self._reduces_once or self.num_backwards == 0
        is_delayed = kind is ActionKind.BACKWARD and self.stage.delays_weight_gradients  # until all layers are over
        self._pass = LayerPass(kind, self._visits[kind], self.layers, reduces=reduces and not is_delayed)
        yield
        self._pass.finish()
        if reduces and is_delayed:
            self._pass.reduce_kept()
        self._pass = None

    def before(self, layer: int, hidden: Tensor | None) -> Tensor | None:
        """Called before a layer's forward; hidden: its input, which marks where its backward ends."""
        self.enter(layer)
        return None if hidden is None else _calling(partial(self.leave, layer), hidden)

    def after(self, layer: int, output: Tensor | HeadOutput) -> Tensor | HeadOutput:
        """Called after a layer's forward; its output marks where its backward begins."""
        self.leave(layer)
        enter = partial(self.enter, layer)
        if isinstance(output, HeadOutput):
            conditions = None if output.conditions is None else _calling(enter, output.conditions)
            return output._replace(loss_sum=_calling(enter, output.loss_sum), conditions=conditions)
        return _calling(enter, output)

    def enter(self, layer: int) -> None:
        """Gather a layer's weights."""
        assert self._pass is not None, "a sharded stage computes only inside `collectives`"
        self._pass.enter(layer)

    def leave(self, layer: int) -> None:
        """Release a layer's weights, and reduce its gradients."""
        assert self._pass is not None
        self._pass.leave(layer)

    def _reached(self, layer: int) -> Callable[[Tensor], None]:
        """Return the hook of a layer's gradients: in a weight gradient, layers come in the order of the backward."""
        watcher = weakref.ref(self)  # objects that a parameter's hook refers to are never garbage collected

        def reached(parameter: Tensor) -> None:
            current = watcher()
            if current is not None and current._pass is not None and current._pass.kind is ActionKind.WEIGHT_GRADIENT:
                current._pass.enter(layer)

        return reached


def _calling(call: Callable[[], None], tensor: Tensor) -> Tensor:
    """Return a tensor whose backward, if it has one, first calls a function."""
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor
    return _OnBackward.apply(tensor, call)  # type: ignore[no-untyped-call]


class _OnBackward(torch.autograd.Function):
    """The identity; its backward first calls a function."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, call: Callable[[], None]) -> Tensor:  # type: ignore[override]
        ctx.call = call
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.call()
        return gradient, None


def _visits(stage: UnitStage, graph: ModelGraph, layers: Collection[LayerKey]) -> Mapping[ActionKind, tuple[Visit, ...]]:
    """Return the visits of each kind of computation to the stage's layers, alike on all replicas and for all microbatches."""
    forward, backward = [], []
    for index in stage.layer_range:
        is_tied = stage.unit.ties_embeddings and index == len(stage.unit.layers) - 1
        gathers = tuple(key for key in layers if key.layer == index or (is_tied and key.layer == 0))
        forward.append(Visit(index, gathers, ()))
        has_copy = is_tied and 0 not in stage.layer_range
        reduces = tuple(key for key in gathers if key.is_trained and (key.layer == index or has_copy))
        if layers_backward_need(graph, stage.unit.name, range(index, index + 1)).has_backward:
            backward.append(Visit(index, gathers, reduces))
    backward.reverse()
    return {
        ActionKind.FORWARD: tuple(forward),
        ActionKind.BACKWARD: tuple(backward),
        ActionKind.INPUT_GRADIENT: tuple(backward),
        ActionKind.WEIGHT_GRADIENT: tuple(Visit(visit.layer, (), visit.reduces) for visit in backward if visit.reduces),
    }


class ShardedUnit(UnitGradients):
    """This rank's stages of one unit, whose weights are sharded.

    Gradients are reduced inside backwards, and every layer's weights gathered when it computes, so there are no gradient buffers,
    and the actions that do this once per step have nothing to do.
    """

    def __init__(
        self,
        stages: Mapping[int, UnitStage],
        *,
        graph: ModelGraph,
        membership: Membership,
        book: GroupBook,
        num_copies: int,
        reduces_once: bool,
    ) -> None:
        """stages: virtual stage -> module, newly initialised; reduces_once: each rank adds up a step's gradients until then.

        num_copies: of all weights and their state, each shared by equally many ranks; book: has the groups of `group_ranks`.
        """
        super().__init__({}, membership=membership, is_sharded=False)
        self.stages = stages
        self.copies = Copies.of(tuple(dist.get_process_group_ranks(membership.groups.dp_cp)), num_copies, book)
        self.is_copy = self.copies.is_copy
        self.sharded = {
            index: ShardedStage(stage, graph=graph, copies=self.copies, reduces_once=reduces_once)
            for index, stage in stages.items()
        }

    @property
    def layers(self) -> Iterator[ShardedLayer]:
        """All layers of all stages, in one order on all ranks that share them."""
        for index in sorted(self.sharded):
            yield from self.sharded[index].layers.values()

    @property
    def is_trained(self) -> bool:
        """True if this rank takes part in training anything."""
        return any(layer.is_trained for layer in self.layers)

    @property
    def pieces(self) -> tuple[WeightPiece, ...]:
        """This rank's share of all parameters."""
        return tuple(piece for layer in self.layers for piece in layer.pieces)

    def zero(self) -> None:
        """Forget the gradients of the last step."""
        if shares := [layer.gradient_share for layer in self.layers if layer.gradient_share is not None]:
            torch._foreach_zero_(shares)

    def start_reduction(self, stage_index: int, layers: LayerRange | None = None) -> Callable[[], None]:
        """Do nothing: gradients are reduced inside backwards."""
        return nothing_to_wait_for

    expect_last_backward = start_reduction

    def partial_pieces(self) -> dict[Tensor, WeightPiece | None]:
        """Return, by parameter, the piece that this rank keeps of it."""
        kept: dict[Tensor, WeightPiece | None] = {piece.parameter: piece for piece in self.pieces}
        return {each: kept.get(each) for stage in self.stages.values() for each in stage.parameters()}

    def sum_shared_embeddings(self) -> None:
        """Give both copies of tied word embeddings the sum of their gradients, share by share; checks that all are reduced.

        Before that, the ranks that keep the same share in other copies of the weights sum its gradients.
        """
        for layer in self.layers:
            layer.check_reduced()
            if layer.gradient_share is not None and self.copies.across.size() > 1:
                dist.all_reduce(layer.gradient_share, group=self.copies.across)
        copies = [
            self.sharded[index].layers.get(LayerKey(0, is_trained=True))
            for index, stage in self.stages.items()
            if getattr(stage.shared_parameter, "shared_embedding", False)
        ]
        shares = [layer.gradient_share for layer in copies if layer is not None]
        sum_copies([share for share in shares if share is not None], self.membership.groups.embd)
