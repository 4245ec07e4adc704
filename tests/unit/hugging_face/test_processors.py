"""Pixels of images of one size, against the image processors of transformers."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from multimodal.data.image_processing import image_grid, image_to_patches, num_tiles
from multimodal.model.inputs.pixels import normalised_patches
from multimodal.values.model_graph import ImageInput

MEAN, STD = (0.48, 0.45, 0.4), (0.26, 0.27, 0.28)
SIZES = [(40, 40), (100, 37), (37, 100), (31, 200), (24, 24)]


def clip_processor(shorter_side: int = 24) -> Any:
    module = pytest.importorskip("transformers.models.clip", reason="transformers is not installed (pip install 'braid[hf]')")
    kind = getattr(module, "CLIPImageProcessorPil", module.CLIPImageProcessor)
    sizes = {"size": {"shortest_edge": shorter_side}, "crop_size": {"height": 24, "width": 24}}
    return kind(**sizes, image_mean=list(MEAN), image_std=list(STD))


def siglip_processor() -> Any:
    module = pytest.importorskip("transformers.models.siglip", reason="transformers is not installed (pip install 'braid[hf]')")
    kind = getattr(module, "SiglipImageProcessorPil", module.SiglipImageProcessor)
    return kind(size={"height": 24, "width": 24}, image_mean=list(MEAN), image_std=list(STD), resample=3)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("fit", "build", "changes"),
    [
        ("crop", clip_processor, {}),
        ("crop", partial(clip_processor, 28), {"shorter_side": 28}),
        ("stretch", siglip_processor, {}),
    ],
)
def test_pixels_are_those_of_transformers(fit: Any, build: Any, changes: Any, size: tuple[int, int]) -> None:
    image = Image.effect_noise(size, 80).convert("RGB")
    described = ImageInput(patch_size=6, merge_size=1, image_size=24, fit=fit, mean=MEAN, std=STD, **changes)
    found = image_to_patches(image, image_input=described)
    assert found.grid == image_grid(width=size[0], height=size[1], image_input=described) == (4, 4)
    (expected,) = build()(images=[image], return_tensors="np")["pixel_values"]
    patches = expected.reshape(3, 4, 6, 4, 6).transpose(1, 3, 0, 2, 4).reshape(16, -1)
    np.testing.assert_allclose(normalised_patches(torch.from_numpy(found.patches), described).numpy(), patches, atol=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_pixels_of_pixtral_are_those_of_transformers(size: tuple[int, int]) -> None:
    module = pytest.importorskip("transformers.models.pixtral", reason="transformers is not installed (pip install 'braid[hf]')")
    kind = getattr(module, "PixtralImageProcessorPil", module.PixtralImageProcessor)
    patch = {"height": 6, "width": 6}
    processor = kind(size={"longest_edge": 48}, patch_size=patch, image_mean=list(MEAN), image_std=list(STD))
    image = Image.effect_noise(size, 80).convert("RGB")
    described = ImageInput(patch_size=6, merge_size=1, longest_side=48, has_row_ends=True, mean=MEAN, std=STD)
    found = image_to_patches(image, image_input=described)
    rows, columns = found.grid
    expected = processor(images=[image], return_tensors="np")["pixel_values"][0]
    assert expected.shape == (3, rows * 6, columns * 6)
    patches = expected.reshape(3, rows, 6, columns, 6).transpose(1, 3, 0, 2, 4).reshape(rows * columns, -1)
    np.testing.assert_allclose(normalised_patches(torch.from_numpy(found.patches), described).numpy(), patches, atol=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_tiles_are_those_of_transformers(size: tuple[int, int]) -> None:
    module = pytest.importorskip("transformers.models.got_ocr2", reason="transformers is not installed (pip install 'braid[hf]')")
    kind = getattr(module, "GotOcr2ImageProcessorPil", module.GotOcr2ImageProcessor)
    side = {"height": 24, "width": 24}
    processor = kind(size=side, crop_to_patches=True, max_patches=5, image_mean=list(MEAN), image_std=list(STD))
    image = Image.effect_noise(size, 80).convert("RGB")
    described = ImageInput(patch_size=6, merge_size=1, image_size=24, max_tiles=5, mean=MEAN, std=STD)
    expected = processor(images=[image], return_tensors="np")["pixel_values"]
    assert len(expected) == num_tiles(width=size[0], height=size[1], image_input=described)
    for tile, pixels in enumerate(expected):
        found = image_to_patches(image, image_input=described, tile=tile)
        patches = pixels.reshape(3, 4, 6, 4, 6).transpose(1, 3, 0, 2, 4).reshape(16, -1)
        np.testing.assert_allclose(normalised_patches(torch.from_numpy(found.patches), described).numpy(), patches, atol=1e-6)
