"""config.json and image processor of Qwen2.5-VL: as a model graph, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from multimodal.hugging_face.registry import architecture_of
from multimodal.plan.planners import PLANNERS
from multimodal.plan.planners.search.prediction import predict_run
from multimodal.values.errors import ModelError
from multimodal.values.model_graph import ModelGraph
from tests.unit.hugging_face.folders import read_folder
from tests.unit.plan.planners.planning_cases import request

PUBLISHED: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "temporal_patch_size": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 151936,
}
"""As Qwen2.5-VL-3B-Instruct has it, without what computes nothing."""


def read(folder: Path, processor: Any = None, **config: Any) -> ModelGraph:
    return read_folder(folder, PUBLISHED | config, processor)


def test_the_published_config_is_understood(tmp_path: Path) -> None:
    graph = read(tmp_path)
    vision, llm = graph.unit("vision"), graph.backbone
    assert [index - 1 for index, kind in enumerate(vision.layers) if kind == "transformer"] == [7, 15, 23, 31]
    assert vision.layers.count("windowed_transformer") == 28
    assert vision.image is not None
    assert (vision.image.window_patches, vision.image.num_patch_values, vision.image.has_patch_bias) == (8, 1176, False)
    assert vision.transformer.add_bias_linear
    assert llm.transformer.rotary_sections == (16, 24, 24)
    assert (llm.transformer.add_qkv_bias, llm.ties_embeddings, llm.transformer.rotary_base) == (True, True, 1e6)
    assert ModelGraph.from_dict(graph.to_dict()) == graph


def test_qwen2_vl_has_neither_windows_nor_gates(tmp_path: Path) -> None:
    vision = {"embed_dim": 1280, "hidden_size": 2048, "mlp_ratio": 4, "in_chans": 3}
    named = {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl"}
    graph = read(tmp_path, **named, vision_config=vision)
    unit = graph.unit("vision")
    assert unit.layers == ("patch_embedding", *["transformer"] * 32, "projector")
    assert (unit.transformer.ffn_hidden_size, unit.transformer.activation) == (5120, "quick_gelu")
    assert architecture_of(graph).name == named["architectures"][0]
    with pytest.raises(ModelError, match="vision_config: hidden_size is 64, but the LLM's hidden_size 2048"):
        read(tmp_path, **named, vision_config={**vision, "hidden_size": 64})
    with pytest.raises(ModelError, match="embed_dim is 1280 and mlp_ratio '4', expected numbers"):
        read(tmp_path, **named, vision_config={**vision, "mlp_ratio": "4"})


def test_newer_versions_nest_the_llm(tmp_path: Path) -> None:
    text = {key: value for key, value in PUBLISHED.items() if key not in ("architectures", "vision_config", "rope_scaling")}
    text |= {"model_type": "qwen2_5_vl_text", "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24]}}
    text["rope_parameters"]["rope_theta"] = text.pop("rope_theta")
    older = read(tmp_path)
    nested = {key: PUBLISHED[key] for key in ("architectures", "model_type", "vision_config", "tie_word_embeddings")}
    assert read_folder(tmp_path, {**nested, "text_config": text}) == older


def test_the_image_processor_is_obeyed(tmp_path: Path) -> None:
    processor = {"image_mean": [0.1, 0.2, 0.3], "image_std": [1, 2, 3], "min_pixels": 784, "max_pixels": 50176}
    processor |= {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    image = read(tmp_path, processor).unit("vision").image
    assert image is not None
    assert (image.mean, image.min_pixels, image.max_pixels) == ((0.1, 0.2, 0.3), 784, 50176)
    with pytest.raises(ModelError, match="the image processor's patch_size is 16, and only 14"):
        read(tmp_path, {**processor, "patch_size": 16})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": {"type": "yarn", "mrope_section": [16, 24, 24]}}, "the LLM's rope_parameters .* 'yarn' without factor"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 20]}}, r"must belong to the backbone and add up to half"),
        (
            {"vision_config": {**PUBLISHED["vision_config"], "out_hidden_size": 64}},
            "out_hidden_size is 64, but the LLM's hidden_size",
        ),
    ],
)
def test_what_cannot_be_computed_is_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"config.json: .*{message}"):
        read(tmp_path, **config)


def test_it_can_be_planned(tmp_path: Path) -> None:
    small = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "rope_scaling": {"mrope_section": [2, 3, 3]}}
    vision = {"depth": 4, "hidden_size": 64, "num_heads": 4, "intermediate_size": 96, "out_hidden_size": 64}
    asked = request(read(tmp_path, **small, num_hidden_layers=4, vision_config=PUBLISHED["vision_config"] | vision))
    assert predict_run(PLANNERS["disttrain"](asked), asked).iteration_seconds > 0


@pytest.mark.parametrize("num_frames", [1, 2])
def test_patches_are_convolved_over_frames_be_they_one(num_frames: int, tmp_path: Path) -> None:
    graph = read(tmp_path, vision_config={**PUBLISHED["vision_config"], "temporal_patch_size": num_frames})
    assert architecture_of(graph).shapes(graph) == {"visual.patch_embed.proj.weight": (1280, 3, num_frames, 14, 14)}
