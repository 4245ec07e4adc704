"""Linear layers with other weights for the conditions of a generator than for its patches, which attend together (MMDiT).

Stable Diffusion 3, section 4. Rows are sorted into patches and conditions, each kind is multiplied by its own weights, and the
collective before or behind the product is one for both.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from multimodal.model.adapter import adapter_of
from multimodal.model.collectives import RankLink, gather_for_products, sum_rows
from multimodal.model.deferrable_linear import DeferrableColumnParallelLinear, DeferrableRowParallelLinear, deferrable_linear


class JointRows(NamedTuple):
    """Which rows are conditions."""

    order: Tensor
    """[num_rows of the tensor parallel group]: patches, with padding, before conditions."""
    num_patches: int
    are_conditions: Tensor
    """[num_rows], of this rank under sequence parallelism."""


class JointColumnParallelLinear(DeferrableColumnParallelLinear):
    """Its own weights are for patches, those of `conditions` for the others; `rows` is set before each forward."""

    rows: JointRows

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conditions = DeferrableColumnParallelLinear(*args, **options)

    def forward(self, input_: Tensor, *args: Any, **options: Any) -> tuple[Tensor, None]:
        """input_: [num_rows, 1, input_size]. Returns the products with their biases."""
        gathered = gather_for_products(input_, RankLink(self.tp_group, self.sequence_parallel, self.waits))
        return _multiply(gathered, self, has_bias=True), None


class JointRowParallelLinear(DeferrableRowParallelLinear):
    """The same with a sum behind the products."""

    rows: JointRows

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conditions = DeferrableRowParallelLinear(*args, **options)

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        """input_: [num_rows, 1, input_size / num_ranks]. Returns the products with their biases."""
        made = sum_rows(_multiply(input_, self), RankLink(self.tp_group, self.sequence_parallel, self.waits))
        if self.bias is not None:
            made = made + torch.where(self.rows.are_conditions[:, None, None], self.conditions.bias, self.bias)
        return made, None


def _multiply(inputs: Tensor, linear: Any, *, has_bias: bool = False) -> Tensor:
    order, num_patches, _ = linear.rows
    parts = inputs.index_select(0, order).tensor_split((num_patches,))
    products = [
        deferrable_linear(part, each.weight, each.bias if has_bias else None, adapter_of(each))
        for part, each in zip(parts, (linear, linear.conditions), strict=True)
    ]
    return torch.cat(products).index_select(0, order.argsort())
