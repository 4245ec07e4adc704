"""LLaVA-1.5 (CLIP, SigLIP) and InternVL3 of transformers: the same logits and gradients, alone and under any plan."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'braid[hf]')")

from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.in_order import balance_in_order
from multimodal.cost.layers.registry import read_model
from multimodal.data.image_processing import patch_positions
from multimodal.values.model_graph import ModelGraph
from tests.distributed.gradient_case import GradientCase, RankGradients
from tests.distributed.gradient_comparison import assert_matches
from tests.distributed.hugging_face_case import FromFolder, PaddedSource, gradients_here, logits_here
from tests.distributed.random_source import SampleShape
from tests.distributed.rank_pool import RankPool
from tests.distributed.training_case import build_plan
from tests.distributed.wide_transformers import build_wide_model, double_precision, gradients_by_key

IMAGE_TOKEN, VOCABULARY, PATCH, GRID = 60, 61, 2, 4
SHAPE = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 4, "initializer_range": 0.3}
VISION = {**SHAPE, "patch_size": PATCH, "image_size": GRID * PATCH}
SHAPES = ((2, 9, 4), (0, 5, 5), (1, 7, 3), (3, 8, 2))
"""Images, text tokens and targets of every sample."""
PLANS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "alone": ({"vision": (1, 1, 1), "llm": (1, 1, 1), "colocated": True}, {}),
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
    return build(SiglipVisionConfig(**VISION), text, vision_feature_select_strategy="full")


def internvl() -> Any:
    from transformers import InternVLConfig, InternVLForConditionalGeneration, InternVLVisionConfig, Qwen2Config

    sizes = {"patch_size": [PATCH, PATCH], "image_size": [GRID * PATCH, GRID * PATCH]}
    vision = InternVLVisionConfig(**{**SHAPE, **sizes}, attention_bias=True)
    text = Qwen2Config(**SHAPE, vocab_size=VOCABULARY, num_key_value_heads=2)
    options = {"tie_word_embeddings": False, "downsample_ratio": 0.5}
    return InternVLForConditionalGeneration(
        InternVLConfig(vision_config=vision, text_config=text, image_token_id=IMAGE_TOKEN, **options)
    )


def build(vision: Any, text: Any, **changes: Any) -> Any:
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN, **changes)
    )


def case_of(graph: ModelGraph, sizes: Mapping[str, Any], **options: Any) -> GradientCase:
    plan, image = build_plan(graph, **sizes), graph.unit("vision").image
    assert image is not None
    item = ("vision", GRID // image.merge_size, GRID // image.merge_size)
    shapes = tuple(SampleShape((item,) * count, *rest) for count, *rest in SHAPES)
    source = PaddedSource(graph, shapes, 64, num_tokens=IMAGE_TOKEN)
    lengths = [source.lengths(index) for index in range(len(source))]
    assignment = balance_in_order(lengths, graph=graph, plan=plan, options=BalanceOptions(micro_batch_size=1))
    return GradientCase(graph, plan, assignment, source, **options)


def pixels_of(patches: npt.NDArray[np.float32], merge_size: int) -> torch.Tensor:
    """[3, height, width] from patches in merge-window order, which list a channel after the other."""
    image = torch.empty(3, GRID, PATCH, GRID, PATCH, dtype=torch.float64)
    for (row, column), patch in zip(patch_positions((GRID, GRID), merge_size=merge_size), patches, strict=True):
        image[:, row, :, column] = torch.from_numpy(patch).double().reshape(3, PATCH, PATCH)
    return image.reshape(3, GRID * PATCH, GRID * PATCH)


def run_transformers(model: Any, source: PaddedSource) -> tuple[list[np.ndarray], float]:
    """Logits of the targets, sample by sample, and the loss; gradients are left in the model."""
    divisor, image = sum(shape.num_target_tokens for shape in source.shapes), source.graph.unit("vision").image
    assert image is not None
    logits, loss_sum = [], 0.0
    with double_precision():
        for index, shape in enumerate(source.shapes):
            text = source.text(index)
            tokens = torch.from_numpy(text.token_ids.copy())
            for _, start, length in text.item_starts:
                tokens[start : start + length] = IMAGE_TOKEN
            images = [pixels_of(source.item(index, item).patches, image.merge_size) for item in range(len(shape.items))]
            rows = torch.from_numpy(text.is_target).nonzero()[:, 0]
            found = model(input_ids=tokens[None], pixel_values=torch.stack(images) if images else None).logits[0, rows]
            loss = torch.nn.functional.cross_entropy(found, torch.from_numpy(text.labels)[rows], reduction="sum")
            (loss / divisor).backward()
            logits.append(found.detach().numpy())
            loss_sum += float(loss.detach())
    return logits, loss_sum


@pytest.mark.parametrize("make", [clip_and_llama, clip_with_its_class_token, siglip_and_qwen2, internvl])
def test_logits_and_gradients_equal_transformers(make: Any, ranks: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = build_wide_model(make, folder, max_shard_size="10KB")
    graph = read_model(folder)
    alone, run = case_of(graph, PLANS["alone"][0]), FromFolder(folder)
    assert isinstance(alone.source, PaddedSource)
    logits, loss_sum = run_transformers(model, alone.source)
    (found,) = ranks.run(logits_here, run, alone, world_size=1)
    for mine, theirs in zip(found, logits, strict=True):
        assert np.abs(mine[:, :VOCABULARY] - theirs).max() < 1e-12
    (gradients,) = ranks.run(gradients_here, run, alone, gradients_by_key(model), world_size=1)
    expected = RankGradients({"llm": loss_sum}, gradients, {})
    for name, (sizes, options) in PLANS.items():
        target = tmp_path / name
        assert_matches(case_of(graph, sizes, **options), ranks, run=FromFolder(folder, target), expected=expected)
        for path in folder.glob("*.safetensors"):
            assert (target / path.name).read_bytes() == path.read_bytes(), f"{path.name} under {name}"


def test_frozen_towers_are_left_as_they_are(ranks: RankPool, tmp_path: Path) -> None:
    """The projector alone is trained (LLaVA's first stage); its gradients are those of the whole."""
    folder = tmp_path / "model"
    model = build_wide_model(clip_and_llama, folder)
    graph = read_model(folder)
    frozen = replace(graph, units=tuple(replace(unit, freeze_module=True) for unit in graph.units))
    alone, run = case_of(graph, PLANS["alone"][0]), FromFolder(folder)
    assert isinstance(alone.source, PaddedSource)
    _, loss_sum = run_transformers(model, alone.source)
    (gradients,) = ranks.run(gradients_here, run, alone, gradients_by_key(model), world_size=1)
    trained = {key: value for key, value in gradients.items() if key[0] == "vision" and key[1].startswith("layers.3.")}
    assert len(trained) == 4
    sizes, options = PLANS["vision tp 2 and pp 2, llm zb-h1"]
    assert_matches(case_of(frozen, sizes, **options), ranks, run=run, expected=RankGradients({"llm": loss_sum}, trained, {}))
