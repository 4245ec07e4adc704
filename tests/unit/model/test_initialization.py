import math

import pytest
import torch

from multimodal.values.model_graph import ModelGraph
from tests.unit.model.rank_groups import build_stage

# megatron-core takes every group for one of size 1 while torch.distributed is not initialised.
pytestmark = pytest.mark.usefixtures("world_of_one")

SHAPE = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 24, "add_bias_linear": True}
IMAGE = {"patch_size": 2, "in_channels": 1}
GRAPH = ModelGraph.from_dict(
    {
        "units": {
            "vision": {"role": "encoder", "image": IMAGE, "normalization": "LayerNorm", **SHAPE},
            "llm": {"role": "backbone", "untie_embeddings_and_output_weights": False, **SHAPE},
        }
    }
)


def values_of(unit: str, *, seed: int = 5) -> dict[str, torch.Tensor]:
    return {name: values.detach() for name, values in build_stage(GRAPH, unit, seed=seed).named_parameters()}


def test_another_seed_gives_other_values() -> None:
    first, second = values_of("llm"), values_of("llm", seed=6)
    assert all(first[name].dim() < 2 or not torch.equal(first[name], second[name]) for name in first)


def test_norms_start_at_one_biases_at_zero_and_ends_of_residual_branches_small() -> None:
    found = values_of("llm")
    assert found["layers.1.input_layernorm.weight"].eq(1).all() and found["layers.3.norm.weight"].eq(1).all()
    assert found["layers.1.mlp.linear_fc1.bias"].eq(0).all()
    assert float(found["layers.1.mlp.linear_fc1.weight"].std()) == pytest.approx(0.02, rel=0.1)
    assert float(found["layers.1.mlp.linear_fc2.weight"].std()) == pytest.approx(0.02 / math.sqrt(4), rel=0.2)


def test_layers_and_units_start_differently() -> None:
    vision, llm = values_of("vision"), values_of("llm")
    name = "mlp.linear_fc1.weight"
    assert not torch.equal(llm[f"layers.1.{name}"], llm[f"layers.2.{name}"])
    assert not torch.equal(llm[f"layers.1.{name}"], vision[f"layers.1.{name}"])
