"""How each parameter is split over tensor parallel ranks: the one place that knows, for initialisation, checks and export."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor

from multimodal.values.model_graph import LayerKind, Unit


class ParameterSharding(NamedTuple):
    """dimension: the split dimension, None for a parameter that every rank holds whole.

    num_blocks: a gated first MLP layer stacks [gate; up], and each rank holds its share of both, so it is split as 2 blocks.
    """

    dimension: int | None
    num_blocks: int = 1


_SPLIT_BY_OUTPUT = ("linear_qkv", "linear_fc1", "word_embeddings", "output_layer")
_SPLIT_BY_INPUT = ("linear_proj", "linear_fc2")
WHOLE = ParameterSharding(None)


def parameter_sharding(name: str, *, is_gated: bool) -> ParameterSharding:
    """Sharding of the parameter called `name` in a UnitStage; `is_gated` when its MLP is (projectors never are)."""
    module, _, kind = name.rpartition(".")
    owner = module.rpartition(".")[2]
    if owner in _SPLIT_BY_OUTPUT and kind in ("weight", "bias"):
        return ParameterSharding(0, 2 if owner == "linear_fc1" and is_gated else 1)
    if owner in _SPLIT_BY_INPUT and kind == "weight":
        return ParameterSharding(1)
    return WHOLE


def sharding_of(unit: Unit, name: str) -> ParameterSharding:
    """Sharding of a parameter of a UnitStage of `unit`, by its name there (`layers.<layer index>. ...`)."""
    layer = unit.layers[int(name.split(".")[1])]
    return parameter_sharding(name, is_gated=unit.transformer.activation == "swiglu" and layer is LayerKind.TRANSFORMER)


def full_shape(shape: Sequence[int], sharding: ParameterSharding, *, tensor_parallel_size: int) -> tuple[int, ...]:
    """Shape of the whole parameter, from the shape of a shard."""
    return tuple(size * tensor_parallel_size if index == sharding.dimension else size for index, size in enumerate(shape))


def take_shard(full: Tensor, sharding: ParameterSharding, *, rank: int, tensor_parallel_size: int) -> Tensor:
    """The share of tensor parallel rank `rank` of a whole parameter."""
    if sharding.dimension is None:
        return full
    blocks = full.chunk(sharding.num_blocks, dim=sharding.dimension)
    return torch.cat(
        [block.chunk(tensor_parallel_size, dim=sharding.dimension)[rank] for block in blocks], dim=sharding.dimension
    )


def join_shards(shards: Sequence[Tensor], sharding: ParameterSharding) -> Tensor:
    """The whole parameter from the shares of all tensor parallel ranks, in rank order."""
    if sharding.dimension is None:
        return shards[0]
    blocks = zip(*(shard.chunk(sharding.num_blocks, dim=sharding.dimension) for shard in shards), strict=True)
    return torch.cat([torch.cat(block, dim=sharding.dimension) for block in blocks], dim=sharding.dimension)


def mark_sharding(parameter: Tensor, sharding: ParameterSharding) -> None:
    """Tell megatron-core (gradient norm, checkpoint) how the parameter is split; it does so itself only when it initialises."""
    if not hasattr(parameter, "tensor_model_parallel"):
        is_split = sharding.dimension is not None
        set_tensor_model_parallel_attributes(parameter, is_split, sharding.dimension if is_split else -1, sharding.num_blocks)
