"""Products of experts: rows that are sorted by expert, each times the weight of its expert, all experts together.

Where torch has a kernel for it, one does all experts' products; elsewhere the experts' rows are multiplied one after another into
one result. Transformer Engine's `GroupedLinear` multiplies on several streams, or in FP8.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from multimodal.model.deferrable_linear import queue_of
from multimodal.model.weight_gradient_queue import LinearWeightGradient

RowCounts = Tensor | list[int]
"""The number of rows of each expert; a tensor if torch's kernel is used, so that the host does not wait for it."""


def has_grouped_kernel(rows: Tensor, weights: Sequence[Tensor]) -> bool:
    """Return True if torch's kernel can multiply: bfloat16, on GPUs from compute capability 9.0 on, rows of whole 16 bytes."""
    if not (hasattr(torch, "_grouped_mm") and rows.is_cuda and rows.dtype == torch.bfloat16):
        return False
    is_aligned = all(size % 8 == 0 for weight in weights for size in weight.shape)
    return is_aligned and torch.cuda.get_device_capability(rows.device) >= (9, 0)


def grouped_linear(rows: Tensor, counts: RowCounts, weights: Sequence[Tensor]) -> Tensor:
    """Multiply on this rank alone; weight gradients are left to the active queue.

    rows: [num_rows, input_size], sorted by expert; weights: [output_size, input_size], of each expert.
    """
    return _GroupedLinear.apply(rows, counts, queue_of(weights[0], None), *weights)  # type: ignore[no-untyped-call]


def build_engine_linear(weights: Sequence[Tensor], *, accumulates: bool, delays: bool) -> Module:
    """Build Transformer Engine's module with these weights, whose gradients it accumulates in float32, or delays."""
    from transformer_engine.pytorch import GroupedLinear

    output_size, input_size = weights[0].shape
    options: dict[str, Any] = {"params_dtype": weights[0].dtype, "fuse_wgrad_accumulation": accumulates}
    options |= {"delay_wgrad_compute": True} if delays else {}  # unknown before 2.3
    module: Module = GroupedLinear(len(weights), input_size, output_size, bias=False, device="meta", **options)
    for index, weight in enumerate(weights):
        setattr(module, f"weight{index}", weight)
    return module


class GroupedWeightGradient(NamedTuple):
    """The gradients of the weights of all experts."""

    rows: Tensor
    output_gradient: Tensor
    counts: RowCounts
    weights: tuple[Tensor, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors that are kept until they are computed."""
        return self.rows, self.output_gradient

    def compute(self) -> None:
        """Compute the gradients; the hooks of the parameters run as after any backward."""
        torch.autograd.backward(self.weights, self.of_weights())

    def of_weights(self) -> tuple[Tensor, ...]:
        """Return the gradient of each weight, zero where no row chose the expert."""
        if isinstance(self.counts, Tensor) and not hasattr(self.weights[0], "accumulate_gradient"):
            found = torch._grouped_mm(self.output_gradient.t(), self.rows, offs=_ends(self.counts))
            return found.masked_fill_((self.counts == 0).view(-1, 1, 1), 0).unbind()
        counts = self.counts.tolist() if isinstance(self.counts, Tensor) else self.counts
        parts = zip(self.rows.split(counts), self.output_gradient.split(counts), self.weights, strict=True)
        return tuple(LinearWeightGradient(*each, None).of_weight() for each in parts)


class _GroupedLinear(torch.autograd.Function):
    """Weights are not saved as tensors: a saved tensor may come back as another object, without the hooks of its gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: RowCounts, queue: Any, *weights: Tensor) -> Tensor:
        ctx.counts, ctx.queue, ctx.weights = counts, queue, weights
        if ctx.needs_input_grad[3]:
            ctx.save_for_backward(rows)
        return _multiply(rows, counts, weights, is_transposed=True)

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        output_gradient = output_gradient.contiguous()
        gradient = None
        if ctx.needs_input_grad[0]:
            gradient = _multiply(output_gradient, ctx.counts, ctx.weights, is_transposed=False)
        found: Sequence[Tensor | None] = [None] * len(ctx.weights)
        if ctx.needs_input_grad[3]:
            (rows,) = ctx.saved_tensors
            pending = GroupedWeightGradient(rows, output_gradient, ctx.counts, ctx.weights)
            if ctx.queue is not None:
                ctx.queue.put(pending)
            else:
                found = pending.of_weights()
        return gradient, None, None, *found


def _multiply(rows: Tensor, counts: RowCounts, weights: Sequence[Tensor], *, is_transposed: bool) -> Tensor:
    if isinstance(counts, Tensor):
        stacked = _stacked(weights)
        return torch._grouped_mm(rows, stacked.transpose(1, 2) if is_transposed else stacked, offs=_ends(counts))
    output = rows.new_empty(len(rows), weights[0].shape[0 if is_transposed else 1])
    for own, result, weight in zip(rows.split(counts), output.split(counts), weights, strict=True):
        torch.mm(own, weight.t() if is_transposed else weight, out=result)
    return output


def _stacked(weights: Sequence[Tensor]) -> Tensor:
    """Return [num_experts, *shape]: a view where the weights lie evenly, as in buffers of the optimizer, and else a copy."""
    steps = {later.data_ptr() - earlier.data_ptr() for earlier, later in pairwise(weights)}
    is_one_storage = len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    if is_one_storage and len(steps) == 1 and (step := steps.pop()) > 0 and step % 16 == 0:
        first = weights[0].detach()
        return first.as_strided((len(weights), *first.shape), (step // first.element_size(), *first.stride()))
    return torch.stack(tuple(weights))


def _ends(counts: Tensor) -> Tensor:
    return counts.cumsum(0, dtype=torch.int32)
