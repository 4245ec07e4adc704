"""config.json and feature extractor of Qwen2-Audio and Qwen2.5-Omni: as model graphs, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from multimodal.hugging_face.registry import ARCHITECTURES
from multimodal.hugging_face.weight_names import rows_of
from multimodal.plan.planners import PLANNERS
from multimodal.plan.planners.search.prediction import predict_run
from multimodal.values.errors import ModelError
from multimodal.values.model_graph import ModelGraph
from tests.unit.hugging_face.folders import read_folder
from tests.unit.plan.planners.planning_cases import request

WHISPER = {
    "activation_function": "gelu",
    "d_model": 1280,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "encoder_layers": 32,
    "num_mel_bins": 128,
    "max_source_positions": 1500,
    "scale_embedding": False,
}
QWEN2_AUDIO: dict[str, Any] = {
    "architectures": ["Qwen2AudioForConditionalGeneration"],
    "model_type": "qwen2_audio",
    "audio_config": {**WHISPER, "model_type": "qwen2_audio_encoder"},
    "text_config": {"model_type": "qwen2", "intermediate_size": 11008, "rms_norm_eps": 1e-5, "vocab_size": 156032},
}
"""As Qwen2-Audio-7B has it, without what computes nothing."""
VISION = {
    "depth": 32,
    "hidden_size": 1280,
    "in_chans": 3,
    "num_heads": 16,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15],
}
OMNI: dict[str, Any] = {
    "architectures": ["Qwen2_5OmniModel"],
    "model_type": "qwen2_5_omni",
    "talker_config": {"vocab_size": 8448},
    "thinker_config": {
        "audio_config": {**WHISPER, "n_window": 100, "output_dim": 3584},
        "vision_config": VISION,
        "text_config": {
            "model_type": "qwen2_5_omni_text",
            "hidden_size": 3584,
            "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
            "rope_theta": 1000000.0,
            "vocab_size": 152064,
        },
    },
}
"""As Qwen2.5-Omni-7B has it, likewise."""
FEATURES = {"feature_size": 128, "sampling_rate": 16000, "hop_length": 160, "n_fft": 400, "dither": 0.0, "chunk_length": 300}


def read(folder: Path, config: dict[str, Any], features: Any = None, **changes: Any) -> ModelGraph:
    return read_folder(folder, config | changes, features)


def test_qwen2_audio_is_understood(tmp_path: Path) -> None:
    graph = read(tmp_path, QWEN2_AUDIO, {**FEATURES, "chunk_length": 30})
    audio = graph.unit("audio")
    assert audio.audio is not None
    assert (audio.audio.merge, audio.audio.num_positions, audio.audio.chunk_tokens) == ("averaged", 1500, None)
    assert (audio.has_linear_projector, audio.projector_norm, audio.merged_size) == (True, "merged", 1280)
    assert audio.layers.count("transformer") == 32 and audio.keeps_items_whole
    assert ModelGraph.from_dict(graph.to_dict()) == graph


def test_a_whole_omni_model_is_its_thinker(tmp_path: Path) -> None:
    graph = read(tmp_path, OMNI, {**FEATURES, "image_mean": [0.1], "image_std": [1.0], "min_pixels": 3136, "patch_size": 14})
    assert graph.unit_names == ("vision", "audio", "llm")
    audio, vision = graph.unit("audio"), graph.unit("vision")
    assert audio.audio is not None and vision.image is not None
    assert (audio.audio.chunk_tokens, audio.audio.num_positions, audio.audio.max_tokens) == (100, 0, 15000)
    assert audio.layers.count("windowed_transformer") == 32
    assert (vision.image.mean, vision.layers.count("transformer")) == ((0.1,), 2)
    assert (graph.backbone.transformer.rotary_sections, graph.backbone.ties_embeddings) == ((16, 24, 24), False)
    alone = {**OMNI["thinker_config"], "architectures": ["Qwen2_5OmniThinkerForConditionalGeneration"]}
    assert read(tmp_path, alone) == graph


def test_keys_have_no_bias(tmp_path: Path) -> None:
    unit = read(tmp_path, QWEN2_AUDIO).unit("audio")
    names = ARCHITECTURES["Qwen2AudioForConditionalGeneration"].names[0]
    found = rows_of(names, unit, "layers.1.self_attention.linear_qkv.bias", num_rows=3840)
    assert {rows.key.rsplit(".", 2)[1] for rows in found} == {"q_proj", "v_proj"} and len(found) == 40
    assert len(rows_of(names, unit, "layers.1.self_attention.linear_qkv.weight", num_rows=3840)) == 60


@pytest.mark.parametrize(
    ("changes", "features", "message"),
    [
        ({"audio_config": {**WHISPER, "activation_function": "relu"}}, None, "audio_config: activation_function is 'relu'"),
        ({"audio_config": {**WHISPER, "scale_embedding": True}}, None, "audio_config: scale_embedding is True"),
        ({}, {**FEATURES, "feature_size": 80}, "the feature extractor's feature_size is 80, and only 128"),
        ({}, {"feature_extractor": {**FEATURES, "hop_length": 320}}, "the feature extractor's hop_length is 320"),
    ],
)
def test_what_cannot_be_computed_is_refused(changes: Any, features: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"config.json: .*{message}"):
        read(tmp_path, QWEN2_AUDIO, features, **changes)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"audio_config": {**WHISPER, "output_dim": 64}}, "output_dim is 64, but the LLM's hidden_size 3584"),
        ({"vision_config": {**VISION, "out_hidden_size": 64}}, "out_hidden_size is 64"),
    ],
)
def test_parts_that_do_not_fit_are_refused(part: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        read(tmp_path, OMNI, thinker_config={**OMNI["thinker_config"], **part})


def test_it_can_be_planned(tmp_path: Path) -> None:
    """With sound in chunks, from lengths of three kinds."""
    ear = {"d_model": 64, "encoder_layers": 4, "encoder_attention_heads": 4, "encoder_ffn_dim": 96, "output_dim": 64}
    eye = {"depth": 4, "hidden_size": 64, "num_heads": 4, "intermediate_size": 96, "out_hidden_size": 64}
    text = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 4,
        "intermediate_size": 96,
    }
    text |= {"vocab_size": 512, "rope_scaling": {"mrope_section": [2, 3, 3]}}
    asked = request(read(tmp_path, OMNI, thinker_config={"audio_config": ear, "vision_config": eye, "text_config": text}))
    assert predict_run(PLANNERS["braid"](asked), asked).iteration_seconds > 0
