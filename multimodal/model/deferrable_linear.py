"""Linear layers that say when they wait for a collective, and may compute their weight gradient later than their input gradient.

megatron-core's layers compute both gradients in one autograd function and wait for their collectives wherever they need them.
These are the same layers, except that the stage is told of every wait (`TensorParallelWaits`), and that while a
WeightGradientQueue is active the backward gives the input gradient alone and leaves the rest to the queue. Subclasses rather than
a replaced function: nothing global changes, so it works alike with CUDA and without.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from multimodal.model.collectives import RankLink, sum_rows
from multimodal.model.tensor_parallel_waits import TensorParallelWaits
from multimodal.model.weight_gradient_queue import LinearWeightGradient, WeightGradientQueue, active_queue


def queue_of(weight: Tensor) -> WeightGradientQueue | None:
    """Return the active queue if the weight has a gradient that may be left to it."""
    return active_queue() if weight.requires_grad and torch.is_grad_enabled() else None


class DeferrableColumnParallelLinear(ColumnParallelLinear):
    """ColumnParallelLinear that leaves its weight gradient to the active queue, if there is one."""

    waits: TensorParallelWaits | None = None

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **options: Any) -> Tensor:
        link: RankLink | None = None
        if options["sequence_parallel"] or options["allreduce_dgrad"]:
            link = RankLink(options["tp_group"], options["sequence_parallel"], self.waits)
        output: Tensor = _Linear.apply(input, weight, options["bias"], queue_of(weight), link)
        return output


class DeferrableRowParallelLinear(RowParallelLinear):
    """RowParallelLinear that leaves its weight gradient to the active queue, if there is one."""

    waits: TensorParallelWaits | None = None

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """input_: [num_rows, batch, input_size / num_ranks]. Returns the output, and the bias where the caller adds it."""
        product = deferrable_linear(input_, self.weight, None)
        output = sum_rows(product, RankLink(self.tp_group, self.sequence_parallel, self.waits))
        if self.skip_bias_add or self.bias is None:
            return output, self.bias
        return output + self.bias, None


def deferrable_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply on this rank alone; the weight gradient goes to the active queue."""
    output: Tensor = _Linear.apply(inputs, weight, bias, queue_of(weight), None)
    return output


class _Linear(torch.autograd.Function):
    """Linear whose backward gives the input gradient, and computes or queues the weight gradient.

    link: the ranks that share the weight by outputs, None for a product of this rank alone. Under sequence parallelism the input
    is gathered, and its gradient reduce-scattered; only the share is kept until the backward, which gathers it again for the
    weight gradient. Otherwise the input is the same on all ranks, and its gradient their sum.
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, queue: WeightGradientQueue | None, link: RankLink | None
    ) -> Tensor:
        if ctx.needs_input_grad[1]:
            ctx.save_for_backward(inputs)
        # Parameters stay themselves: a saved tensor may come back as another one, without the hooks of its gradient.
        ctx.weight, ctx.bias, ctx.queue, ctx.link = weight, bias, queue, link
        rows = inputs if link is None else link.complete(link.start_gathering(inputs))
        output = rows.matmul(weight.t())
        return output if bias is None else output.add_(bias)

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        link: RankLink | None = ctx.link
        rows: Tensor | None = ctx.saved_tensors[0] if ctx.needs_input_grad[1] else None
        gathering = None if rows is None or link is None else link.start_gathering(rows)
        gradient = output_gradient.matmul(ctx.weight) if ctx.needs_input_grad[0] else None
        if gathering is not None and link is not None:
            rows = link.complete(gathering)
        summing = None if gradient is None or link is None else link.start_summing(gradient)
        of_weight, of_bias = None, None
        if rows is not None:
            of_weight, of_bias = weight_gradients(ctx.queue, LinearWeightGradient(rows, output_gradient, ctx.weight, ctx.bias))
        if summing is not None and link is not None:
            gradient = link.complete(summing)
        return gradient, of_weight, of_bias, None, None


def weight_gradients(queue: WeightGradientQueue | None, pending: LinearWeightGradient) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of weight and bias; None where a queue computes them later."""
    if queue is not None:
        queue.put(pending)
        return None, None
    return pending.of_weight(), pending.of_bias()
