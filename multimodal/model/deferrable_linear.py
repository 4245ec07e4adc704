"""Linear layers that report their waits for collectives, and may compute weight gradients later than input gradients.

megatron-core's layers compute both gradients in one autograd function and wait for their collectives wherever they need them.
These layers do the same, except that they report every wait to the stage (`TensorParallelWaits`), that with an active
WeightGradientQueue the backward computes only the input gradient and leaves the rest to the queue, and that they may have an
adapter. They are subclasses rather than a replaced function, so nothing global changes, with CUDA or without.

A collective may overlap with the products beside it (DistTrain, section 6, StepCCL): both are cut into the same parts, so ranks
wait for one part of the collective only. Gathered rows are put into their places as they arrive, so nothing is left to be
remapped after the products (Figure 14). These pairs overlap (SP: sequence parallelism):

    layer          forward                        backward
    column, SP     all-gather | product           reduce-scatter | product, then weight gradient
    column         (product)                      all-reduce     | product, then weight gradient
    row, SP        reduce-scatter | product       all-gather | product, (weight gradient)
    row            all-reduce     | product       (product, weight gradient)

Adapters of Transformer Engine's layers are computed beside the layers' own product, and their collectives are apart:

                          rows                      A          between A and B              B
    split by outputs      after the fused norm      whole      rows of all ranks            split
    split by inputs       the layer's input         split      sum, this rank's rows        whole

What is sent then has the adapter's rank for its width, where local layers add the product before the sum of theirs
(`adapter.py`). The gradient of a whole matrix comes from the rows that a rank has, so only sequence parallelism sums it.
"""

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from torch.nn import Module

from multimodal.attention.context_parallel import reduce_scatter_single
from multimodal.model.adapter import NO_ADAPTER, Adapter, adapter_of, is_engine_linear, splits_inputs
from multimodal.model.collectives import Arriving, RankLink, TensorParallelWaits, gather_for_products, sequence_parts, sum_rows
from multimodal.model.weight_gradient_queue import LinearWeightGradient, WeightGradientQueue, active_queue


def gather_then_multiply(share: Tensor, matrix: Tensor, link: RankLink | None) -> tuple[Tensor, Tensor]:
    """Gather rows and multiply each part as soon as it has arrived, while later parts are on their way.

    share: [num_rows, batch, size]; matrix: [size, output_size]; link: None for a product of this rank alone.
    Returns [num_ranks * num_rows, batch, output_size] and the gathered rows.
    """
    if link is None or link.num_parts == 1 or not link.is_sequence_parallel:
        rows = share if link is None else link.complete(link.start_gathering(share))
        return _multiply(rows, matrix), rows
    rows, works = link.start_gathering(share)
    product = rows.new_empty((*rows.shape[:-1], matrix.shape[1]))
    parts = sequence_parts(len(share), num_parts=link.num_parts)
    for part, work in zip(parts, works, strict=True):
        work.wait()
        blocks, made = (each.unflatten(0, (link.group.size(), -1)) for each in (rows, product))  # by the rank that owns them
        _multiply(blocks[:, part], matrix, into=made[:, part])
    return product, rows


Added = tuple[Tensor, Tensor] | None
"""[num_rows, batch, rank] and [rank, output_size], whose product is added to another with as many rows."""


def add_product(product: Tensor, added: Added) -> Tensor:
    """Add the product of two matrices in place, if there are any."""
    if added is not None:
        product.flatten(0, -2).addmm_(added[0].flatten(0, -2), added[1])
    return product


def multiply_then_sum(rows: Tensor, matrix: Tensor, link: RankLink, *, added: Added) -> Arriving:
    """Multiply part by part, and sum each part over the ranks while later parts are multiplied.

    rows: [num_rows, batch, size]. Returns [num_rows, batch, output_size], or under sequence parallelism this rank's share.
    """
    if link.num_parts == 1:
        return link.start_summing(add_product(_multiply(rows, matrix), added))
    num_blocks = link.group.size() if link.is_sequence_parallel else 1
    blocks = rows.contiguous().unflatten(0, (num_blocks, -1))
    inner = None if added is None else added[0].contiguous().unflatten(0, (num_blocks, -1))
    _, num_rows, batch, _ = blocks.shape
    result = rows.new_empty((num_rows, batch, matrix.shape[1]))
    works = []
    for part in sequence_parts(num_rows, num_parts=link.num_parts):
        product = rows.new_empty((num_blocks, *result[part].shape)) if link.is_sequence_parallel else result[None, part]
        _multiply(blocks[:, part], matrix, into=product)
        if inner is not None and added is not None:
            product.flatten(1, 2).baddbmm_(inner[:, part].flatten(1, 2), added[1].expand(num_blocks, *added[1].shape))
        if link.is_sequence_parallel:
            works.append(reduce_scatter_single(result[part], product.flatten(0, 1), group=link.group, async_op=True))
        else:
            works.append(dist.all_reduce(result[part], group=link.group, async_op=True))
    return Arriving(result, tuple(works))


