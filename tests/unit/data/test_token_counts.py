"""Token counts from the headers of images, against those that transformers' own processors give, for 1,000 random sizes."""

import random
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import ImageFile

from multimodal.data.image_processing import image_grid, num_tiles
from multimodal.values.model_graph import ImageInput
from tests.unit.data.conftest import DataFolder

SIZES = [(random.Random(seed).randint(1, 4000), random.Random(-seed - 1).randint(30, 3000)) for seed in range(1000)]
"""(width, height), 20 of them thinner than Qwen2-VL's rule allows."""


def qwen2_5_vl(image: ImageInput) -> Callable[[int, int], int]:
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    size = {"shortest_edge": image.min_pixels, "longest_edge": image.max_pixels}
    processor = Qwen2VLImageProcessorPil(size=size, patch_size=image.patch_size, merge_size=2, temporal_patch_size=2)
    return count(Qwen2_5_VLProcessor, image_processor=processor)


def llava(strategy: str) -> Callable[[ImageInput], Callable[[int, int], int]]:
    def build(image: ImageInput) -> Callable[[int, int], int]:
        from transformers.models.llava.processing_llava import LlavaProcessor

        processor = SimpleNamespace(crop_size={"height": image.image_size, "width": image.image_size})
        options = {"patch_size": image.patch_size, "vision_feature_select_strategy": strategy, "num_additional_image_tokens": 1}
        return count(LlavaProcessor, image_processor=processor, **options)

    return build


def internvl(image: ImageInput) -> Callable[[int, int], int]:
    """Two of the tokens that the processor counts stand around an image."""
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
    from transformers.models.internvl.processing_internvl import InternVLProcessor

    processor = GotOcr2ImageProcessorPil(
        size={"height": image.image_size, "width": image.image_size},
        crop_to_patches=image.max_tiles > 1,
        max_patches=image.max_tiles,
    )
    counted = count(InternVLProcessor, image_processor=processor, image_seq_length=256)
    return lambda height, width: counted(height, width) - 2


def pixtral(image: ImageInput) -> Callable[[int, int], int]:
    """The count of the rule that the processor calls."""
    module = pytest.importorskip("transformers.models.pixtral.image_processing_pil_pixtral", reason="it is not in this version")

    def counted(height: int, width: int) -> int:
        size, patch = (image.longest_side,) * 2, (image.patch_size,) * 2
        found = module.get_resize_output_image_size(np.zeros((height, width, 3), bool), size=size, patch_size=patch)
        rows, columns = (side // image.patch_size for side in found)
        return rows * (columns + 1)

    return counted


def count(processor: Any, **attributes: Any) -> Callable[[int, int], int]:
    """The processor's own count, without the tokenizer that building one needs."""
    itself = SimpleNamespace(_merge_kwargs=lambda **given: {"images_kwargs": {}}, **attributes)
    return lambda height, width: int(
        processor._get_num_multimodal_tokens(itself, image_sizes=[(height, width)])["num_image_tokens"][0]
    )


FAMILIES: Mapping[str, tuple[ImageInput, Callable[[ImageInput], Callable[[int, int], int]]]] = {
    "Qwen2.5-VL": (ImageInput(num_frames=2, max_pixels=12845056), qwen2_5_vl),
    "Qwen2.5-VL, narrow bounds": (ImageInput(num_frames=2, min_pixels=200704, max_pixels=401408), qwen2_5_vl),
    "Qwen3-VL": (ImageInput(num_frames=2, patch_size=16, min_pixels=65536, max_pixels=16777216), qwen2_5_vl),
    "LLaVA": (ImageInput(image_size=336, merge_size=1, class_token="dropped", fit="crop"), llava("default")),
    "LLaVA with its class token": (ImageInput(image_size=336, merge_size=1, class_token="kept", fit="crop"), llava("full")),
    "Pixtral": (ImageInput(patch_size=16, merge_size=1, longest_side=1024, has_row_ends=True), pixtral),
    "InternVL": (ImageInput(image_size=448, class_token="dropped"), internvl),
    "InternVL with tiles": (ImageInput(image_size=448, class_token="dropped", max_tiles=12), internvl),
    "InternVL with few tiles": (ImageInput(image_size=448, class_token="dropped", max_tiles=3), internvl),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_counts_are_those_of_transformers(family: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed (pip install 'braid[hf]')")
    image, build = FAMILIES[family]
    counted, num_compared = build(image), 0
    for width, height in SIZES:
        if image.image_size is None and max(width, height) > 200 * min(width, height):
            continue
        expected = counted(height, width)
        count = image.num_output_tokens(image_grid(width=width, height=height, image_input=image))
        assert count * num_tiles(width=width, height=height, image_input=image) == expected, (width, height)
        num_compared += 1
    assert num_compared > 970


def test_no_image_is_decoded_for_its_length(data: DataFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files hold no pixels at all behind their headers."""
    sizes = {"0.png": (300, 200), "1.png": (17, 90), "2.png": (2000, 1000)}
    for name, size in sizes.items():
        path = data.path / data.image(name, size)
        path.write_bytes(path.read_bytes()[:60])
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("an image was decoded"))
    source = data.open([[{"type": "image", "path": name}, {"type": "text", "role": "assistant", "text": "a"}] for name in sizes])
    assert [source.lengths(index).items[0].num_tokens for index in range(3)] == [48, 36, 40]
