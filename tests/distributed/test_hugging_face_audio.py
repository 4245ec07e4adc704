"""Qwen2-Audio and Qwen2.5-Omni's thinker of transformers: the same logits and gradients, alone and under any plan."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'braid[hf]')")

from multimodal.attention.share_tokens import TokenDistribution
from tests.distributed.hugging_face_case import PaddedSource
from tests.distributed.hugging_face_comparison import VOCABULARY, Plans, compare_logits
from tests.distributed.random_source import SampleShape
from tests.distributed.rank_pool import RankPool

AUDIO_TOKEN, AUDIO_START, AUDIO_END, IMAGE_TOKEN, IMAGE_START, IMAGE_END = range(54, 60)
SHAPE = {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2, "initializer_range": 0.3}
TEXT = {**SHAPE, "vocab_size": VOCABULARY, "num_key_value_heads": 2}
EAR = {
    "num_mel_bins": 4,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 20,
    "d_model": 16,
    "initializer_range": 0.3,
}
MAX_TOKENS = 20
CLIPS = (
    SampleShape((("audio", 12, 1), ("audio", 5, 1)), 9, 4),
    SampleShape((), 5, 5),
    SampleShape((("audio", 2 * MAX_TOKENS, 1),), 7, 3),
    SampleShape((("audio", 7, 1), ("audio", 2 * MAX_TOKENS - 1, 1), ("audio", 3, 1)), 8, 2),
)
"""Clips with 1 or 2 frames of a last token, with a token left over by averaging, and of the longest two lengths."""
PLANS: Plans = {
    "audio dp 2, llm tp 2 and pp 2": ({"audio": (1, 1, 2), "llm": (2, 2, 1)}, {"sequence_parallel": True}),
    "audio tp 2 and pp 2, llm zb-h1": (
        {"audio": (2, 2, 1), "llm": (1, 2, 1)},
        {"builder": "zb-h1", "sequence_parallel": True, "recompute": "full"},
    ),
    "cp 2 of both, weights shared": ({"audio": (1, 1, 2, 2), "llm": (1, 1, 2, 2)}, {"shards_weights": True}),
}
OMNI_SAMPLES = (
    SampleShape((("vision", 3, 5), ("audio", 23, 1)), 9, 4),
    SampleShape((("audio", 12, 1),), 5, 5),
    SampleShape((("audio", 5, 1), ("vision", 2, 2), ("audio", 6, 1)), 12, 3),
    SampleShape((("vision", 1, 4),), 8, 2),
)
OMNI_PLANS: Plans = {
    "three units apart": ({"vision": (1, 2, 1), "audio": (2, 1, 1), "llm": (2, 2, 1)}, {"sequence_parallel": True}),
    "zb-h1, cp 2, weights shared": (
        {"vision": (1, 1, 2), "audio": (1, 1, 1, 2), "llm": (1, 1, 2, 2)},
        {"builder": "zb-h1", "shards_weights": True, "distribution": TokenDistribution.BY_ITEM},
    ),
}


def qwen2_audio(*, vocab_size: int = VOCABULARY, audio_token_index: int = AUDIO_TOKEN, max_tokens: int = MAX_TOKENS) -> Any:
    from transformers import Qwen2AudioConfig, Qwen2AudioEncoderConfig, Qwen2AudioForConditionalGeneration, Qwen2Config

    audio = Qwen2AudioEncoderConfig(**EAR, max_source_positions=max_tokens)
    text = Qwen2Config(**TEXT | {"vocab_size": vocab_size})
    return Qwen2AudioForConditionalGeneration(
        Qwen2AudioConfig(audio_config=audio, text_config=text, audio_token_index=audio_token_index)
    )


def omni_thinker(*, vocab_size: int = VOCABULARY, **changes: Any) -> Any:
    from transformers import Qwen2_5OmniThinkerConfig, Qwen2_5OmniThinkerForConditionalGeneration

    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 20,
        "num_heads": 4,
        "patch_size": 2,
        "window_size": 8,
        "fullatt_block_indexes": [1],
        "out_hidden_size": 24,
        "initializer_range": 0.3,
    }
    rotary = {"rope_type": "default", "mrope_section": [1, 3, 2], "rope_theta": 5000.0}
    ids = {"audio_token_index": AUDIO_TOKEN, "audio_start_token_id": AUDIO_START, "audio_end_token_id": AUDIO_END}
    ids |= {"image_token_index": IMAGE_TOKEN, "vision_start_token_id": IMAGE_START, "vision_end_token_id": IMAGE_END}
    config = Qwen2_5OmniThinkerConfig(
        vision_config=vision,
        audio_config={**EAR, "n_window": 3, "output_dim": 24},
        text_config={**TEXT, "vocab_size": vocab_size, "rope_parameters": rotary},
        **ids | changes,
    )
    return Qwen2_5OmniThinkerForConditionalGeneration(config)


def clips_of(source: PaddedSource, index: int, token_ids: torch.Tensor) -> Mapping[str, Any]:
    """Spectrograms, in which anything may follow two frames of silence: padded to the longest clip."""
    spans = [(item, start, length) for item, start, length in source.text(index).item_starts if is_clip(source, index, item)]
    for _, start, length in spans:
        token_ids[start : start + length] = AUDIO_TOKEN
    if not spans:
        return {"attention_mask": torch.ones_like(token_ids)[None]}
    frames = torch.stack([torch.from_numpy(source.frames(index, item)).double() for item, _, _ in spans])
    is_heard = torch.zeros(frames.shape[:2], dtype=torch.int64)
    for row, (item, _, _) in enumerate(spans):
        is_heard[row, : source.item_grid(index, item)[0]] = 1
    return {
        "attention_mask": torch.ones_like(token_ids)[None],
        "input_features": frames.transpose(1, 2),
        "feature_attention_mask": is_heard,
    }


def clips_and_images_of(source: PaddedSource, index: int, token_ids: torch.Tensor) -> Mapping[str, Any]:
    given = dict(clips_of(source, index, token_ids))
    spans = [(item, start, length) for item, start, length in source.text(index).item_starts if not is_clip(source, index, item)]
    for _, start, length in spans:
        token_ids[start : start + length] = IMAGE_TOKEN
    if spans:
        patches = [torch.from_numpy(source.item(index, item).patches).double() for item, _, _ in spans]
        grids = [(1, *source.item_grid(index, item)) for item, _, _ in spans]
        given |= {"pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(grids)}
    return given


def is_clip(source: PaddedSource, index: int, item: int) -> bool:
    return source.shapes[index].items[item][0] == "audio"


def test_qwen2_audio_equals_transformers(ranks: RankPool, tmp_path: Path) -> None:
    comparison = compare_logits(qwen2_audio, tmp_path / "model", ranks, shapes=CLIPS, inputs=clips_of)
    assert ("audio", "layers.0.positions") not in comparison.expected.gradients
    comparison.assert_under_plans(PLANS, ranks)


def test_omni_equals_transformers(ranks: RankPool, tmp_path: Path) -> None:
    marks = ("vision", IMAGE_START, IMAGE_END), ("audio", AUDIO_START, AUDIO_END)
    given = {"shapes": OMNI_SAMPLES, "inputs": clips_and_images_of, "marks": marks}
    comparison = compare_logits(omni_thinker, tmp_path / "model", ranks, **given)
    comparison.assert_under_plans(OMNI_PLANS, ranks)
