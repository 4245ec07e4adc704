import math

import pytest
import torch

from multimodal.model.layers.registry import sharding_of
from multimodal.values.model_graph import ModelGraph
from tests.unit.model.rank_groups import build_stage, groups_of, join_shards

# megatron-core takes every group for one of size 1 while torch.distributed is not initialised.
pytestmark = pytest.mark.usefixtures("world_of_one")

SHAPE = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 24, "add_bias_linear": True}
IMAGE = {"patch_size": 2, "in_channels": 1}
GRAPH = ModelGraph.from_dict(
    {
        "units": {
            "vision": {"role": "encoder", "image": IMAGE, "normalization": "LayerNorm", **SHAPE},
            "llm": {"role": "backbone", "untie_embeddings_and_output_weights": False, **SHAPE},
            "painter": {"role": "generator", "image": IMAGE, **SHAPE},
        }
    }
)


def joined(unit: str, *, size: int, cuts: tuple[int, ...], seed: int = 5) -> dict[str, torch.Tensor]:
    found = {}
    for first, last in zip((0, *cuts), (*cuts, 4), strict=True):
        groups = [groups_of(size, rank=rank) for rank in range(size)]
        stages = [build_stage(GRAPH, unit, layers=range(first, last), groups=each, seed=seed) for each in groups]
        shards = [dict(stage.named_parameters()) for stage in stages]
        for name in shards[0]:
            whole = join_shards([shard[name].detach() for shard in shards], sharding_of(GRAPH.unit(unit), name))
            assert name not in found or torch.equal(found[name], whole), "two copies of one parameter differ"
            found[name] = whole
    return found


@pytest.mark.parametrize("unit", ["vision", "llm", "painter"])
@pytest.mark.parametrize(("size", "cuts"), [(2, ()), (1, (1, 2)), (4, (2,)), (2, (1, 3))])
def test_values_do_not_depend_on_the_layout(unit: str, size: int, cuts: tuple[int, ...]) -> None:
    expected, found = joined(unit, size=1, cuts=()), joined(unit, size=size, cuts=cuts)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_another_seed_gives_other_values() -> None:
    first, second = joined("llm", size=1, cuts=()), joined("llm", size=1, cuts=(), seed=6)
    assert all(first[name].dim() < 2 or not torch.equal(first[name], second[name]) for name in first)


def test_norms_start_at_one_biases_at_zero_and_ends_of_residual_branches_small() -> None:
    found = joined("llm", size=1, cuts=())
    assert found["layers.1.input_layernorm.weight"].eq(1).all() and found["layers.3.norm.weight"].eq(1).all()
    assert found["layers.1.mlp.linear_fc1.bias"].eq(0).all()
    assert float(found["layers.1.mlp.linear_fc1.weight"].std()) == pytest.approx(0.02, rel=0.1)
    assert float(found["layers.1.mlp.linear_fc2.weight"].std()) == pytest.approx(0.02 / math.sqrt(4), rel=0.2)


def test_layers_and_units_start_differently() -> None:
    vision, llm = joined("vision", size=1, cuts=()), joined("llm", size=1, cuts=())
    name = "mlp.linear_fc1.weight"
    assert not torch.equal(llm[f"layers.1.{name}"], llm[f"layers.2.{name}"])
    assert not torch.equal(llm[f"layers.1.{name}"], vision[f"layers.1.{name}"])
