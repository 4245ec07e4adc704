"""DINOv2 as a vision tower: published configurations, images smaller than its positions, and the way back."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import multimodal
from multimodal.data.image_processing import image_grid, image_to_patches, num_tiles
from multimodal.hugging_face.llava import LLAVA
from multimodal.hugging_face.registry import architecture_of
from multimodal.model.latents import normalised_patches
from multimodal.values.errors import ModelError
from multimodal.values.model_graph import ImageInput, ModelGraph, Unit

SMALL = {"model_type": "dinov2", "hidden_size": 384, "image_size": 518, "patch_size": 14}
SMALL |= {"num_attention_heads": 6, "num_hidden_layers": 12}
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


def test_what_is_composed_of_a_known_family_is_written_as_that(tmp_path: Path) -> None:
    """A tower whose output goes through no norm, and a projector without one."""
    for vision, layer in ((CLIP, -1), (CLIP, -2), (small(), -2)):
        graph = composed(tmp_path, vision, None if vision is CLIP else PROCESSOR, feature_layer=layer)
        assert architecture_of(graph) is LLAVA
        config = LLAVA.to_config(graph)["vision_config"]
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


MEAN, STD = (0.48, 0.45, 0.4), (0.26, 0.27, 0.28)
SIZES = [(40, 40), (100, 37), (37, 100), (31, 200), (24, 24)]


def processor_of(module: str, kind: str, **options: Any) -> Any:
    """Return an image processor of transformers, the one without torchvision where there are two."""
    of_kind = pytest.importorskip(
        f"transformers.models.{module}", reason="transformers is not installed (pip install 'braid[hf]')"
    )
    name = f"{kind}ImageProcessor"
    return getattr(of_kind, f"{name}Pil", getattr(of_kind, name))(image_mean=list(MEAN), image_std=list(STD), **options)


def check_patches(image: Image.Image, described: ImageInput, expected: Any, *, tile: int = 0) -> None:
    """Compare patches of 6 x 6 pixels with an image's normalised pixels: [3, height, width]."""
    found = image_to_patches(image, image_input=described, tile=tile)
    rows, columns = found.grid
    assert expected.shape == (3, rows * 6, columns * 6)
    patches = expected.reshape(3, rows, 6, columns, 6).transpose(1, 3, 0, 2, 4).reshape(rows * columns, -1)
    np.testing.assert_allclose(normalised_patches(torch.from_numpy(found.patches), described).numpy(), patches, atol=1e-6)


SIDE = {"height": 24, "width": 24}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shorter_side", [24, 28, None])
def test_pixels_are_those_of_transformers(shorter_side: int | None, size: tuple[int, int]) -> None:
    """Cropped from a shorter side, as CLIP does, or stretched, as SigLIP does."""
    image = Image.effect_noise(size, 80).convert("RGB")
    if shorter_side is None:
        processor, changes = processor_of("siglip", "Siglip", size=SIDE, resample=3), {}
    else:
        processor = processor_of("clip", "CLIP", size={"shortest_edge": shorter_side}, crop_size=SIDE)
        changes = {"shorter_side": shorter_side} if shorter_side != 24 else {}
    fit = "stretch" if shorter_side is None else "crop"
    described = ImageInput(patch_size=6, merge_size=1, image_size=24, fit=fit, mean=MEAN, std=STD, **changes)
    assert image_grid(width=size[0], height=size[1], image_input=described) == (4, 4)
    check_patches(image, described, processor(images=[image], return_tensors="np")["pixel_values"][0])


@pytest.mark.parametrize("size", SIZES)
def test_pixels_of_pixtral_are_those_of_transformers(size: tuple[int, int]) -> None:
    processor = processor_of("pixtral", "Pixtral", size={"longest_edge": 48}, patch_size={"height": 6, "width": 6})
    image = Image.effect_noise(size, 80).convert("RGB")
    described = ImageInput(patch_size=6, merge_size=1, longest_side=48, has_row_ends=True, mean=MEAN, std=STD)
    check_patches(image, described, processor(images=[image], return_tensors="np")["pixel_values"][0])


@pytest.mark.parametrize("size", SIZES)
def test_tiles_are_those_of_transformers(size: tuple[int, int]) -> None:
    processor = processor_of("got_ocr2", "GotOcr2", size=SIDE, crop_to_patches=True, max_patches=5)
    image = Image.effect_noise(size, 80).convert("RGB")
    described = ImageInput(patch_size=6, merge_size=1, image_size=24, max_tiles=5, mean=MEAN, std=STD)
    expected = processor(images=[image], return_tensors="np")["pixel_values"]
    assert len(expected) == num_tiles(width=size[0], height=size[1], image_input=described)
    for tile, pixels in enumerate(expected):
        check_patches(image, described, pixels, tile=tile)