def _multiply(rows: Tensor, matrix: Tensor, *, into: Tensor | None = None) -> Tensor:
    """rows: [num_rows, batch, size], or a slice of each rank's, [num_ranks, num_rows, batch, size], whose products go `into`."""
    if into is None:
        return rows.matmul(matrix)
    torch.bmm(rows.flatten(1, 2), matrix.expand(len(rows), *matrix.shape), out=into.flatten(1, 2))
    return into


def queue_of(weight: Tensor, adapter: Adapter | None) -> WeightGradientQueue | None:
    """Return the active queue if there are trained parameters whose gradients it may compute."""
    is_trained = weight.requires_grad or adapter is not None
    return active_queue() if is_trained and torch.is_grad_enabled() else None


class _InParts:
    waits: TensorParallelWaits | None = None

    def __init__(self, *args: Any, num_overlapped_parts: int = 1, **options: Any) -> None:
        """num_overlapped_parts: parts of the collectives, each beside the product of another part."""
        super().__init__(*args, **options)
        self.num_overlapped_parts = num_overlapped_parts


class DeferrableColumnParallelLinear(_InParts, ColumnParallelLinear):
    """ColumnParallelLinear that leaves its weight gradient to the active queue, if there is one."""

    splits_inputs: ClassVar[bool] = False

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **options: Any) -> Tensor:
        gathered: RankLink | None = None
        if options["sequence_parallel"] or options["allreduce_dgrad"]:
            gathered = RankLink(options["tp_group"], options["sequence_parallel"], self.waits, self.num_overlapped_parts)
        return deferrable_linear(input, weight, options["bias"], adapter_of(self), gathered=gathered)


class DeferrableRowParallelLinear(_InParts, RowParallelLinear):
    """RowParallelLinear that leaves its weight gradient to the active queue, if there is one."""

    splits_inputs: ClassVar[bool] = True

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
    """Multiply; the weight gradient is left to the active queue. Without links, it is a product of this rank alone.

    gathered: ranks that split the weight's outputs: under sequence parallelism the input is gathered, and in the backward its
    gradient is summed. summed: ranks that split its inputs: the product is summed, and its gradient gathered.
    """
    queue = queue_of(weight, adapter)
    return _Linear.apply(inputs, weight, bias, queue, gathered, summed, *(adapter or NO_ADAPTER))


class _Linear(torch.autograd.Function):
    """Linear whose backward gives the input gradient, and computes or queues the weight gradient; with an adapter.

    Only this rank's rows of a gathered input are kept until the backward, which gathers them again for the weight gradient.
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
        adapter = Adapter(down, up, scale) if down is not None and up is not None else None
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
        found = {} if rows is None else weight_gradients(ctx, rows, output_gradient, inner, inner_gradient)
        if summing is not None and gathered is not None:
            gradient = gathered.complete(summing)
        of_weight, of_bias, of_down, of_up = map(found.get, ("weight", "bias", "down", "up"))
        return gradient, of_weight, of_bias, None, None, None, of_down, of_up, None


def weight_gradients(
    ctx: Any, rows: Tensor, output_gradient: Tensor, inner: Tensor | None, inner_gradient: Tensor | None
) -> dict[str, Tensor | None]:
    """Compute or queue the weight gradients of one product; ctx: of its function.

    rows: all rows of the input; inner: the value between the adapter's two matrices, and its gradient. Returns the gradients of
    "weight", "bias", "down" and "up", without those that a queue computes later, or that are not trained.
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
        return {}
    found: dict[str, Tensor | None] = {name: each.of_weight() for name, each in pending.items()}
    return {**found, "bias": pending["weight"].of_bias() if "weight" in pending else None}


def adapt_engine_linears(layer: Module) -> None:
    """Let Transformer Engine's linear layers inside add the products of their adapters, where they have some."""
    linear: Any
    for linear in layer.modules():
        if is_engine_linear(linear) and adapter_of(linear) is not None:
            if hasattr(linear, "return_layernorm_output"):
                linear.return_layernorm_output = True
            linear.register_forward_hook(_add_adapter)


def _add_adapter(linear: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> tuple[Any, Any]:
    """Return product and bias as megatron-core's callers expect them; output: also has the normalised rows of a fused norm."""
    product, *rest = output
    rows = inputs[0]
    if hasattr(linear, "return_layernorm_output"):
        product, rows = product if isinstance(product, tuple) else (product, rest.pop())
    adapter = adapter_of(linear)
    assert adapter is not None
    inner = deferrable_linear(rows, adapter.down, None) * adapter.scale
    if linear.tp_size > 1:
        exchange = sum_rows if splits_inputs(linear) else gather_for_products
        inner = exchange(inner, RankLink(linear.tp_group, linear.sequence_parallel))
    return product + deferrable_linear(inner, adapter.up, None), rest[0] if rest else None
