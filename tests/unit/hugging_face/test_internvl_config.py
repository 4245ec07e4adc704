"""config.json of InternVL3: as a model graph, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from multimodal.hugging_face.registry import architecture_of
from multimodal.plan.disaggregated import plan_disaggregated
from multimodal.plan.unit_sizes import UnitSizes
from multimodal.values.errors import ModelError, PlanError
from multimodal.values.model_graph import ModelGraph
from tests.unit.hugging_face.folders import read_folder, written

VISION = {"model_type": "internvl_vision", "attention_bias": True, "image_size": [448, 448], "patch_size": [14, 14]}
TEXT = {"model_type": "qwen2", "hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151674}
INTERNVL: dict[str, Any] = {
    "architectures": ["InternVLForConditionalGeneration"],
    "model_type": "internvl",
    "text_config": TEXT,
    "vision_config": VISION,
    "vision_feature_layer": -1,
}


def read(folder: Path, **config: Any) -> ModelGraph:
    return read_folder(folder, INTERNVL | config)


def test_the_published_config_is_understood(tmp_path: Path) -> None:
    graph = read(tmp_path)
    vision = graph.unit("vision")
    assert vision.image is not None
    assert (vision.image.num_tokens((32, 32)), vision.image.num_output_tokens((32, 32))) == (1025, 256)
    assert (vision.projector_norm, vision.projector_norm_epsilon, vision.projector_hidden_size) == ("merged", 1e-5, 896)
    assert vision.transformer.has_layer_scale and not vision.transformer.has_rotary_positions
    assert vision.keeps_items_whole
    assert ModelGraph.from_dict(graph.to_dict()) == graph


LARGE = {"use_qk_norm": True, "norm_type": "rms_norm", "attention_bias": False}


def test_the_large_vision_encoder_stays_on_whole_heads(tmp_path: Path) -> None:
    graph = read(tmp_path, vision_config={**VISION, **LARGE})
    (vision,) = graph.encoders
    shape = vision.transformer
    assert (shape.normalization, shape.qk_norm_spans_heads, vision.projector_normalization) == ("RMSNorm", True, "LayerNorm")
    assert list(shape.biases.values()) == [False, True, True, True]
    assert architecture_of(graph).name == "InternVLForConditionalGeneration"
    assert {key: written(graph)["vision_config"][key] for key in LARGE} == LARGE
    assert ModelGraph.from_dict(graph.to_dict()) == graph
    with pytest.raises(PlanError, match="norms of queries and keys over all heads"):
        plan_disaggregated(
            graph, sizes={"vision": UnitSizes(2, data_parallel_size=1), "llm": UnitSizes(1, data_parallel_size=1)}, world_size=3
        )


def test_the_image_processor_says_whether_images_are_cut(tmp_path: Path) -> None:
    processor = {"image_mean": [0.4, 0.4, 0.4], "image_std": [0.2, 0.2, 0.2], "size": {"height": 448, "width": 448}}
    found = []
    for changes in ({}, {"crop_to_patches": True}, {"crop_to_patches": True, "min_patches": 1, "max_patches": 6}):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor | changes))
        image = read(tmp_path).unit("vision").image
        assert image is not None
        found.append(image.max_tiles)
    assert found == [1, 12, 6]
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor | {"crop_to_patches": True, "min_patches": 2}))
    with pytest.raises(ModelError, match="the image processor's min_patches is 2"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"downsample_ratio": 0.25}, "downsample_ratio is 0.25, and only 0.5"),
        (
            {"vision_config": {**VISION, "norm_type": "group_norm"}},
            "vision_config: .*norm_type is 'group_norm', and only 'layer_norm'",
        ),
        ({"vision_config": {**VISION, "use_qk_norm": True}}, "use_qk_norm, but norm_type is 'layer_norm', and only 'rms_norm'"),
        ({"vision_config": {**VISION, **LARGE, "layer_norm_eps": 1e-5}}, "use_qk_norm, but layer_norm_eps is 1e-05, and only"),
        ({"vision_config": {**VISION, "image_size": [448, 224]}}, r"image_size is \[448, 224\], and only squares"),
        ({"vision_feature_layer": -2}, "vision_feature_layer is -2, and only -1"),
    ],
)
def test_what_cannot_be_computed_is_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"config.json: .*{message}"):
        read(tmp_path, **config)
