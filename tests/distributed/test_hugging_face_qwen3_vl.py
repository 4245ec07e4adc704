"""Qwen3-VL of transformers: deepstack, interleaved M-RoPE and stretched positions; alike in one process and under any plan."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'braid[hf]')")
pytest.importorskip("transformers.models.qwen3_vl", reason="this transformers has no Qwen3-VL")

from multimodal.attention.share_tokens import TokenDistribution
from tests.distributed.hugging_face_comparison import VOCABULARY, Plans, compare_logits
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_hugging_face_qwen2_5_vl import IMAGE_TOKEN, SAMPLES, images_of

MARKS = (("vision", 59, 58),)
"""Older versions of transformers find images by the token before them."""
PLANS: Plans = {
    "vision dp 2, llm tp 2 and pp 3": ({"vision": (1, 1, 2), "llm": (2, 3, 1)}, {"sequence_parallel": True}),
    "vision tp 2 and pp 3, llm zb-h1": (
        {"vision": (2, 3, 1), "llm": (1, 2, 1)},
        {"builder": "zb-h1", "sequence_parallel": True, "recompute": "full"},
    ),
    "cp 2 of both, weights shared": (
        {"vision": (1, 1, 2, 2), "llm": (1, 1, 2, 2)},
        {"shards_weights": True, "distribution": TokenDistribution.BY_ITEM},
    ),
}


def qwen3_vl(**changes: Any) -> Any:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    vision = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 20,
        "num_heads": 4,
        "patch_size": 2,
        "out_hidden_size": 24,
        "num_position_embeddings": 25,
        "deepstack_visual_indexes": [0, 2],
        "initializer_range": 0.3,
    }
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": 24,
        "intermediate_size": 20,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "initializer_range": 0.3,
        "rope_parameters": {"rope_type": "default", "mrope_section": [3, 1, 2], "rope_theta": 5000.0},
    }
    ids = {"image_token_id": IMAGE_TOKEN, "vision_start_token_id": 59, "vision_end_token_id": 58}
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(vision_config=vision, text_config=text, **ids, **changes))


@pytest.mark.parametrize("is_tied", [False, True])
def test_logits_and_gradients_equal_transformers(is_tied: bool, ranks: RankPool, tmp_path: Path) -> None:
    def make() -> Any:
        return qwen3_vl(tie_word_embeddings=is_tied)

    comparison = compare_logits(make, tmp_path / "model", ranks, shapes=SAMPLES, inputs=images_of, marks=MARKS)
    comparison.assert_under_plans(dict(list(PLANS.items())[: 1 if is_tied else None]), ranks)
