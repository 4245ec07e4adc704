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
from multimodal.model.collectives import RankLink, sum_rows
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

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **options: Any) -> Tensor:
        link: RankLink | None = None
        if options["sequence_parallel"] or options["allreduce_dgrad"]:
            link = RankLink(options["tp_group"], options["sequence_parallel"], self.waits)
        return _multiply(input, weight, options["bias"], link, adapter_of(self))


class DeferrableRowParallelLinear(RowParallelLinear):
    """RowParallelLinear that leaves its weight gradient to the active queue, if there is one."""

    waits: TensorParallelWaits | None = None
    splits_inputs: ClassVar[bool] = True

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """input_: [num_rows, batch, input_size / num_ranks]. Returns the output, and the bias where the caller adds it."""
        product = _multiply(input_, self.weight, None, None, adapter_of(self))
        output = sum_rows(product, RankLink(self.tp_group, self.sequence_parallel, self.waits))
        if self.skip_bias_add or self.bias is None:
            return output, self.bias
        return output + self.bias, None


def deferrable_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None, adapter: Adapter | None = None) -> Tensor:
    """Multiply on this rank alone; the weight gradient is left to the active queue."""
    return _multiply(inputs, weight, bias, None, adapter)


def _multiply(inputs: Tensor, weight: Tensor, bias: Tensor | None, link: RankLink | None, adapter: Adapter | None) -> Tensor:
    queue = queue_of(weight, adapter)
    output: Tensor = _Linear.apply(inputs, weight, bias, queue, link, *(adapter or NO_ADAPTER))
    return output


class _Linear(torch.autograd.Function):
    """Linear whose backward gives the input gradient, and computes or queues the weight gradient.

    link: the ranks that share the weight by outputs, None for a product of this rank alone. Under sequence parallelism the input
    is gathered, and its gradient reduce-scattered; only this rank's rows are kept until the backward, which gathers them again
    for the weight gradient. Otherwise the input is the same on all ranks, and its gradient is summed. down, up, scale: the
    adapter's.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        queue: WeightGradientQueue | None,
        link: RankLink | None,
        down: Tensor | None,
        up: Tensor | None,
        scale: float,
    ) -> Tensor:
        adapter = Adapter.of(down, up, scale)
        # Parameters are not saved as tensors: a saved tensor may come back as another object, without the hooks of its gradient.
        ctx.weight, ctx.bias, ctx.queue, ctx.link, ctx.adapter = weight, bias, queue, link, adapter
        rows = inputs if link is None else link.complete(link.start_gathering(inputs))
        output = rows.matmul(weight.t())
        inner = None if adapter is None else adapter.inner(rows)
        if adapter is not None and inner is not None:
            output = add_product(output, inner, adapter.up.t())
        if ctx.needs_input_grad[1] or inner is not None:
            ctx.save_for_backward(inputs, inner)
        return output if bias is None else output.add_(bias)

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        link: RankLink | None = ctx.link
        adapter: Adapter | None = ctx.adapter
        rows, inner = ctx.saved_tensors if ctx.needs_input_grad[1] or adapter is not None else (None, None)
        gathering = None if rows is None or link is None else link.start_gathering(rows)
        gradient = output_gradient.matmul(ctx.weight) if ctx.needs_input_grad[0] else None
        inner_gradient = None if adapter is None else adapter.inner_gradient(output_gradient)
        if gradient is not None and adapter is not None and inner_gradient is not None:
            gradient = add_product(gradient, inner_gradient, adapter.down)
        if gathering is not None and link is not None:
            rows = link.complete(gathering)
        summing = None if gradient is None or link is None else link.start_summing(gradient)
        found = WeightGradients() if rows is None else weight_gradients(ctx, rows, output_gradient, inner, inner_gradient)
        if summing is not None and link is not None:
            gradient = link.complete(summing)
        return gradient, found.weight, found.bias, None, None, found.down, found.up, None


def add_product(product: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Add left x right to a product with the same number of rows, in place."""
    product.flatten(0, -2).addmm_(left.flatten(0, -2), right)
    return product


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
