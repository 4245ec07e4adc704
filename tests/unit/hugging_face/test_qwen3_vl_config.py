"""config.json of Qwen3-VL: as a model graph, what is refused, and that it can be planned."""

from pathlib import Path
from typing import Any

import pytest

from multimodal.plan.planners import PLANNERS
from multimodal.plan.planners.search.prediction import predict_run
from multimodal.values.errors import ModelError
from multimodal.values.model_graph import ModelGraph
from tests.unit.hugging_face.folders import read_folder
from tests.unit.plan.planners.planning_cases import request

TEXT: dict[str, Any] = {
    "model_type": "qwen3_vl_text",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
    "rope_theta": 5000000,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
VISION: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "deepstack_visual_indexes": [5, 11, 17],
    "depth": 24,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 1024,
    "in_channels": 3,
    "intermediate_size": 4096,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "out_hidden_size": 2560,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
PUBLISHED: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "tie_word_embeddings": True,
    "text_config": TEXT,
    "vision_config": VISION,
}
"""As Qwen3-VL-4B-Instruct has it, without what computes nothing."""


def read(folder: Path, **config: Any) -> ModelGraph:
    return read_folder(folder, PUBLISHED | config)


def test_the_published_config_is_understood(tmp_path: Path) -> None:
    graph = read(tmp_path)
    vision, llm = graph.unit("vision"), graph.backbone
    assert vision.image is not None
    assert (vision.image.position_grid, vision.image.deepstack_layers) == (48, (5, 11, 17))
    assert (vision.layers[0], vision.transformer.activation) == ("stretched_patch_embedding", "gelu_tanh")
    assert (llm.transformer.qk_layernorm, llm.transformer.add_qkv_bias, llm.ties_embeddings) == (True, False, True)
    assert (llm.transformer.rotary_sections, llm.transformer.has_interleaved_sections) == ((24, 20, 20), True)
    assert ModelGraph.from_dict(graph.to_dict()) == graph


def test_what_travels_beside_hidden_states_is_known(tmp_path: Path) -> None:
    graph = read(tmp_path)
    assert [graph.num_carried("vision", layer) for layer in (0, 5, 6, 11, 12, 17, 18, 24)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert graph.width_behind("vision", 24) == 4 * 1024
    assert graph.width_behind("vision", 25) == 4 * 2560
    assert [graph.width_behind("llm", layer) for layer in (0, 1, 2, 3, 36)] == [4 * 2560, 3 * 2560, 2 * 2560, 2560, 2560]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"vision_config": {**VISION, "num_position_embeddings": 2300}},
            "num_position_embeddings is 2300, expected those of a sq",
        ),
        ({"vision_config": {**VISION, "deepstack_visual_indexes": [5, 3]}}, r"deepstack_layers \[5, 3\] must increase"),
        ({"vision_config": {**VISION, "deepstack_visual_indexes": [5, 24]}}, r"must be below num_layers 24"),
        ({"vision_config": {**VISION, "out_hidden_size": 64}}, "out_hidden_size is 64, but the LLM's hidden_size 2560"),
        ({"text_config": {**TEXT, "num_hidden_layers": 2}}, "deepstack_layers has 3 layers, and the backbone only 2"),
    ],
)
def test_what_cannot_be_computed_is_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"config.json: .*{message}"):
        read(tmp_path, **config)


def test_it_can_be_planned(tmp_path: Path) -> None:
    small = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 96}
    text = {**TEXT, **small, "num_hidden_layers": 4, "rope_scaling": {"mrope_section": [4, 2, 2]}}
    vision = {**VISION, "hidden_size": 64, "num_heads": 4, "intermediate_size": 96, "out_hidden_size": 64, "depth": 4}
    asked = request(read(tmp_path, text_config=text, vision_config=vision | {"deepstack_visual_indexes": [0, 1, 3]}))
    for name in ("disttrain", "entrain"):
        assert predict_run(PLANNERS[name](asked), asked).iteration_seconds > 0
