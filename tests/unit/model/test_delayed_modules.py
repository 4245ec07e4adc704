"""Modules that keep weight gradients by themselves, as those of Transformer Engine do."""

from collections import deque
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from multimodal.model.weight_gradient_queue import WeightGradientQueue, defer_in_modules, defer_weight_gradients


class Store(deque[tuple[Tensor, Tensor]]):
    """Has the methods of Transformer Engine's `WeightGradStore`."""

    def __bool__(self) -> bool:
        return True

    def delay_wgrad_compute(self) -> bool:
        return True

    def pop(self) -> Any:  # type: ignore[override]
        inputs, gradient = self.popleft()
        return (gradient.t() @ inputs, None), None


class DelayingLinear(torch.nn.Module):
    """Like a linear layer of Transformer Engine with `delay_wgrad_compute`: what it keeps, it gives in the order it came."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(size, size, dtype=torch.float64))
        self.bias = torch.nn.Parameter(torch.randn(size, dtype=torch.float64))
        self.wgrad_store = Store()

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = _Delayed.apply(inputs, self.weight, self.bias, self.wgrad_store)
        return output


class _Delayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor, store: Any) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.store = store
        return inputs @ weight.t() + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        inputs, weight = ctx.saved_tensors
        ctx.store.append((inputs, gradient))
        return gradient @ weight, None, gradient.sum(0), None


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_gradients_come_when_they_are_asked_for(order: tuple[int, ...], recomputes: bool) -> None:
    """Each once, whatever the order; layers that are computed again leave them once."""
    model = torch.nn.Sequential(DelayingLinear(3), torch.nn.Tanh(), DelayingLinear(3))
    inputs = [torch.randn(4, 3, dtype=torch.float64) for _ in range(3)]
    expected = [torch.autograd.grad(_plain(model, each).sum(), list(model.parameters())) for each in inputs]
    arrived = {parameter: [] for parameter in model.parameters()}  # type: ignore[var-annotated]
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(partial(_take, arrived))
    assert defer_in_modules(model)
    queues = []
    for each in inputs:
        queue = WeightGradientQueue()
        with defer_weight_gradients(queue):
            output = _checkpointed(model, each, queue) if recomputes else model(each)
        output.sum().backward()
        queues.append(queue)
    assert not arrived[model[0].weight] and [len(queue) for queue in queues] == [2, 2, 2]
    for index in order:
        queues[index].compute()
    assert not any(len(layer.wgrad_store) for layer in (model[0], model[2]))
    for parameter, *gradients in zip(model.parameters(), *expected, strict=True):
        assert len(arrived[parameter]) == 3 and torch.allclose(sum(arrived[parameter]), sum(gradients), rtol=0, atol=1e-12)


def test_frozen_modules_leave_nothing() -> None:
    layer = DelayingLinear(2).requires_grad_(False)
    defer_in_modules(layer)
    queue = WeightGradientQueue()
    with defer_weight_gradients(queue):
        layer(torch.ones(1, 2, dtype=torch.float64, requires_grad=True))
    assert len(queue) == 0
    assert not defer_in_modules(torch.nn.Linear(2, 2)), "it delays nothing"


def _take(arrived: dict[Tensor, list[Tensor]], parameter: Tensor) -> None:
    """As Megatron's hook takes gradients to their buffers."""
    if parameter.grad is not None:
        arrived[parameter].append(parameter.grad)
        parameter.grad = None


def _plain(model: torch.nn.Sequential, inputs: Tensor) -> Tensor:
    for layer in model:
        inputs = inputs @ layer.weight.t() + layer.bias if isinstance(layer, DelayingLinear) else layer(inputs)
    return inputs


def _checkpointed(model: torch.nn.Module, inputs: Tensor, queue: WeightGradientQueue) -> Tensor:
    contexts = torch.no_grad(), defer_weight_gradients(queue)
    output: Tensor = torch.utils.checkpoint.checkpoint(
        model, inputs.requires_grad_(), use_reentrant=False, context_fn=lambda: (torch.enable_grad(), contexts[1])
    )
    return output
