"""Qwen2.5-Omni's thinker: Qwen2.5-VL with Whisper's encoder in chunks of 2 s; alone, or in a folder with the talker."""

from typing import Any

from multimodal.hugging_face.architecture import Architecture, Config
from multimodal.hugging_face.processors import write_feature_extractor, write_image_processor
from multimodal.hugging_face.qwen2_5_vl import (
    patch_shapes,
    read_native_vision,
    read_placed_text,
    vision_names,
    write_native_vision,
)
from multimodal.hugging_face.text_families import decoder_names
from multimodal.hugging_face.text_models import write_placed_text
from multimodal.hugging_face.weight_names import Weight, grouped_qkv
from multimodal.hugging_face.whisper import audio_names, convolution_shapes, read_audio_unit, write_audio_unit
from multimodal.values.errors import ModelError
from multimodal.values.model_graph import ModelGraph

_TEXT_DEFAULTS = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
}
_CHUNK_TOKENS = 100
_ENDS_OF_SOUND = "audio_tower.audio_bos_eos_token.weight"
"""Embeddings that transformers has and does not use."""
_MAX_TOKENS = 15000
"""Tokens of 5 minutes, as in the published feature extractor."""
_PARTS = ("audio_tower.", "visual.", "model.", "lm_head.")
_INSIDE = (
    ("audio_tower.", "model.audio_tower."),
    ("visual.", "model.visual."),
    ("model.", "model.language_model."),
)
SPELLINGS = ((), tuple((part, f"thinker.{part}") for part in _PARTS), _INSIDE)
"""The thinker alone, and in a whole model; then the spelling of its modules."""

_TOKENS = {
    "image": "image_token_index",
    "audio": "audio_token_index",
    **{name: f"{name}_token_id" for name in ("vision_start", "vision_end", "audio_start", "audio_end")},
}
"""The tokenizer's name of a token -> the key of config.json."""


def _read_thinker(config: Config) -> dict[str, Any]:
    config = config.get("thinker_config") or config
    llm = read_placed_text({"tie_word_embeddings": False, **config}, defaults=_TEXT_DEFAULTS)
    given = config.get("audio_config") or {}
    chunk_tokens = _CHUNK_TOKENS if given.get("n_window") is None else given["n_window"]
    if given.get("output_dim", llm["hidden_size"]) != llm["hidden_size"]:
        raise ModelError(
            f"audio_config: output_dim is {given['output_dim']}, but the LLM's hidden_size {llm['hidden_size']}; correct "
            "one of them"
        )
    vision = read_native_vision(config.get("vision_config") or {}, llm["hidden_size"])
    audio = read_audio_unit(given, audio={"chunk_tokens": chunk_tokens, "max_tokens": _MAX_TOKENS})
    return {"units": {"vision": vision, "audio": audio, "llm": llm}}


def _write_thinker(graph: ModelGraph) -> dict[str, Any]:
    """Return a config.json of the thinker alone."""
    (vision, audio), llm = graph.encoders, graph.backbone
    chunks = {"n_window": audio.audio.chunk_tokens if audio.audio is not None else None}
    return {
        "architectures": ["Qwen2_5OmniThinkerForConditionalGeneration"],
        "model_type": "qwen2_5_omni_thinker",
        "text_config": write_placed_text(llm, "qwen2_5_omni_text"),
        "vision_config": {**write_native_vision(vision, llm), "model_type": "qwen2_5_omni_vision_encoder"},
        "audio_config": {
            **write_audio_unit(audio),
            **chunks,
            "model_type": "qwen2_5_omni_audio_encoder",
            "output_dim": llm.transformer.hidden_size,
        },
        "tie_word_embeddings": llm.ties_embeddings,
    }


def _thinker_shapes(graph: ModelGraph) -> dict[str, tuple[int, ...]]:
    """Return the shapes of patch embedding and convolutions, and of the ends of sound."""
    ends = {_ENDS_OF_SOUND: (2, graph.backbone.transformer.hidden_size)}
    return {**patch_shapes(graph), **convolution_shapes(graph.encoders[1], "audio_tower."), **ends}


def _write_processor(graph: ModelGraph) -> dict[str, Any]:
    """Return the description of both image and sound processing, without the key that means something else in each."""
    both = {**write_image_processor(graph), **write_feature_extractor(graph)}
    return {key: value for key, value in both.items() if key != "do_normalize"}


def _architecture(name: str, *, is_alone: bool = False) -> Architecture:
    return Architecture(
        name,
        _read_thinker,
        _write_thinker if is_alone else None,
        (
            vision_names(Weight("self_attention.linear_qkv", ("attn.q", "attn.k", "attn.v"), grouped_qkv)),
            audio_names("audio_tower.", last_norm="audio_tower.ln_post", product="audio_tower.proj"),
            decoder_names(),
        ),
        is_unused=lambda key, graph: key.endswith(_ENDS_OF_SOUND) or key.startswith(("talker.", "token2wav.")),
        spellings=SPELLINGS,
        to_processor=_write_processor,
        shapes=_thinker_shapes,
        placeholders=_TOKENS,
    )


QWEN2_5_OMNI = (
    _architecture("Qwen2_5OmniThinkerForConditionalGeneration", is_alone=True),
    _architecture("Qwen2_5OmniForConditionalGeneration"),
    _architecture("Qwen2_5OmniModel"),
)
