"""Every piece of a shard lies where the whole parameter has those values, and all shards fill it exactly once."""

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.runtime.state.held_tensors import pieces_of_shard
from multimodal.model.parameter_sharding import WHOLE, ParameterSharding, take_shard

SHARDINGS = [WHOLE, ParameterSharding(0), ParameterSharding(1), ParameterSharding(0, 2)]


@given(
    sharding=st.sampled_from(SHARDINGS),
    tensor_parallel_size=st.integers(1, 3),
    num_replicas=st.integers(1, 4),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    is_matrix=st.booleans(),
)
def test_pieces_fill_the_whole_parameter(
    sharding: ParameterSharding, tensor_parallel_size: int, num_replicas: int, sizes: tuple[int, int], is_matrix: bool
) -> None:
    is_matrix = is_matrix or sharding.dimension == 1
    shape = [size * tensor_parallel_size * sharding.num_blocks for size in sizes][: 2 if is_matrix else 1]
    whole = torch.arange(math.prod(shape)).view(shape)
    num_written = torch.zeros_like(whole)
    for rank in range(tensor_parallel_size if sharding != WHOLE else 1):
        shard = take_shard(whole, sharding, rank=rank, tensor_parallel_size=tensor_parallel_size).contiguous()
        cuts = [shard.numel() * index // num_replicas for index in range(num_replicas + 1)]
        for first, last in itertools.pairwise(cuts):
            pieces = pieces_of_shard(
                shard.view(-1)[first:last],
                elements=range(first, last),
                shape=tuple(shard.shape),
                sharding=sharding,
                rank=rank,
                tensor_parallel_size=tensor_parallel_size,
            )
            assert len(pieces) <= 3 * sharding.num_blocks
            for piece in pieces:
                place = tuple(
                    slice(offset, offset + size) for offset, size in zip(piece.offsets, piece.values.shape, strict=True)
                )
                assert torch.equal(whole[place], piece.values)
                num_written[place] += 1
    assert torch.equal(num_written, torch.ones_like(whole))
