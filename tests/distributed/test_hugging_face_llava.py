"""LLaVA-1.5 (CLIP, SigLIP, DINOv2) and InternVL3 of transformers: the same logits and gradients, alone and under any plan."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'braid[hf]')")

from multimodal.data.image_processing import patch_positions
from tests.distributed.gradient_comparison import assert_matches
from tests.distributed.hugging_face_case import FromFolder, PaddedSource
from tests.distributed.hugging_face_comparison import VOCABULARY, Plans, compare_logits
from tests.distributed.random_source import SampleShape
from tests.distributed.rank_pool import RankPool

IMAGE_TOKEN, PATCH, GRID = 60, 2, 4
LARGER = 12
"""Pixels of images for which a DINOv2 has a position each."""
SHAPE = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 4, "initializer_range": 0.3}
VISION = {**SHAPE, "patch_size": PATCH, "image_size": GRID * PATCH}
SHAPES = ((2, 9, 4), (0, 5, 5), (1, 7, 3), (3, 8, 2))
"""Images, text tokens and targets of every sample."""
PLANS: Plans = {
    "vision dp 2, llm tp 2 and pp 2": ({"vision": (1, 1, 2), "llm": (2, 2, 1)}, {"sequence_parallel": True}),
    "vision tp 2 and pp 2, llm zb-h1": ({"vision": (2, 2, 1), "llm": (1, 3, 1)}, {"builder": "zb-h1", "sequence_parallel": True}),
    "cp 2 of both, weights shared": ({"vision": (1, 1, 2, 2), "llm": (1, 1, 2, 2)}, {"shards_weights": True}),
}


def clip_and_llama(**changes: Any) -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig

    return build(CLIPVisionConfig(**VISION), LlamaConfig(**SHAPE, vocab_size=VOCABULARY), **changes)


def clip_with_its_class_token() -> Any:
    return clip_and_llama(vision_feature_select_strategy="full", vision_feature_layer=-1)


def siglip_and_qwen2() -> Any:
    from transformers import Qwen2Config, SiglipVisionConfig

    text = Qwen2Config(**SHAPE, vocab_size=VOCABULARY, num_key_value_heads=2)
    vision = SiglipVisionConfig(**{**VISION, "image_size": GRID * PATCH + 1})  # no whole number of patches
    return build(vision, text, vision_feature_select_strategy="full")


def siglip_to_its_end() -> Any:
    from transformers import LlamaConfig, SiglipVisionConfig

    text = LlamaConfig(**SHAPE, vocab_size=VOCABULARY)
    return build(SiglipVisionConfig(**VISION), text, vision_feature_select_strategy="full", vision_feature_layer=-1)


def dinov2_and_qwen2() -> Any:
    from transformers import Dinov2Config, Qwen2Config

    shape = {key: value for key, value in VISION.items() if key != "intermediate_size"}
    text = Qwen2Config(**SHAPE, vocab_size=VOCABULARY, num_key_value_heads=2)
    return build(Dinov2Config(**shape, mlp_ratio=2, layerscale_value=0.7), text)


def registers_and_llama() -> Any:
    """With a gate in the MLP, and positions of larger images, between which those of the ones that are given lie."""
    from transformers import Dinov2WithRegistersConfig, LlamaConfig

    shape = {key: value for key, value in VISION.items() if key != "intermediate_size"} | {"image_size": LARGER}
    gated = {"use_swiglu_ffn": True, "mlp_ratio": 3}
    vision = Dinov2WithRegistersConfig(**shape, **gated, num_register_tokens=3, layerscale_value=0.7)
    return build(vision, LlamaConfig(**SHAPE, vocab_size=VOCABULARY), vision_feature_select_strategy="full")


def pixtral() -> Any:
    from transformers import MistralConfig, PixtralVisionConfig

    shape = {key: value for key, value in VISION.items() if key != "num_attention_heads"} | {"num_attention_heads": 2}
    vision = PixtralVisionConfig(**shape, hidden_act="silu", rope_parameters={"rope_type": "axial", "rope_theta": 50.0})
    text = MistralConfig(**SHAPE, vocab_size=VOCABULARY, num_key_value_heads=2, sliding_window=None)
    return build(vision, text, vision_feature_select_strategy="full", vision_feature_layer=-1)


def internvl() -> Any:
    from transformers import InternVLConfig, InternVLForConditionalGeneration, InternVLVisionConfig, Qwen2Config

    sizes = {"patch_size": [PATCH, PATCH], "image_size": [GRID * PATCH, GRID * PATCH]}
    vision = InternVLVisionConfig(**{**SHAPE, **sizes}, attention_bias=True)
    text = Qwen2Config(**SHAPE, vocab_size=VOCABULARY, num_key_value_heads=2)
    options = {"tie_word_embeddings": False, "downsample_ratio": 0.5}
    return InternVLForConditionalGeneration(
        InternVLConfig(vision_config=vision, text_config=text, image_token_id=IMAGE_TOKEN, **options)
    )


def internvl_of_six_billion() -> Any:
    """RMSNorm, also of the queries and keys of all heads, which have no bias."""
    from transformers import InternVLConfig, InternVLForConditionalGeneration, InternVLVisionConfig, LlamaConfig

    sizes = {"patch_size": [PATCH, PATCH], "image_size": [GRID * PATCH, GRID * PATCH]}
    kinds = {"norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": False}
    vision, text = InternVLVisionConfig(**{**SHAPE, **sizes, **kinds}), LlamaConfig(**SHAPE, vocab_size=VOCABULARY)
    options = {"tie_word_embeddings": False, "downsample_ratio": 0.5}
    return InternVLForConditionalGeneration(
        InternVLConfig(vision_config=vision, text_config=text, image_token_id=IMAGE_TOKEN, **options)
    )


def build(vision: Any, text: Any, **changes: Any) -> Any:
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN, **changes)
    )


def samples(merge_size: int) -> tuple[SampleShape, ...]:
    item = ("vision", GRID // merge_size, GRID // merge_size)
    return tuple(SampleShape((item,) * count, *rest) for count, *rest in SHAPES)


def pixels_of(patches: npt.NDArray[np.float32], merge_size: int) -> torch.Tensor:
    """[3, height, width] from patches in merge-window order, which list a channel after the other."""
    image = torch.empty(3, GRID, PATCH, GRID, PATCH, dtype=torch.float64)
    for (row, column), patch in zip(patch_positions((GRID, GRID), merge_size=merge_size), patches, strict=True):
        image[:, row, :, column] = torch.from_numpy(patch).double().reshape(3, PATCH, PATCH)
    return image.reshape(3, GRID * PATCH, GRID * PATCH)


def images_of(source: PaddedSource, index: int, token_ids: torch.Tensor) -> Mapping[str, Any]:
    image = source.graph.unit("vision").image
    assert image is not None
    for _, start, length in source.text(index).item_starts:
        token_ids[start : start + length] = IMAGE_TOKEN
    items = range(len(source.shapes[index].items))
    images = [pixels_of(source.item(index, item).patches, image.merge_size) for item in items]
    return {"pixel_values": torch.stack(images) if images else None}


@pytest.mark.deep(when=lambda make: make in (clip_and_llama, dinov2_and_qwen2))  # others of the kind have more to them
@pytest.mark.parametrize(
    ("make", "merge_size"),
    [
        (clip_and_llama, 1),
        (clip_with_its_class_token, 1),
        (siglip_and_qwen2, 1),
        (siglip_to_its_end, 1),
        (dinov2_and_qwen2, 1),
        (registers_and_llama, 1),
        (internvl, 2),
        (internvl_of_six_billion, 2),
    ],
)
def test_logits_and_gradients_equal_transformers(make: Any, merge_size: int, ranks: RankPool, tmp_path: Path) -> None:
    if make is registers_and_llama:
        (tmp_path / "model").mkdir()
        sizes = {"size": {"shortest_edge": LARGER}, "crop_size": {"height": GRID * PATCH, "width": GRID * PATCH}}
        processor = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_center_crop": True, **sizes}
        (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(processor))
    comparison = compare_logits(make, tmp_path / "model", ranks, shapes=samples(merge_size), inputs=images_of)
    plans = PLANS
    if make is internvl_of_six_billion:
        plans = {name.replace("tp 2 and", ""): (_on_whole_heads(sizes), options) for name, (sizes, options) in PLANS.items()}
    comparison.assert_under_plans(plans, ranks)


def _on_whole_heads(sizes: dict[str, Any]) -> dict[str, Any]:
    _, *rest = sizes["vision"]
    return {**sizes, "vision": (1, *rest)}


def test_frozen_towers_are_left_as_they_are(ranks: RankPool, tmp_path: Path) -> None:
    """The projector alone is trained (LLaVA's first stage); its gradients are those of the whole."""
    found = compare_logits(clip_and_llama, tmp_path / "model", ranks, shapes=samples(1), inputs=images_of)
    frozen = replace(found.graph, units=tuple(replace(unit, freeze_module=True) for unit in found.graph.units))
    gradients = found.expected.gradients
    trained = {key: value for key, value in gradients.items() if key[0] == "vision" and key[1].startswith("layers.3.")}
    assert len(trained) == 4
    sizes, options = PLANS["vision tp 2 and pp 2, llm zb-h1"]
    expected = replace(found.expected, gradients=trained)
    assert_matches(found.case(sizes, graph=frozen, **options), ranks, run=FromFolder(found.folder), expected=expected)


SIZES = (
    SampleShape((("vision", 3, 5), ("vision", 1, 1)), 9, 4),
    SampleShape((), 5, 5),
    SampleShape((("vision", 2, 2),), 7, 3),
    SampleShape((("vision", 4, 1), ("vision", 1, 5), ("vision", 2, 4)), 8, 2),
)


def images_of_many_sizes(source: PaddedSource, index: int, token_ids: torch.Tensor) -> Mapping[str, Any]:
    """Padded to one size, as the image processor does; tokens behind rows keep the ids that were drawn for them."""
    images, sizes = [], []
    for item, start, length in source.text(index).item_starts:
        rows, columns = source.item_grid(index, item)
        token_ids[start : start + length].view(rows, columns + 1)[:, :-1] = IMAGE_TOKEN
        patches = torch.from_numpy(source.item(index, item).patches).double().view(rows, columns, 3, PATCH, PATCH)
        image = patches.permute(2, 0, 3, 1, 4).reshape(3, rows * PATCH, columns * PATCH)
        sizes.append(tuple(image.shape[1:]))
        images.append(torch.nn.functional.pad(image, (0, 20 - image.shape[2], 0, 20 - image.shape[1]), value=7.0))
    return {"pixel_values": torch.stack(images), "image_sizes": torch.tensor(sizes)} if images else {}


def test_pixtral_equals_transformers(ranks: RankPool, tmp_path: Path) -> None:
    comparison = compare_logits(pixtral, tmp_path / "model", ranks, shapes=SIZES, inputs=images_of_many_sizes)
    comparison.assert_under_plans(PLANS, ranks)
