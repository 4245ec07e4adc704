"""config.json and image processor of LLaVA-1.5: as a model graph, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from multimodal.hugging_face.llava import LLAVA as LLAVA_FAMILY
from multimodal.hugging_face.llava import is_unused
from multimodal.hugging_face.registry import architecture_of
from multimodal.plan.planners import PLANNERS
from multimodal.plan.planners.search.prediction import predict_run
from multimodal.values.errors import ModelError
from multimodal.values.model_graph import ModelGraph
from tests.unit.hugging_face.folders import read_folder, written
from tests.unit.plan.planners.planning_cases import request

CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "image_size": 336,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "patch_size": 14,
}
LLAVA: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "text_config": {"model_type": "llama", "rms_norm_eps": 1e-5, "vocab_size": 32064},
    "vision_config": CLIP,
}


def read(folder: Path, processor: Any = None, **config: Any) -> ModelGraph:
    return read_folder(folder, LLAVA | config, processor)


def test_the_published_config_is_understood(tmp_path: Path) -> None:
    """llava-1.5-7b-hf says no more than this of its two parts."""
    graph = read(tmp_path)
    vision, llm = graph.unit("vision"), graph.backbone
    assert vision.layers == ("learned_patch_embedding", *["transformer"] * 23, "projector")
    assert vision.image is not None
    assert (vision.image.class_token, vision.image.num_positions, vision.image.fit) == ("dropped", 577, "crop")
    assert (vision.image.num_tokens((24, 24)), vision.image.num_output_tokens((24, 24))) == (577, 576)
    assert (vision.transformer.activation, vision.transformer.has_rotary_positions) == ("quick_gelu", False)
    assert (vision.projector_hidden_size, vision.projector_norm) == (4096, "none")
    assert (llm.vocab_size, llm.transformer.num_layers, llm.transformer.layernorm_epsilon) == (32064, 32, 1e-5)
    assert ModelGraph.from_dict(graph.to_dict()) == graph


def test_siglip_keeps_every_patch(tmp_path: Path) -> None:
    vision = {**CLIP, "model_type": "siglip_vision_model", "num_hidden_layers": 27}
    unit = read(tmp_path, vision_config=vision, vision_feature_select_strategy="full").unit("vision")
    assert unit.image is not None
    assert (unit.image.class_token, unit.image.has_patch_bias, unit.image.has_pre_norm) == (None, True, False)
    assert (unit.transformer.num_layers, unit.transformer.activation) == (26, "gelu_tanh")
    whole = read(tmp_path, vision_config=vision, vision_feature_select_strategy="full", vision_feature_layer=-1).unit("vision")
    assert (whole.transformer.num_layers, whole.projector_norm) == (27, "none")


PIXTRAL: dict[str, Any] = {
    "text_config": {
        "model_type": "mistral",
        "head_dim": 128,
        "hidden_size": 5120,
        "intermediate_size": 14336,
        "sliding_window": None,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e9,
        "vocab_size": 131072,
    },
    "vision_config": {
        "model_type": "pixtral",
        "head_dim": 64,
        "hidden_act": "silu",
        "image_size": 1024,
        "patch_size": 16,
        "rope_theta": 10000.0,
    },
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
    "image_token_index": 10,
}
"""What pixtral-12b says, and no more."""


def test_pixtral_keeps_sizes_and_ends_rows(tmp_path: Path) -> None:
    processor = {
        "image_mean": [0.4, 0.4, 0.4],
        "image_std": [1, 2, 3],
        "do_pad": True,
        "size": {"longest_edge": 512},
        "patch_size": {"height": 16, "width": 16},
    }
    vision = read(tmp_path, processor, **PIXTRAL).unit("vision")
    assert vision.image is not None
    assert vision.layers == ("patch_embedding", *["transformer"] * 24, "projector")
    assert (vision.image.longest_side, vision.num_output_tokens((3, 5)), vision.keeps_items_whole) == (512, 18, True)
    assert (vision.transformer.activation, vision.transformer.has_staggered_axes) == ("swiglu", True)
    graph = read(tmp_path, **PIXTRAL)
    assert graph.unit("vision").transformer == vision.transformer
    assert architecture_of(graph).to_processor(graph)["size"] == {"longest_edge": 512}
    for changes, message in (
        ({"vision_feature_select_strategy": "default"}, "vision_feature_select_strategy is 'default', and only 'full'"),
        ({"vision_config": {**PIXTRAL["vision_config"], "hidden_act": "gelu"}}, "hidden_act is 'gelu', and only 'silu'"),
        ({"vision_config": {**PIXTRAL["vision_config"], "head_dim": 32}}, "head_dim is 32, and only 64"),
    ):
        with pytest.raises(ModelError, match=message):
            read(tmp_path, **{**PIXTRAL, **changes})
    with pytest.raises(ModelError, match="patch_size is 14, and only 16"):
        read(tmp_path, {**processor, "patch_size": 14}, **PIXTRAL)


def test_it_can_be_planned(tmp_path: Path) -> None:
    small = {**CLIP, "num_hidden_layers": 5, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    text = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4, "intermediate_size": 128}
    asked = request(read(tmp_path, vision_config=small, text_config=text))
    assert predict_run(PLANNERS["disttrain"](asked), asked).iteration_seconds > 0


def test_the_image_processor_is_obeyed(tmp_path: Path) -> None:
    processor = {"image_mean": [0.1, 0.2, 0.3], "image_std": [1, 2, 3], "do_center_crop": False, "size": {"shortest_edge": 336}}
    image = read(tmp_path, processor).unit("vision").image
    assert image is not None
    assert (image.mean, image.std, image.fit) == ((0.1, 0.2, 0.3), (1.0, 2.0, 3.0), "stretch")
    with pytest.raises(ModelError, match=r"the image processor's do_pad is True, and only False or None"):
        read(tmp_path, {**processor, "do_pad": True})
    with pytest.raises(ModelError, match=r"size is \{'shortest_edge': 224\}, but the encoder takes 336 pixels"):
        read(tmp_path, {**processor, "size": {"shortest_edge": 224}})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"vision_feature_layer": [-2, -5]}, r"vision_feature_layer is \[-2, -5\], and only the output of one of the 24"),
        ({"vision_feature_layer": -30}, "vision_feature_layer is -30"),
        ({"vision_config": {"model_type": "vit"}}, "model_type is 'vit', expected one of clip_vision_model, siglip_vision_model"),
        ({"vision_config": {**CLIP, "hidden_act": "relu"}}, "vision_config: hidden_act is 'relu', and only 'quick_gelu' or"),
        ({"vision_config": {**CLIP, "image_size": 13}}, "image_size 13 holds 0 patches of patch_size 14 a side"),
        ({"multimodal_projector_bias": False}, "multimodal_projector_bias is False, and only True"),
        (
            {"text_config": {"model_type": "phi3"}},
            "text_config: model_type is 'phi3', expected one of llama, qwen2, qwen3, mistral",
        ),
        ({"vision_config": {**CLIP, "model_type": "siglip_vision_model"}}, "vision_feature_select_strategy is 'default'"),
        ({"vision_config": {**CLIP, "model_type": "dinov2_with_registers"}}, "vision_feature_select_strategy is 'default'"),
        ({"vision_config": {"model_type": "dinov2", "hidden_dropout_prob": 0.1}}, "hidden_dropout_prob is 0.1, and only 0"),
        ({"vision_config": {"model_type": "dinov2", "mlp_ratio": "4"}}, "mlp_ratio is '4', expected a number"),
    ],
)
def test_what_cannot_be_computed_is_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"config.json: .*{message}"):
        read(tmp_path, **config)


def test_weights_that_nothing_is_computed_with_are_known(tmp_path: Path) -> None:
    graph = read(tmp_path)
    unused = ("encoder.layers.23.mlp.fc1.bias", "post_layernorm.weight", "head.probe", "embeddings.position_ids")
    for prefix in ("vision_tower.", "vision_tower.vision_model."):
        assert all(is_unused(prefix + name, graph) for name in unused)
        assert not any(is_unused(prefix + name, graph) for name in ("encoder.layers.22.mlp.fc1.bias", "pre_layrnorm.weight"))


def test_it_is_written_with_the_layers_that_are_used(tmp_path: Path) -> None:
    graph = read(tmp_path)
    config = written(graph)
    assert (config["vision_config"]["num_hidden_layers"], config["vision_feature_layer"]) == (23, -1)
    assert (config["vision_feature_select_strategy"], config["image_seq_length"]) == ("default", 576)
    assert "vision_tower.post_layernorm.weight" in LLAVA_FAMILY.shapes(graph)


def test_a_tower_with_a_norm_behind_it_is_written_with_one_more_layer(tmp_path: Path) -> None:
    vision = {**CLIP, "model_type": "siglip_vision_model", "num_hidden_layers": 27}
    graph = read(tmp_path, vision_config=vision, vision_feature_select_strategy="full")
    config = written(graph)
    assert (config["vision_config"]["num_hidden_layers"], config["vision_feature_layer"]) == (27, -2)
    shapes = LLAVA_FAMILY.shapes(graph)
    assert shapes["vision_tower.encoder.layers.26.mlp.fc1.weight"] == (4096, 1024)
    assert shapes["vision_tower.embeddings.patch_embedding.weight"] == (1024, 3, 14, 14)


def test_a_model_that_is_none_of_transformers_is_said(tmp_path: Path) -> None:
    graph = read(tmp_path)
    (vision,) = graph.encoders
    merged = replace(vision, projector_norm="merged")
    with pytest.raises(
        ModelError, match="for LlavaForConditionalGeneration unit 'vision' would need projector_norm none, found merged"
    ):
        architecture_of(replace(graph, units=(merged, graph.backbone)))
    units = (vision, replace(vision, name="other"), graph.backbone)
    twice = replace(graph, units=units, edges=(("vision", "llm"), ("other", "llm")))
    with pytest.raises(ModelError, match="Omni.* would have to take image and audio, found image and image"):
        architecture_of(twice)
