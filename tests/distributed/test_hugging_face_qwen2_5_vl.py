"""Qwen2.5-VL and Qwen2-VL of transformers: the same logits and gradients, in one process and under any plan."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'braid[hf]')")

from multimodal.attention.share_tokens import TokenDistribution
from multimodal.attention.windows import order_by_window
from multimodal.data.image_processing import patch_positions
from tests.distributed.hugging_face_case import PaddedSource
from tests.distributed.hugging_face_comparison import VOCABULARY, Plans, compare_logits
from tests.distributed.random_source import SampleShape
from tests.distributed.rank_pool import RankPool

IMAGE_TOKEN = 60
SAMPLES = (
    SampleShape((("vision", 3, 5), ("vision", 1, 1)), 9, 4),
    SampleShape((), 5, 5),
    SampleShape((("vision", 2, 2),), 7, 3),
    SampleShape((("vision", 4, 3), ("vision", 1, 5), ("vision", 2, 4)), 8, 2),
)
PLANS: Plans = {
    "vision dp 2, llm tp 2 and pp 2": ({"vision": (1, 1, 2), "llm": (2, 2, 1)}, {"sequence_parallel": True}),
    "vision tp 2 and pp 2, llm zb-h1": (
        {"vision": (2, 2, 1), "llm": (1, 2, 1)},
        {"builder": "zb-h1", "sequence_parallel": True, "recompute": "full"},
    ),
    "cp 2 of both, weights shared": (
        {"vision": (1, 1, 2, 2), "llm": (1, 1, 2, 2)},
        {"shards_weights": True, "distribution": TokenDistribution.BY_ITEM},
    ),
    "cp 4 of the encoder, blocks": ({"vision": (1, 1, 1, 4), "llm": (2, 1, 1)}, {"attention_backend": "blocks"}),
}


TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 3, 2], "rope_theta": 5000.0},
}


WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}


def qwen2_5_vl(**changes: Any) -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 20,
        "num_heads": 4,
        "patch_size": 2,
        "window_size": 8,
        "fullatt_block_indexes": [1],
        "out_hidden_size": 24,
        "initializer_range": 0.3,
    }
    ids = {"image_token_id": IMAGE_TOKEN, "vision_start_token_id": 59, "vision_end_token_id": 58}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(vision_config=vision, text_config=TEXT, **ids, **changes))


def qwen2_vl() -> Any:
    """The upper layer of the LLM has a window, which images reach beyond."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    ids = {"image_token_id": IMAGE_TOKEN, "vision_start_token_id": 59, "vision_end_token_id": 58}
    vision = {"depth": 3, "embed_dim": 32, "hidden_size": 24, "mlp_ratio": 2, "num_heads": 4, "patch_size": 2}
    return Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(vision_config={**vision, "initializer_range": 0.3}, text_config=TEXT | WINDOW, **ids)
    )


def images_of(source: PaddedSource, index: int, token_ids: torch.Tensor) -> Mapping[str, Any]:
    kinds = torch.zeros_like(token_ids)
    for _, start, length in source.text(index).item_starts:
        token_ids[start : start + length], kinds[start : start + length] = IMAGE_TOKEN, 1
    items = range(len(source.shapes[index].items))
    if not items:
        return {"mm_token_type_ids": kinds[None]}
    patches = [torch.from_numpy(source.item(index, item).patches).double() for item in items]
    grids = [(1, *source.item_grid(index, item)) for item in items]
    return {
        "mm_token_type_ids": kinds[None],
        "pixel_values": torch.cat(patches),
        "image_grid_thw": torch.tensor(grids),
    }


@pytest.mark.deep(when=lambda is_tied: is_tied)  # as Qwen3-VL is
@pytest.mark.parametrize("is_tied", [False, True])
def test_logits_and_gradients_equal_transformers(is_tied: bool, ranks: RankPool, tmp_path: Path) -> None:
    def make() -> Any:
        return qwen2_5_vl(tie_word_embeddings=is_tied)

    comparison = compare_logits(make, tmp_path / "model", ranks, shapes=SAMPLES, inputs=images_of)
    comparison.assert_under_plans(dict(list(PLANS.items())[: 1 if is_tied else None]), ranks)


def test_qwen2_vl_equals_transformers(ranks: RankPool, tmp_path: Path) -> None:
    comparison = compare_logits(qwen2_vl, tmp_path / "model", ranks, shapes=SAMPLES, inputs=images_of)
    comparison.assert_under_plans(PLANS, ranks)


@pytest.mark.parametrize("grid", [(6, 10), (2, 2), (8, 8), (4, 22)])
def test_windows_are_those_of_transformers(grid: tuple[int, int]) -> None:
    vision_utils = pytest.importorskip("transformers.vision_utils", reason="this transformers has no vision_utils")
    index, bounds = vision_utils.get_vision_window_index(torch.tensor([[1, *grid]]), 2, 112, 14)
    positions = torch.from_numpy(patch_positions(grid, merge_size=2))
    order, lengths = order_by_window(positions, [len(positions)], size=8)
    assert lengths == tuple(bounds.diff().tolist())
    assert order.tolist() == (4 * index[:, None] + torch.arange(4)).flatten().tolist()
