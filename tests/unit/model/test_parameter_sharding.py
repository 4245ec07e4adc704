import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from multimodal.model.layers.registry import sharding_of
from multimodal.model.parameter_sharding import WHOLE, ParameterSharding, full_shape, mark_sharding, take_shard
from multimodal.values.model_graph import ModelGraph
from tests.unit.model.join_shards import join_shards


@given(size=st.integers(1, 4), blocks=st.integers(1, 2), rows=st.integers(1, 3), dimension=st.sampled_from([None, 0, 1]))
def test_shards_join_to_the_whole(size: int, blocks: int, rows: int, dimension: int | None) -> None:
    sharding = ParameterSharding(dimension, blocks)
    full = torch.arange(4 * (size * blocks * rows) ** 2).reshape(2 * size * blocks * rows, -1)
    shards = [take_shard(full, sharding, rank=rank, tensor_parallel_size=size) for rank in range(size)]
    assert torch.equal(join_shards(shards, sharding), full)
    assert full_shape(shards[0].shape, sharding, tensor_parallel_size=size) == tuple(full.shape)
    assert sum(shard.numel() for shard in shards) == full.numel() * (size if dimension is None else 1)


def test_each_rank_holds_its_share_of_gate_and_up() -> None:
    gate, up = torch.arange(4), torch.arange(10, 14)
    shards = [take_shard(torch.cat((gate, up)), ParameterSharding(0, 2), rank=rank, tensor_parallel_size=2) for rank in range(2)]
    assert [shard.tolist() for shard in shards] == [[0, 1, 10, 11], [2, 3, 12, 13]]


@pytest.mark.parametrize(
    ("name", "is_gated", "expected"),
    [
        ("layers.1.self_attention.linear_qkv.weight", True, ParameterSharding(0)),
        ("layers.1.self_attention.linear_qkv.bias", True, ParameterSharding(0)),
        ("layers.1.self_attention.linear_proj.weight", True, ParameterSharding(1)),
        ("layers.1.self_attention.linear_proj.bias", True, WHOLE),
        ("layers.1.mlp.linear_fc1.weight", True, ParameterSharding(0, 2)),
        ("layers.1.mlp.linear_fc1.weight", False, ParameterSharding(0)),
        ("layers.1.mlp.linear_fc2.weight", True, ParameterSharding(1)),
        ("layers.1.mlp.linear_fc2.bias", True, WHOLE),
        ("layers.1.input_layernorm.weight", True, WHOLE),
        ("layers.0.word_embeddings.weight", False, ParameterSharding(0)),
        ("layers.3.output_layer.weight", False, ParameterSharding(0)),
        ("layers.0.weight", False, WHOLE),
    ],
)
def test_every_parameter_knows_its_split(name: str, is_gated: bool, expected: ParameterSharding) -> None:
    shape = {"num_layers": 2, "hidden_size": 4, "num_attention_heads": 1, "ffn_hidden_size": 4}
    described = {"role": "backbone", "activation": "swiglu" if is_gated else "gelu", **shape}
    llm = ModelGraph.from_dict({"units": {"llm": described}}).backbone
    assert sharding_of(llm, name) == expected


@pytest.mark.parametrize(("sharding", "is_split", "dimension"), [(ParameterSharding(1), True, 1), (WHOLE, False, -1)])
def test_marks_tell_megatron_what_is_split(sharding: ParameterSharding, is_split: bool, dimension: int) -> None:
    parameter = torch.zeros(2, 2)
    mark_sharding(parameter, sharding)
    assert (parameter.tensor_model_parallel, parameter.partition_dim) == (is_split, dimension)
