"""config.json of text models: as model graphs, back, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from multimodal.hugging_face.registry import ARCHITECTURES, architecture_of, check_same_model, with_vocab_size
from multimodal.values.errors import ModelError
from multimodal.values.model_graph import Experts, ModelGraph
from tests.unit.hugging_face.folders import read_folder, written

MIXTRAL = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_attention_heads": 8}
QWEN3_MOE = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}


def read(folder: Path, **config: Any) -> ModelGraph:
    return read_folder(folder, LLAMA | config)


def test_what_a_config_lacks_is_what_transformers_takes(tmp_path: Path) -> None:
    shape = read(tmp_path).backbone.transformer
    assert (shape.num_layers, shape.ffn_hidden_size, shape.query_groups, shape.head_channels) == (32, 11008, 4, 16)
    assert (shape.layernorm_epsilon, shape.rotary_base) == (1e-6, 10000.0)
    qwen = read(tmp_path, architectures=["Qwen3ForCausalLM"], model_type="qwen3", num_attention_heads=32).backbone.transformer
    assert (qwen.head_channels, qwen.qk_layernorm, qwen.add_qkv_bias) == (128, True, False)


@pytest.mark.parametrize(
    "positions", [{"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {"rope_scaling": None}]
)
def test_every_version_says_where_positions_come_from(positions: dict[str, Any], tmp_path: Path) -> None:
    expected = 10000.0 if "rope_scaling" in positions else 5e5
    assert read(tmp_path, **positions).backbone.transformer.rotary_base == expected


@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        ("LlamaForCausalLM", "llama"),
        ("Qwen2ForCausalLM", "qwen2"),
        ("Qwen3ForCausalLM", "qwen3"),
        ("MixtralForCausalLM", "mixtral"),
        ("Qwen3MoeForCausalLM", "qwen3_moe"),
        ("MistralForCausalLM", "mistral"),
    ],
)
def test_a_graph_tells_its_family(name: str, model_type: str, tmp_path: Path) -> None:
    family = ARCHITECTURES[name]
    tied = {"tie_word_embeddings": True}
    graph = read(tmp_path, architectures=[name], model_type=model_type, num_key_value_heads=2, **tied)
    assert architecture_of(graph) is family
    config = written(graph)
    again = ModelGraph.from_dict(family.to_graph(config))
    assert replace(again.backbone.transformer, kv_channels=graph.backbone.transformer.kv_channels) == graph.backbone.transformer
    assert again.backbone.ties_embeddings
    assert with_vocab_size(config, 7)["vocab_size"] == 7


def test_long_contexts_of_llama(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    graph = read(tmp_path, rope_scaling=scaling, rope_theta=5e5)
    assert graph.backbone.transformer.rotary_scaling == (8.0, 1.0, 4.0, 8192.0)
    assert written(graph)["rope_scaling"] == scaling
    with pytest.raises(ModelError, match="'llama3' without high_freq_factor; add it"):
        read(tmp_path, rope_scaling={**scaling, "high_freq_factor": None})


def test_positions_that_slow_down_beyond_a_length(tmp_path: Path) -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    graph = read(tmp_path, rope_scaling={**scaling, "type": "dynamic"}, max_position_embeddings=32768)
    assert graph.backbone.transformer.rotary_dynamic_scaling == (2.0, 32768.0)
    config = written(graph)
    assert config["rope_scaling"] == scaling and config["max_position_embeddings"] == 32768
    with pytest.raises(ModelError, match="'dynamic' without max_position_embeddings; add it"):
        read(tmp_path, rope_scaling=scaling, max_position_embeddings=None)


@pytest.mark.parametrize(
    ("scaling", "config"),
    [
        ({"type": "linear", "factor": 4.0}, {}),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, {"max_position_embeddings": 131072}),
        ({"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 0.5}, {"max_position_embeddings": 4096}),
        (
            {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
            {"max_position_embeddings": 64, "original_max_position_embeddings": 16},
        ),
    ],
)
def test_scaled_positions_are_written_as_what_computes_the_same(
    scaling: dict[str, Any], config: dict[str, Any], tmp_path: Path
) -> None:
    graph = read(tmp_path, rope_scaling=scaling, **config)
    assert len(graph.backbone.transformer.rotary_factors) == 8
    again = ModelGraph.from_dict(architecture_of(graph).to_graph({**config, **written(graph)}))
    assert again.backbone.transformer == replace(graph.backbone.transformer, num_query_groups=4, kv_channels=16)


def test_a_model_that_no_family_has_is_named_with_what_differs(tmp_path: Path) -> None:
    graph = read(tmp_path)
    shape = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 8, "normalization": "LayerNorm"}
    other = ModelGraph.from_dict({"units": {"text": {"role": "backbone", **shape}}})
    with pytest.raises(ModelError, match="for LlamaForCausalLM unit 'text' would need normalization RMSNorm, found LayerNorm"):
        architecture_of(other)
    with pytest.raises(ModelError, match=r"is of another model: unit 'text' would need num_layers 32, found 2"):
        check_same_model(tmp_path, other)
    check_same_model(tmp_path, graph)


@pytest.mark.parametrize(
    ("config", "experts"),
    [
        (MIXTRAL, Experts(8)),
        ({**MIXTRAL, "num_local_experts": 4, "num_experts_per_tok": 1}, Experts(4, 1)),
        ({**MIXTRAL, "router_aux_loss_coef": 0.02}, Experts(8)),
        ({**MIXTRAL, "router_aux_loss_coef": 0.02, "output_router_logits": True}, Experts(8, aux_loss_coeff=0.02)),
        ({**QWEN3_MOE, "num_experts": 16, "norm_topk_prob": True}, Experts(16, 8, 768)),
        ({**QWEN3_MOE, "num_local_experts": 16}, Experts(16, 8, 768, router_pre_softmax=True)),
    ],
)
def test_experts_are_read(config: dict[str, Any], experts: Experts, tmp_path: Path) -> None:
    assert read(tmp_path, **config).backbone.transformer.experts == experts


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({**MIXTRAL, "sliding_window": 96}, 96),
        ({**QWEN3_MOE, "sliding_window": 96, "max_window_layers": 2}, None),
        ({**QWEN3_MOE, "use_sliding_window": True, "max_window_layers": 2}, 4096),
    ],
)
def test_windows_of_layers_with_experts_are_in_all_or_none(config: dict[str, Any], window: int | None, tmp_path: Path) -> None:
    unit = read(tmp_path, **config).backbone
    assert (unit.transformer.sliding_window, unit.window_everywhere) == (window, window)
    assert {*unit.layers[1:-1]} == {"moe_transformer" if window is None else "sliding_moe_transformer"}


def test_a_run_may_balance_experts_of_a_model_that_does_not(tmp_path: Path) -> None:
    graph = read(tmp_path, **MIXTRAL)
    shape = graph.backbone.transformer
    assert shape.experts is not None
    balanced = replace(shape, experts=replace(shape.experts, aux_loss_coeff=0.01))
    check_same_model(tmp_path, replace(graph, units=(replace(graph.backbone, transformer=balanced),)))


@pytest.mark.parametrize(("given", "expected"), [({}, 4096), ({"sliding_window": None}, None), ({"sliding_window": 512}, 512)])
def test_the_window_of_a_mistral(given: dict[str, Any], expected: int | None, tmp_path: Path) -> None:
    graph = read(tmp_path, architectures=["MistralForCausalLM"], model_type="mistral", num_key_value_heads=2, **given)
    assert graph.backbone.transformer.sliding_window == expected
    assert architecture_of(graph).name == ("LlamaForCausalLM" if expected is None else "MistralForCausalLM")
