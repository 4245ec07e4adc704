"""Linear layers whose weight gradient may be computed later than their input gradient.

megatron-core's layers compute both in one autograd function. These are the same layers, except that while a WeightGradientQueue
is active they run as a function that computes the input gradient alone and leaves the rest to the queue. Subclasses rather than a
replaced function: nothing global changes, so it works alike with CUDA and without.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor
from torch.distributed import ProcessGroup

from multimodal.model.weight_gradient_queue import LinearWeightGradient, WeightGradientQueue, active_queue


def queue_of(weight: Tensor) -> WeightGradientQueue | None:
    """Return the active queue if the weight has a gradient that may be left to it."""
    return active_queue() if weight.requires_grad and torch.is_grad_enabled() else None


class DeferrableColumnParallelLinear(ColumnParallelLinear):
    """ColumnParallelLinear that leaves its weight gradient to the active queue, if there is one."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **options: Any) -> Tensor:
        queue = queue_of(weight)
        if queue is None:
            whole: Tensor = super()._forward_impl(input, weight, *args, **options)
            return whole
        gathers, reduces = options["sequence_parallel"], options["allreduce_dgrad"]
        group = options["tp_group"]
        output: Tensor = _DeferredLinear.apply(input, weight, options["bias"], queue, group, gathers, reduces)
        return output


class DeferrableRowParallelLinear(RowParallelLinear):
    """RowParallelLinear that leaves its weight gradient to the active queue, if there is one."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **options: Any) -> Tensor:
        queue = queue_of(weight)
        if queue is None:
            whole: Tensor = super()._forward_impl(input, weight, *args, **options)
            return whole
        output: Tensor = _DeferredLinear.apply(input, weight, options["bias"], queue, None, False, False)
        return output


def deferrable_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply torch's linear, alike on every tensor parallel rank; its weight gradient goes to the active queue."""
    queue = queue_of(weight)
    if queue is None:
        return torch.nn.functional.linear(inputs, weight, bias)
    output: Tensor = _DeferredLinear.apply(inputs, weight, bias, queue, None, False, False)
    return output


class _DeferredLinear(torch.autograd.Function):
    """Linear whose backward gives the input gradient and queues the inputs of the weight gradient.

    gathers: the input is shared by rows over `group` (sequence parallelism): it is gathered, its gradient reduce-scattered; only
    the share is kept until the backward. reduces: the input is the same on all ranks of `group`, its gradient their sum.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        queue: WeightGradientQueue,
        group: ProcessGroup | None,
        gathers: bool,
        reduces: bool,
    ) -> Tensor:
        ctx.save_for_backward(inputs)
        # Parameters stay themselves: a saved tensor may come back as another one, without the hooks of its gradient.
        ctx.weight, ctx.bias, ctx.queue, ctx.group, ctx.gathers, ctx.reduces = weight, bias, queue, group, gathers, reduces
        output = _gathered(ctx, inputs).matmul(weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (inputs,) = ctx.saved_tensors
        ctx.queue.put(LinearWeightGradient(_gathered(ctx, inputs), output_gradient, ctx.weight, ctx.bias))
        gradient: Tensor | None = None
        if ctx.needs_input_grad[0]:
            gradient = output_gradient.matmul(ctx.weight)
            if ctx.gathers:
                gradient = reduce_scatter_to_sequence_parallel_region(gradient, group=ctx.group)
            elif ctx.reduces:
                gradient = reduce_from_tensor_model_parallel_region(gradient, group=ctx.group)
        return gradient, None, None, None, None, None, None


def _gathered(ctx: Any, inputs: Tensor) -> Tensor:
    if not ctx.gathers:
        return inputs
    whole: Tensor = gather_from_sequence_parallel_region(inputs, tensor_parallel_output_grad=True, group=ctx.group)
    return whole
