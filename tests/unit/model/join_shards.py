"""The inverse of `take_shard`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from multimodal.model.parameter_sharding import ParameterSharding


def join_shards(shards: Sequence[Tensor], sharding: ParameterSharding) -> Tensor:
    """Return the whole parameter from the parts of all tensor parallel ranks, in rank order."""
    if sharding.dimension is None:
        return shards[0]
    blocks = zip(*(shard.chunk(sharding.num_blocks, dim=sharding.dimension) for shard in shards), strict=True)
    return torch.cat([torch.cat(block, dim=sharding.dimension) for block in blocks], dim=sharding.dimension)
