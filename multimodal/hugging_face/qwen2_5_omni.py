"""Qwen2.5-Omni's thinker: Qwen2.5-VL with Whisper's encoder in chunks of 2 s; alone, or in a folder with what makes speech."""

from typing import Any

from multimodal.hugging_face.architecture import Architecture, Config
from multimodal.hugging_face.qwen2_5_vl import read_native_vision, read_placed_text, vision_names
from multimodal.hugging_face.text_models import decoder_names
from multimodal.hugging_face.weight_names import Weight, grouped_qkv
from multimodal.hugging_face.whisper import audio_names, read_audio_unit
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
}
_CHUNK_TOKENS = 100
_MAX_TOKENS = 15000
"""Of 5 minutes, as the published feature extractor has it."""
_PARTS = ("audio_tower.", "visual.", "model.", "lm_head.")
_INSIDE = (
    ("audio_tower.", "model.audio_tower."),
    ("visual.", "model.visual."),
    ("model.", "model.language_model."),
)
SPELLINGS = ((), tuple((part, f"thinker.{part}") for part in _PARTS), _INSIDE)
"""The thinker alone, and in a whole model; what transformers calls it inside."""


def read_thinker(config: Config) -> dict[str, Any]:
    """Return the plain form of the model graph; raises ModelError for what cannot be computed here."""
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


def _is_unused(key: str, graph: ModelGraph) -> bool:
    """True for the embeddings of the ends of sound, which nothing uses, and for what makes speech."""
    return key.endswith("audio_tower.audio_bos_eos_token.weight") or key.startswith(("talker.", "token2wav."))


def _architecture(name: str, model_type: str) -> Architecture:
    return Architecture(
        name,
        model_type,
        read_thinker,
        None,
        (
            vision_names(Weight("self_attention.linear_qkv", ("attn.q", "attn.k", "attn.v"), grouped_qkv)),
            audio_names("audio_tower.", last_norm="audio_tower.ln_post", product="audio_tower.proj"),
            decoder_names(),
        ),
        is_unused=_is_unused,
        spellings=SPELLINGS,
    )


QWEN2_5_OMNI = (
    _architecture("Qwen2_5OmniThinkerForConditionalGeneration", "qwen2_5_omni_thinker"),
    _architecture("Qwen2_5OmniForConditionalGeneration", "qwen2_5_omni"),
    _architecture("Qwen2_5OmniModel", "qwen2_5_omni"),
)
