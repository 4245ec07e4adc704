"""A stage whose layers gather their weights when they compute, in forward and in backward, and release them afterwards."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron.runtime.communication.units import Membership
from megatron.runtime.gradients.sharded_layer import LayerPass, ShardedLayer, Visit
from multimodal.model.layers.layer_kind import HeadOutput
from multimodal.model.unit_stage import UnitStage
from multimodal.values.backward_need import layers_backward_need
from multimodal.values.model_graph import ModelGraph
from multimodal.values.schedule import ActionKind


class ShardedStage:
    """Shards the parameters of `stage` and watches over its layers from then on."""

    def __init__(self, stage: UnitStage, *, graph: ModelGraph, membership: Membership) -> None:
        self.stage = stage
        groups = membership.groups
        self.layers: Mapping[int, ShardedLayer] = {
            int(name): ShardedLayer(layer, group=groups.dp_cp, tensor_parallel_group=groups.tp)
            for name, layer in stage.layers.items()
        }
        self._visits = _visits(stage, graph, self.layers)
        self._pass: LayerPass | None = None
        stage.guard = self
        for index, layer in stage.layers.items():
            for parameter in layer.parameters():
                if parameter.requires_grad and parameter is not stage.shared_embedding_weight:
                    parameter.register_post_accumulate_grad_hook(self._reached(int(index)))

    @contextmanager
    def collectives(self, kind: ActionKind, *, is_joined: bool = False) -> Iterator[None]:
        """Give the computation that runs inside its weights, and take its gradients; nothing runs inside where `is_joined`."""
        assert self._pass is None, "computations of a stage follow each other"
        self._pass = LayerPass(kind, self._visits[kind], self.layers, is_joined=is_joined)
        yield
        self._pass.finish()
        self._pass = None

    def before(self, layer: int, hidden: Tensor | None) -> Tensor | None:
        """Called before a layer's forward; hidden: its input, which marks where its backward ends."""
        self.enter(layer)
        if hidden is not None and hidden.requires_grad and torch.is_grad_enabled():
            marked: Tensor = _OnBackward.apply(hidden, lambda: self.leave(layer))  # type: ignore[no-untyped-call]
            return marked
        return hidden

    def after(self, layer: int, output: Tensor | HeadOutput) -> Tensor | HeadOutput:
        """Called after a layer's forward; its output marks where its backward begins."""
        self.leave(layer)
        if isinstance(output, HeadOutput):
            return output._replace(
                loss_sum=self._mark_beginning(layer, output.loss_sum),
                conditions=None if output.conditions is None else self._mark_beginning(layer, output.conditions),
            )
        return self._mark_beginning(layer, output)

    def enter(self, layer: int) -> None:
        """Have a layer's weights."""
        assert self._pass is not None, "a sharded stage computes only inside `collectives`"
        self._pass.enter(layer)

    def leave(self, layer: int) -> None:
        """Give a layer's weights back, and reduce its gradients."""
        assert self._pass is not None
        self._pass.leave(layer)

    def _mark_beginning(self, layer: int, output: Tensor) -> Tensor:
        if not (output.requires_grad and torch.is_grad_enabled()):
            return output
        marked: Tensor = _OnBackward.apply(output, lambda: self.enter(layer))  # type: ignore[no-untyped-call]
        return marked

    def _reached(self, layer: int) -> Callable[[Tensor], None]:
        """What follows a layer's gradient in a weight gradient, where layers come in the order of the backward."""
        watcher = weakref.ref(self)  # what a parameter's hook refers to lives on, where the garbage collector cannot see it

        def reached(parameter: Tensor) -> None:
            current = watcher()
            if current is not None and current._pass is not None and current._pass.kind is ActionKind.WEIGHT_GRADIENT:
                current._pass.enter(layer)

        return reached


class _OnBackward(torch.autograd.Function):
    """The identity; its backward calls a function first."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, call: Callable[[], None]) -> Tensor:  # type: ignore[override]
        ctx.call = call
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.call()
        return gradient, None


def _visits(stage: UnitStage, graph: ModelGraph, layers: Mapping[int, ShardedLayer]) -> Mapping[ActionKind, tuple[Visit, ...]]:
    """What every kind of computation does at the stage's layers, on every replica and for every microbatch alike."""
    forward, backward = [], []
    for index in stage.layer_range:
        is_tied = stage.unit.ties_embeddings and index == len(stage.unit.layers) - 1
        gathers = (index, 0) if is_tied else (index,)
        forward.append(Visit(index, gathers, ()))
        copies = (0,) if is_tied and 0 not in stage.layer_range else ()
        reduces = tuple(layer for layer in (index, *copies) if layers[layer].is_trained)
        if layers_backward_need(graph, stage.unit.name, range(index, index + 1)).has_backward:
            backward.append(Visit(index, gathers, reduces))
    backward.reverse()
    return {
        ActionKind.FORWARD: tuple(forward),
        ActionKind.BACKWARD: tuple(backward),
        ActionKind.INPUT_GRADIENT: tuple(backward),
        ActionKind.WEIGHT_GRADIENT: tuple(Visit(visit.layer, (), visit.reduces) for visit in backward if visit.reduces),
    }
