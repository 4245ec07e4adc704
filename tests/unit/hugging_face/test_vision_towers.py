"""Images as vision towers take them: the pixels and tiles of transformers, and tokens that are dropped."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import multimodal
from multimodal.data.image_processing import image_grid, image_to_patches, num_tiles
from multimodal.hugging_face.registry import architecture_of
from multimodal.model.latents import normalised_patches
from multimodal.values.errors import ModelError
from multimodal.values.model_graph import ImageInput, ModelGraph

SHAPE = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "ffn_hidden_size": 8}
LLM = {"role": "backbone", **SHAPE}


def test_class_token_and_registers_are_dropped() -> None:
    image = {"image_size": 224, "patch_size": 14, "merge_size": 2, "class_token": "dropped", "num_registers": 4}
    graph = ModelGraph.from_dict({"units": {"vision": {"role": "encoder", **SHAPE, "image": image}, "llm": LLM}})
    unit = graph.unit("vision")
    assert unit.image is not None
    assert (unit.image.num_tokens((16, 16)), unit.num_output_tokens((16, 16))) == (261, 64)
    with pytest.raises(ModelError, match="num_registers come with a class_token"):
        ModelGraph.from_dict({"units": {"vision": {"role": "encoder", **SHAPE, "image": {"num_registers": 4}}, "llm": LLM}})


def test_an_encoder_of_images_of_any_size_is_of_no_family_that_is_written_without_a_folder() -> None:
    example = Path(multimodal.__file__).parents[1] / "examples" / "digits" / "model.yaml"
    with pytest.raises(ModelError, match="the model is none that Hugging Face's transformers has"):
        architecture_of(ModelGraph.from_file(example))


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
