"""Linear layers that report their waits for collectives, and may compute weight gradients later than input gradients.

megatron-core's layers compute both gradients in one autograd function and wait for their collectives wherever they need them.
These layers do the same, except that they report every wait to the stage (`TensorParallelWaits`), that with an active
WeightGradientQueue the backward computes only the input gradient and leaves the rest to the queue, and that they may have an
adapter. They are subclasses rather than a replaced function, so nothing global changes, with CUDA or without.
"""

from typing import Any, ClassVar, NamedTuple

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from multimodal.model.adapter import NO_ADAPTER, Adapter, adapter_of
from multimodal.model.collectives import Arriving, RankLink, sum_rows
from multimodal.model.overlapped_product import Added, add_product, gather_then_multiply, multiply_then_sum
from multimodal.model.tensor_parallel_waits import TensorParallelWaits
from multimodal.model.weight_gradient_queue import LinearWeightGradient, WeightGradientQueue, active_queue


def queue_of(weight: Tensor, adapter: Adapter | None) -> WeightGradientQueue | None:
    """Return the active queue if there are trained parameters whose gradients it may compute."""
    is_trained = weight.requires_grad or adapter is not None
    return active_queue() if is_trained and torch.is_grad_enabled() else None


class DeferrableColumnParallelLinear(ColumnParallelLinear):
    """ColumnParallelLinear that leaves its weight gradient to the active queue, if there is one."""

    waits: TensorParallelWaits | None = None
    splits_inputs: ClassVar[bool] = False

    def __init__(self, *args: Any, num_overlapped_parts: int = 1, **options: Any) -> None:
        """num_overlapped_parts: parts of the collectives, each beside the product of another part."""
        super().__init__(*args, **options)
        self.num_overlapped_parts = num_overlapped_parts

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **options: Any) -> Tensor:
        gathered: RankLink | None = None
        if options["sequence_parallel"] or options["allreduce_dgrad"]:
            gathered = RankLink(options["tp_group"], options["sequence_parallel"], self.waits, self.num_overlapped_parts)
        return deferrable_linear(input, weight, options["bias"], adapter_of(self), gathered=gathered)


class DeferrableRowParallelLinear(RowParallelLinear):
    """RowParallelLinear that leaves its weight gradient to the active queue, if there is one."""

    waits: TensorParallelWaits | None = None
    splits_inputs: ClassVar[bool] = True

    def __init__(self, *args: Any, num_overlapped_parts: int = 1, **options: Any) -> None:
        """num_overlapped_parts: as in DeferrableColumnParallelLinear."""
        super().__init__(*args, **options)
        self.num_overlapped_parts = num_overlapped_parts

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """input_: [num_rows, batch, input_size / num_ranks]. Returns the output, and the bias where the caller adds it."""
        link, adapter = RankLink(self.tp_group, self.sequence_parallel, self.waits, self.num_overlapped_parts), adapter_of(self)
        if link.num_parts > 1 and self.tp_group.size() > 1:
            output = deferrable_linear(input_, self.weight, None, adapter, summed=link)
        else:  # a step of its own: what recomputes a layer stops behind the last product, before its sum
            output = sum_rows(deferrable_linear(input_, self.weight, None, adapter), link)
        if self.skip_bias_add or self.bias is None:
            return output, self.bias
        return output + self.bias, None


def deferrable_linear(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    adapter: Adapter | None = None,
    *,
    gathered: RankLink | None = None,
    summed: RankLink | None = None,
) -> Tensor:
    """Multiply; the weight gradient is left to the active queue.

    gathered: the ranks among which the weight's outputs are split: under sequence parallelism the input is gathered, and in the
    backward its gradient is summed. summed: those among which its inputs are split: the product is summed, and its gradient
    gathered. Without either, it is a product of this rank alone.
    """
    queue = queue_of(weight, adapter)
    return _Linear.apply(inputs, weight, bias, queue, gathered, summed, *(adapter or NO_ADAPTER))


