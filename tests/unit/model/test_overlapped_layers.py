"""Which layers of a stage overlap their collectives."""

import pytest

from multimodal.model.deferrable_linear import DeferrableColumnParallelLinear, DeferrableRowParallelLinear
from multimodal.values.model_graph import ModelGraph
from tests.unit.model.rank_groups import build_stage, groups_of

SHAPE = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 24}
GRAPH = ModelGraph.from_dict(
    {
        "units": {
            "vision": {"role": "encoder", "image": {"patch_size": 2, "in_channels": 1}, **SHAPE},
            "llm": {"role": "backbone", **SHAPE},
        }
    }
)


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("unit", ["vision", "llm"])
def test_the_four_products_of_a_transformer_layer_overlap(unit: str, num_parts: int) -> None:
    stage = build_stage(GRAPH, unit, groups=groups_of(2), sequence_parallel=True, num_overlapped_parts=num_parts)
    found = {
        name: module.num_overlapped_parts
        for name, module in stage.named_modules()
        if isinstance(module, DeferrableColumnParallelLinear | DeferrableRowParallelLinear)
    }
    overlapped = {name for name, parts in found.items() if parts > 1}
    expected = {
        f"layers.1.{name}"
        for name in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    }
    assert overlapped == (expected if num_parts > 1 else set())
    assert all(found[name] == num_parts for name in expected)
