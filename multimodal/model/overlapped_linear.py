"""Tensor parallel linear layers whose collectives run beside their products, part by part (DistTrain's StepCCL, section 6).

The same layers as in `deferrable_linear.py`, including weight gradients that are deferred. These pairs overlap:

    layer          forward                        backward
    column, SP     all-gather | product           reduce-scatter | product, then weight gradient
    column         (product)                      all-reduce     | product, then weight gradient
    row, SP        reduce-scatter | product       all-gather | product, (weight gradient)
    row            all-reduce     | product       (product, weight gradient)
"""

from typing import Any

import torch
from torch import Tensor

from multimodal.model.adapter import NO_ADAPTER, Adapter, adapter_of
from multimodal.model.collectives import Arriving
from multimodal.model.deferrable_linear import (
    DeferrableColumnParallelLinear,
    DeferrableRowParallelLinear,
    WeightGradients,
    add_product,
    queue_of,
    weight_gradients,
)
from multimodal.model.overlapped_product import Factor, Overlap, gather_then_multiply, multiply_then_reduce, start_gathering
from multimodal.model.weight_gradient_queue import WeightGradientQueue


class OverlappedColumnParallelLinear(DeferrableColumnParallelLinear):
    """Column parallel linear layer: its input is gathered, and its input's gradient summed, in `num_overlapped_parts`."""

    def __init__(self, *args: Any, num_overlapped_parts: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self.num_overlapped_parts = num_overlapped_parts

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **options: Any) -> Tensor:
        gathers = options["sequence_parallel"]
        if not (gathers or options["allreduce_dgrad"]):
            alone: Tensor = super()._forward_impl(input, weight, *args, **options)
            return alone
        overlap = Overlap(options["tp_group"], self.num_overlapped_parts, gathers)
        adapter = adapter_of(self)
        queue = queue_of(weight, adapter)
        output: Tensor = _OverlappedColumn.apply(input, weight, options["bias"], queue, overlap, *(adapter or NO_ADAPTER))
        return output


class OverlappedRowParallelLinear(DeferrableRowParallelLinear):
    """Row parallel linear layer: its output is summed, and its output's gradient gathered, in `num_overlapped_parts`."""

    def __init__(self, *args: Any, num_overlapped_parts: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self.num_overlapped_parts = num_overlapped_parts

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """input_: [num_rows, batch, input_size / num_ranks]. Returns the output, and the bias where the caller adds it."""
        if self.tp_group.size() == 1 or not self.input_is_parallel or self.explicit_expert_comm:
            alone: tuple[Tensor, Tensor | None] = super().forward(input_)
            return alone
        overlap = Overlap(self.tp_group, self.num_overlapped_parts, self.sequence_parallel)
        adapter = adapter_of(self)
        queue = queue_of(self.weight, adapter)
        output: Tensor = _OverlappedRow.apply(input_, self.weight, queue, overlap, *(adapter or NO_ADAPTER))
        if self.skip_bias_add or self.bias is None:
            return output, self.bias
        return output + self.bias, None


def _forward_factor(weight: Tensor, adapter: Adapter | None) -> Factor:
    low_rank = None if adapter is None else (adapter.down.t() * adapter.scale, adapter.up.t())
    return Factor(weight.t(), low_rank)


def _backward_factor(weight: Tensor, adapter: Adapter | None) -> Factor:
    low_rank = None if adapter is None else (adapter.up * adapter.scale, adapter.down)
    return Factor(weight, low_rank)


class _OverlappedColumn(torch.autograd.Function):
    """inputs: [num_rows (/ num_ranks under sequence parallelism), batch, size]; weight: [output_size / num_ranks, size].

    Only a share of the rows is kept until the backward, which gathers them again beside the product that computes their gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        queue: WeightGradientQueue | None,
        overlap: Overlap,
        down: Tensor | None,
        up: Tensor | None,
        scale: float,
    ) -> Tensor:
        adapter = Adapter.of(down, up, scale)
        # Parameters are not saved as tensors: a saved tensor may come back as another object, without the hooks of its gradient.
        ctx.weight, ctx.bias, ctx.queue, ctx.overlap, ctx.adapter = weight, bias, queue, overlap, adapter
        rows = inputs
        if overlap.is_sequence_parallel:
            output, rows = gather_then_multiply(inputs, _forward_factor(weight, adapter), overlap)
        else:
            output = inputs.matmul(weight.t())
        inner = None if adapter is None else adapter.inner(rows)
        if inner is not None and up is not None and not overlap.is_sequence_parallel:
            output = add_product(output, inner, up.t())
        ctx.save_for_backward(inputs, inner)
        return output if bias is None else output.add_(bias)

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        inputs, inner = ctx.saved_tensors
        is_trained = ctx.needs_input_grad[1] or inner is not None
        gathering = start_gathering(inputs, ctx.overlap) if is_trained and ctx.overlap.is_sequence_parallel else None
        reducing: Arriving | None = None
        if ctx.needs_input_grad[0]:
            reducing = multiply_then_reduce(output_gradient, _backward_factor(ctx.weight, ctx.adapter), ctx.overlap)
        found = WeightGradients()
        if is_trained:
            rows = inputs if gathering is None else gathering.wait()
            inner_gradient = None if inner is None else ctx.adapter.inner_gradient(output_gradient)
            found = weight_gradients(ctx, rows, output_gradient, inner, inner_gradient)
        gradient = None if reducing is None else reducing.wait()
        return gradient, found.weight, found.bias, None, None, found.down, found.up, None


class _OverlappedRow(torch.autograd.Function):
    """inputs: [num_rows, batch, size / num_ranks]; weight: [output_size, size / num_ranks]."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        queue: WeightGradientQueue | None,
        overlap: Overlap,
        down: Tensor | None,
        up: Tensor | None,
        scale: float,
    ) -> Tensor:
        adapter = Adapter.of(down, up, scale)
        ctx.weight, ctx.bias, ctx.queue, ctx.overlap, ctx.adapter = weight, None, queue, overlap, adapter
        ctx.save_for_backward(inputs, None if adapter is None else adapter.inner(inputs))
        return multiply_then_reduce(inputs, _forward_factor(weight, adapter), overlap).wait()

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        inputs, inner = ctx.saved_tensors
        gradient: Tensor | None = None
        rows = output_gradient
        if ctx.overlap.is_sequence_parallel and ctx.needs_input_grad[0]:
            gradient, rows = gather_then_multiply(rows, _backward_factor(ctx.weight, ctx.adapter), ctx.overlap)
        elif ctx.overlap.is_sequence_parallel:
            rows = start_gathering(rows, ctx.overlap).wait()
        inner_gradient = None if inner is None else ctx.adapter.inner_gradient(rows)
        if ctx.needs_input_grad[0] and gradient is None:
            gradient = rows.matmul(ctx.weight)
            if inner_gradient is not None:
                gradient = add_product(gradient, inner_gradient, ctx.adapter.down)
        found = WeightGradients()
        if ctx.needs_input_grad[1] or inner is not None:
            found = weight_gradients(ctx, inputs, rows, inner, inner_gradient)
        return gradient, found.weight, None, None, found.down, found.up, None
