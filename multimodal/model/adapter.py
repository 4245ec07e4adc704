"""Low-rank adapters of linear layers (LoRA: Hu et al., 2021): y = W x + scale x B A x, of which A and B are trained.

Adapters add no communication. If W is split by its outputs, so is B, and all ranks have A; the gradient of x is summed over ranks
with W's. If W is split by its inputs, so is A, and all ranks have B; its product is summed together with W's. In either case each
rank has a part of the gradient of the replicated matrix; these parts are summed at the end of a step, like those of norms under
sequence parallelism.

New rows of a frozen vocabulary are an adapter, too: A is what is added to them, and B, which is fixed, puts each into its place.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from multimodal.values.units.unit import NEW_ROWS

DOWN, UP = "lora_a", "lora_b"
"""Names of A and B in their linear layer."""


class Adapter(NamedTuple):
    """The two matrices added to one product: parameters, or the tensors that autograd passes in their place."""

    down: Tensor
    """[rank, input_size]."""
    up: Tensor
    """[output_size, rank]."""
    scale: float

    def inner(self, rows: Tensor) -> Tensor:
        """Return the rows times A, scaled."""
        return rows.matmul(self.down.t()).mul_(self.scale)

    def inner_gradient(self, output_gradient: Tensor) -> Tensor:
        """Return the gradient of `inner`'s result."""
        return output_gradient.matmul(self.up).mul_(self.scale)

    @torch.no_grad()
    def merged_with(self, values: Tensor, elements: range) -> Tensor:
        """Return flat elements of the adapted matrix with the product, in at least float32; where that is 0, unchanged."""
        wide = torch.promote_types(values.dtype, torch.float32)
        added = self.up.to(wide).matmul(self.down.to(wide)).mul_(self.scale).view(-1)[elements.start : elements.stop]
        return torch.where(added == 0, values.to(wide), added + values)


NO_ADAPTER = (None, None, 0.0)
"""Arguments of autograd functions without an adapter."""


def attach_adapters(layer: Module, modules: Collection[str], *, rank: int, scale: float) -> None:
    """Add adapters, uninitialised, to the linear layers of these names, and freeze all other parameters of the layer."""
    named = layer.named_modules()
    linears = [module for name, module in named if name.removesuffix(".conditions").rpartition(".")[2] in modules]
    if linears:
        layer.requires_grad_(False)
    for linear in linears:
        weight: Tensor = linear.weight  # type: ignore[assignment]
        for name, shape in ((DOWN, (rank, weight.shape[1])), (UP, (weight.shape[0], rank))):
            linear.register_parameter(name, Parameter(torch.empty(shape, dtype=weight.dtype, device=weight.device)))
        whole = linear.lora_b if splits_inputs(linear) else linear.lora_a
        is_summed = linear.sequence_parallel if is_engine_linear(linear) else linear.tp_group.size() > 1  # type: ignore[union-attr, operator]
        whole.sequence_parallel = is_summed  # type: ignore[union-attr, assignment]
        linear.lora_scale = scale  # type: ignore[assignment]


def attach_new_rows(layer: Module, matrix: Module, tokens: range, *, tensor_parallel_rank: int) -> None:
    """Let a matrix of the vocabulary learn its rows of some tokens, and freeze all other parameters of the layer.

    matrix: the module in `layer` that has this rank's equal share of the rows, or uses that of tied embeddings.
    """
    layer.requires_grad_(False)
    weight: Tensor | None = matrix.weight  # type: ignore[assignment]
    if weight is None:
        return
    new_rows = Parameter(torch.empty((len(tokens), weight.shape[1]), dtype=weight.dtype, device=weight.device))
    matrix.register_parameter(NEW_ROWS, new_rows)
    new_rows.sequence_parallel = True  # type: ignore[attr-defined]  # each rank has the gradient of its own rows
    own = torch.arange(len(weight), device=weight.device) + tensor_parallel_rank * len(weight)
    places = own[:, None] == torch.tensor(tokens, device=weight.device)
    matrix.register_buffer("new_row_places", places.to(weight.dtype), persistent=False)


def share_adapter(linear: Module, owner: Module) -> None:
    """Let a linear layer that multiplies by another module's weight have that module's adapter, too."""
    linear.__dict__["adapter_owner"] = owner  # no submodule: its parameters have one name


def is_engine_linear(linear: Module) -> bool:
    """Return True for a linear layer of Transformer Engine, whose adapter is computed apart (`deferrable_linear.py`)."""
    return hasattr(linear, "parallel_mode")


def splits_inputs(linear: Any) -> bool:
    """Return True if each tensor parallel rank has some inputs of a linear layer, False if it has some outputs."""
    return bool(linear.parallel_mode == "row" if is_engine_linear(linear) else linear.splits_inputs)


def adapter_of(linear: Module) -> Adapter | None:
    """Return the adapter of a linear layer, or of a matrix of the vocabulary, if it has one."""
    linear = linear.__dict__.get("adapter_owner", linear)
    if hasattr(linear, NEW_ROWS):
        return Adapter(linear.new_rows, linear.new_row_places, 1.0)  # type: ignore[arg-type]
    if not hasattr(linear, DOWN):
        return None
    return Adapter(linear.lora_a, linear.lora_b, linear.lora_scale)  # type: ignore[arg-type]


def is_adapter(name: str) -> bool:
    """Return True if a parameter, by its name, is one of an adapter's two matrices, or what is added to new rows."""
    return name.endswith((f".{DOWN}", f".{UP}", f".{NEW_ROWS}"))


def is_new_rows(name: str) -> bool:
    """Return True if a parameter, by its name, is what is added to new rows of the vocabulary."""
    return name.endswith(f".{NEW_ROWS}")