class _Linear(torch.autograd.Function):
    """Linear whose backward gives the input gradient, and computes or queues the weight gradient.

    Only this rank's rows of a gathered input are kept until the backward, which gathers them again for the weight gradient. down,
    up, scale: the adapter's.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        queue: WeightGradientQueue | None,
        gathered: RankLink | None,
        summed: RankLink | None,
        down: Tensor | None,
        up: Tensor | None,
        scale: float,
    ) -> Tensor:
        adapter = Adapter.of(down, up, scale)
        # Parameters are not saved as tensors: a saved tensor may come back as another object, without the hooks of its gradient.
        ctx.weight, ctx.bias, ctx.queue, ctx.gathered, ctx.summed, ctx.adapter = weight, bias, queue, gathered, summed, adapter
        output, rows = (None, inputs) if summed is not None else gather_then_multiply(inputs, weight.t(), gathered)
        inner = None if adapter is None else adapter.inner(rows)
        added: Added = None if adapter is None or inner is None else (inner, adapter.up.t())
        if ctx.needs_input_grad[1] or inner is not None:
            ctx.save_for_backward(inputs, inner)
        if summed is not None:
            return summed.complete(multiply_then_sum(rows, weight.t(), summed, added=added))
        assert output is not None
        output = add_product(output, added)
        return output if bias is None else output.add_(bias)

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gathered: RankLink | None = ctx.gathered
        adapter: Adapter | None = ctx.adapter
        needs_gradient: bool = ctx.needs_input_grad[0]
        rows, inner = ctx.saved_tensors if ctx.needs_input_grad[1] or adapter is not None else (None, None)
        gathering = None if rows is None or gathered is None else gathered.start_gathering(rows)
        gradient: Tensor | None = None
        summing: Arriving | None = None
        if needs_gradient and (gathered is None or gathered.num_parts == 1):
            gradient, output_gradient = gather_then_multiply(output_gradient, ctx.weight, ctx.summed)
        elif ctx.summed is not None:
            output_gradient = ctx.summed.complete(ctx.summed.start_gathering(output_gradient))
        inner_gradient = None if adapter is None else adapter.inner_gradient(output_gradient)
        added: Added = None if adapter is None or inner_gradient is None else (inner_gradient, adapter.down)
        if gradient is not None:
            gradient = add_product(gradient, added)
        elif needs_gradient and gathered is not None:
            summing = multiply_then_sum(output_gradient, ctx.weight, gathered, added=added)
        if gathering is not None and gathered is not None:
            rows = gathered.complete(gathering)
        if gradient is not None and gathered is not None:
            summing = gathered.start_summing(gradient)
        found = WeightGradients() if rows is None else weight_gradients(ctx, rows, output_gradient, inner, inner_gradient)
        if summing is not None and gathered is not None:
            gradient = gathered.complete(summing)
        return gradient, found.weight, found.bias, None, None, None, found.down, found.up, None


class WeightGradients(NamedTuple):
    """The gradients of one product; None if a queue computes them later, or nothing is trained."""

    weight: Tensor | None = None
    bias: Tensor | None = None
    down: Tensor | None = None
    up: Tensor | None = None


def weight_gradients(
    ctx: Any, rows: Tensor, output_gradient: Tensor, inner: Tensor | None = None, inner_gradient: Tensor | None = None
) -> WeightGradients:
    """Compute or queue the weight gradients of one product.

    ctx: of the product's function, with weight, bias, adapter and queue; rows: all rows of the input; inner: the value between
    the adapter's two matrices, and its gradient.
    """
    pending: dict[str, LinearWeightGradient] = {}
    if ctx.needs_input_grad[1]:
        pending["weight"] = LinearWeightGradient(rows, output_gradient, ctx.weight, ctx.bias)
    if inner is not None and inner_gradient is not None:
        pending["down"] = LinearWeightGradient(rows, inner_gradient, ctx.adapter.down, None)
        if ctx.adapter.up.requires_grad:
            pending["up"] = LinearWeightGradient(inner, output_gradient, ctx.adapter.up, None)
    if ctx.queue is not None:
        for each in pending.values():
            ctx.queue.put(each)
        return WeightGradients()
    found: dict[str, Tensor | None] = {name: each.of_weight() for name, each in pending.items()}
    return WeightGradients(**found, bias=pending["weight"].of_bias() if "weight" in pending else None)
