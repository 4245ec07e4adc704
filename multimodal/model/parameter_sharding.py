"""Splits parameters over tensor parallel ranks and joins them again, by the rule of their kind of layer."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor


class ParameterSharding(NamedTuple):
    """The split of one parameter over tensor parallel ranks."""

    dimension: int | None
    """The dimension that is cut; None for a parameter that every rank holds whole."""
    num_blocks: int = 1
    """Stacked matrices, of each of which a rank holds a part: 2 if a gated first MLP layer stacks [gate; up]."""


WHOLE = ParameterSharding(None)


def full_shape(shape: Sequence[int], sharding: ParameterSharding, *, tensor_parallel_size: int) -> tuple[int, ...]:
    """Return the shape of the whole parameter, from the shape of a shard."""
    return tuple(size * tensor_parallel_size if index == sharding.dimension else size for index, size in enumerate(shape))


def take_shard(full: Tensor, sharding: ParameterSharding, *, rank: int, tensor_parallel_size: int) -> Tensor:
    """Return the part of tensor parallel rank `rank` of a whole parameter."""
    dim = sharding.dimension
    if dim is None:
        return full
    blocks = full.chunk(sharding.num_blocks, dim=dim)
    return torch.cat([block.chunk(tensor_parallel_size, dim=dim)[rank] for block in blocks], dim=dim)


def mark_sharding(parameter: Tensor, sharding: ParameterSharding) -> None:
    """Mark the split of the parameter for megatron-core (gradient norm, checkpoint), which only marks what it initialises."""
    if not hasattr(parameter, "tensor_model_parallel"):
        is_split = sharding.dimension is not None
        set_tensor_model_parallel_attributes(parameter, is_split, sharding.dimension if is_split else -1, sharding.num_blocks)
