"""Tensor parallel linear layers whose collectives run beside their products, part by part (DistTrain's StepCCL, section 6).

The same layers as `deferrable_linear.py`, weight gradients that are left for later included. What runs beside what:

    layer          forward                        backward
    column, SP     all-gather | product           reduce-scatter | product, then weight gradient
    column         (product)                      all-reduce     | product, then weight gradient
    row, SP        reduce-scatter | product       all-gather | product, (weight gradient)
    row            all-reduce     | product       (product, weight gradient)
"""

from typing import Any

import torch
from torch import Tensor

from multimodal.model.deferrable_linear import (
    DeferrableColumnParallelLinear,
    DeferrableRowParallelLinear,
    queue_of,
    weight_gradients,
)
from multimodal.model.overlapped_product import Overlap, gather_then_multiply, multiply_then_reduce, start_gathering
from multimodal.model.weight_gradient_queue import LinearWeightGradient, WeightGradientQueue


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
        output: Tensor = _OverlappedColumn.apply(input, weight, options["bias"], queue_of(weight), overlap)
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
        output: Tensor = _OverlappedRow.apply(input_, self.weight, queue_of(self.weight), overlap)
        if self.skip_bias_add or self.bias is None:
            return output, self.bias
        return output + self.bias, None


class _OverlappedColumn(torch.autograd.Function):
    """inputs: [num_rows (/ num_ranks under sequence parallelism), batch, size]; weight: [output_size / num_ranks, size].

    Only a share of the rows is kept until the backward, which gathers them again beside the product that gives their gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, queue: WeightGradientQueue | None, overlap: Overlap
    ) -> Tensor:
        ctx.save_for_backward(inputs)
        # Parameters stay themselves: a saved tensor may come back as another one, without the hooks of its gradient.
        ctx.weight, ctx.bias, ctx.queue, ctx.overlap = weight, bias, queue, overlap
        if overlap.is_sequence_parallel:
            output, _ = gather_then_multiply(inputs, weight.t(), overlap)
        else:
            output = inputs.matmul(weight.t())
        return output if bias is None else output.add_(bias)

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (inputs,) = ctx.saved_tensors
        is_trained = ctx.needs_input_grad[1]
        gathering = start_gathering(inputs, ctx.overlap) if is_trained and ctx.overlap.is_sequence_parallel else None
        reducing = multiply_then_reduce(output_gradient, ctx.weight, ctx.overlap) if ctx.needs_input_grad[0] else None
        of_weight: Tensor | None = None
        of_bias: Tensor | None = None
        if is_trained:
            rows = inputs if gathering is None else gathering.wait()
            of_weight, of_bias = weight_gradients(ctx.queue, LinearWeightGradient(rows, output_gradient, ctx.weight, ctx.bias))
        return None if reducing is None else reducing.wait(), of_weight, of_bias, None, None


class _OverlappedRow(torch.autograd.Function):
    """inputs: [num_rows, batch, size / num_ranks]; weight: [output_size, size / num_ranks]."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, queue: WeightGradientQueue | None, overlap: Overlap) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.weight, ctx.queue, ctx.overlap = weight, queue, overlap
        return multiply_then_reduce(inputs, weight.t(), overlap).wait()

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (inputs,) = ctx.saved_tensors
        gradient: Tensor | None = None
        rows = output_gradient
        if not ctx.overlap.is_sequence_parallel:
            gradient = rows.matmul(ctx.weight) if ctx.needs_input_grad[0] else None
        elif ctx.needs_input_grad[0]:
            gradient, rows = gather_then_multiply(rows, ctx.weight, ctx.overlap)
        else:
            rows = start_gathering(rows, ctx.overlap).wait()
        of_weight: Tensor | None = None
        if ctx.needs_input_grad[1]:
            of_weight, _ = weight_gradients(ctx.queue, LinearWeightGradient(inputs, rows, ctx.weight, None))
        return gradient, of_weight, None, None
