"""DINOv2 as a vision tower: published configurations, images smaller than its positions, and the way back."""

import json
from pathlib import Path
from typing import Any

import pytest

import multimodal
from multimodal.hugging_face.llava import LLAVA
from multimodal.hugging_face.registry import architecture_of, read_encoder
from multimodal.values.errors import ModelError
from multimodal.values.model_graph import ImageInput, ModelGraph, Unit
from tests.unit.hugging_face.folders import written

SMALL = {"model_type": "dinov2", "hidden_size": 384, "image_size": 518, "patch_size": 14}
SMALL |= {"num_attention_heads": 6, "num_hidden_layers": 12}
GIANT = {"model_type": "dinov2", "hidden_size": 1536, "num_attention_heads": 24, "num_hidden_layers": 40, "use_swiglu_ffn": True}
PROCESSOR: dict[str, Any] = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225], "do_center_crop": True}
PROCESSOR |= {"crop_size": {"height": 224, "width": 224}, "size": {"shortest_edge": 256}}
"""Of all published sizes."""
TEXT = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 100, "hidden_size": 64}
CLIP = {"architectures": ["CLIPModel"], "model_type": "clip", "vision_config": {"hidden_size": 32, "num_attention_heads": 2}}


def write(folder: Path, config: dict[str, Any], **files: Any) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in {"config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def composed(tmp_path: Path, vision: dict[str, Any], processor: Any = PROCESSOR, **options: Any) -> ModelGraph:
    files = {} if processor is None else {"preprocessor_config": processor}
    encoder = write(tmp_path / "vision", vision, **files)
    output = tmp_path / "model.yaml"
    return multimodal.compose(llm=write(tmp_path / "llm", TEXT), encoders={"vision": encoder}, output=output, **options)


def small(**changes: Any) -> dict[str, Any]:
    return {"architectures": ["Dinov2Model"], **SMALL, **changes}


def image_of(unit: Unit) -> ImageInput:
    assert unit.image is not None
    return unit.image


def test_published_images_are_smaller_than_its_positions(tmp_path: Path) -> None:
    """Their shorter side gets 256 pixels, of which 224 are cut out: 16 x 16 of the 37 x 37 patches that have a position each."""
    unit = composed(tmp_path, small()).unit("vision")
    image = image_of(unit)
    assert (image.image_size, image.shorter_side, image.position_grid, image.num_positions) == (224, 256, 37, 1370)
    assert (image.num_tokens((16, 16)), unit.num_output_tokens((16, 16))) == (257, 256)
    assert unit.layers == ("learned_patch_embedding", *["transformer"] * 12, "projector")
    assert (unit.projector_norm, unit.transformer.ffn_hidden_size, unit.transformer.activation) == ("patches", 1536, "gelu")


def test_registers_are_dropped_with_the_class_token(tmp_path: Path) -> None:
    config = small(architectures=["Dinov2WithRegistersModel"], model_type="dinov2_with_registers", num_register_tokens=4)
    unit = composed(tmp_path, config | {"patch_size": 14}, merge_size=2).unit("vision")
    assert (image_of(unit).num_tokens((16, 16)), unit.num_output_tokens((16, 16))) == (261, 64)
    with pytest.raises(ModelError, match="num_registers come with a class_token"):
        ModelGraph.from_dict({"units": {"vision": {"role": "encoder", **SHAPE, "image": {"num_registers": 4}}, "llm": LLM}})


SHAPE = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "ffn_hidden_size": 8}
LLM = {"role": "backbone", **SHAPE}


def test_the_gate_of_the_largest_one_is_read_and_written(tmp_path: Path) -> None:
    folder = write(tmp_path / "giant", {"architectures": ["Dinov2Model"], **GIANT})
    encoder, config = read_encoder(folder)
    unit = encoder.to_unit(config)
    assert (unit["ffn_hidden_size"], unit["activation"]) == (4096, "swiglu")
    llava = {"vision_config": GIANT, "text_config": {"model_type": "qwen2", "vocab_size": 100}}
    llava["vision_feature_select_strategy"] = "full"
    graph = ModelGraph.from_dict(LLAVA.to_graph(llava))
    assert architecture_of(graph) is LLAVA
    tower = written(graph)["vision_config"]
    assert (tower["mlp_ratio"], tower["use_swiglu_ffn"], tower["num_hidden_layers"]) == (4, True, 39)
    assert "intermediate_size" not in tower


def test_what_is_composed_of_a_known_family_is_written_as_that(tmp_path: Path) -> None:
    """A tower whose output goes through no norm, and a projector without one."""
    for vision, layer in ((CLIP, -1), (CLIP, -2), (small(), -2)):
        graph = composed(tmp_path, vision, None if vision is CLIP else PROCESSOR, feature_layer=layer)
        assert architecture_of(graph) is LLAVA
        config = written(graph)["vision_config"]
        assert config["image_size"] == (224 if vision is CLIP else 518)
        assert config["num_hidden_layers"] == (13 + layer)
    for options in ({}, {"feature_layer": -2, "projector": "merger"}, {"feature_layer": -2, "merge_size": 2}):
        with pytest.raises(ModelError, match="the model is none that Hugging Face's transformers has"):
            architecture_of(composed(tmp_path, small(), **options))


def test_an_encoder_of_images_of_any_size_is_of_no_family_that_is_written_without_a_folder() -> None:
    example = Path(multimodal.__file__).parents[1] / "examples" / "digits" / "model.yaml"
    with pytest.raises(ModelError, match="the model is none that Hugging Face's transformers has"):
        architecture_of(ModelGraph.from_file(example))


@pytest.mark.parametrize(
    ("vision", "options", "message"),
    [
        (small(hidden_dropout_prob=0.1), {}, r"hidden_dropout_prob is 0.1.*or take it as it is: as_modules=\['vision'\]"),
        (small(), {"feature_layer": 3}, "feature_layer is 3, expected -1, or one from -2 on down"),
        (small(), {"feature_layer": -20}, "feature_layer is -20, expected -1"),
        (small(), {"feature_layer": -2, "as_modules": ["vision"]}, "feature_layer is -2, expected -1"),
        (small(), {"as_modules": ["sight"]}, "as_modules names 'sight', which is none of vision"),
        (CLIP, {}, r"the image processor's size is \{'height': 336, 'width': 336\}, but the encoder takes 224 pixels"),
    ],
)
def test_what_does_not_fit_is_said(vision: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path) -> None:
    larger = {**PROCESSOR, "size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
    with pytest.raises(ModelError, match=message):
        composed(tmp_path, vision, larger if vision is CLIP else PROCESSOR, **options)


def test_a_module_of_transformers_takes_the_size_of_its_processor(tmp_path: Path) -> None:
    unit = composed(tmp_path, small(), as_modules=["vision"]).unit("vision")
    assert (image_of(unit).image_size, image_of(unit).position_grid, unit.layers) == (224, None, ("opaque", "projector"))
