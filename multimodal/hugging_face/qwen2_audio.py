"""Qwen2-Audio: Whisper's encoder, an average of two tokens, one product, and a Qwen2."""

from typing import Any

from multimodal.hugging_face.architecture import Architecture, Config, require
from multimodal.hugging_face.processors import write_feature_extractor
from multimodal.hugging_face.text_families import decoder_names
from multimodal.hugging_face.text_models import read_text_unit, write_inner_text
from multimodal.hugging_face.whisper import audio_names, convolution_shapes, read_audio_unit, write_audio_unit
from multimodal.values.model_graph import ModelGraph

_SPELLINGS = (
    (),
    (
        ("language_model.model.", "model.language_model."),
        ("language_model.lm_head.", "lm_head."),
        ("multi_modal_projector.", "model.multi_modal_projector."),
        ("audio_tower.", "model.audio_tower."),
    ),
)
"""The spelling that transformers saves, and the one of its modules."""


def _read_qwen2_audio(config: Config) -> dict[str, Any]:
    text = {"model_type": "qwen2", **(config.get("text_config") or {})}
    require(text, {"tie_word_embeddings": (False, None)}, where="text_config: ")  # transformers ignores it here
    llm = read_text_unit(text, where="text_config: ")
    return {"units": {"audio": read_audio_unit(config.get("audio_config") or {}), "llm": llm}}


def _write_qwen2_audio(graph: ModelGraph) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2AudioForConditionalGeneration"],
        "model_type": "qwen2_audio",
        "text_config": write_inner_text(graph.backbone),
        "audio_config": {**write_audio_unit(graph.encoders[0]), "model_type": "qwen2_audio_encoder"},
        "tie_word_embeddings": graph.backbone.ties_embeddings,
    }


QWEN2_AUDIO = Architecture(
    "Qwen2AudioForConditionalGeneration",
    _read_qwen2_audio,
    _write_qwen2_audio,
    (
        audio_names("audio_tower.", last_norm="audio_tower.layer_norm", product="multi_modal_projector.linear"),
        decoder_names("language_model."),
    ),
    spellings=_SPELLINGS,
    tied_copies=(),
    to_processor=write_feature_extractor,
    shapes=lambda graph: convolution_shapes(graph.encoders[0], "audio_tower."),
    placeholders={"audio": "audio_token_index"},
)
