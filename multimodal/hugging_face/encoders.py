"""Families of encoders that can be composed with an LLM of another folder: CLIP, SigLIP, DINOv2 and Whisper."""

import re
from typing import Any

from multimodal.hugging_face.architecture import Config, Encoder
from multimodal.hugging_face.encoder_forms import PIXTRAL, TOWERS
from multimodal.hugging_face.families import EncoderForm
from multimodal.hugging_face.qwen_forms import WHISPER
from multimodal.values.errors import ModelError
from multimodal.values.model_graph import Unit

_LAYER = re.compile(r"(?:encoder|transformer)\.layers?\.(\d+)\.")
_UNUSED = re.compile(r"(?:post_layernorm|layernorm|head|embeddings\.(?:position_ids|mask_token))\b")
_TEXT = ("text_model.", "text_projection.", "visual_projection.", "logit_scale", "logit_bias")


def tower_named(model_type: Any, *, where: str = "") -> EncoderForm:
    """Return the tower with learned positions that has this model_type; raises ModelError."""
    known = [name for name in TOWERS if name != PIXTRAL]
    if model_type not in known:
        raise ModelError(f"{where}model_type is {model_type!r}, expected one of {', '.join(known)}")
    return TOWERS[model_type]


def is_unused_in_tower(key: str, unit: Unit) -> bool:
    """True for tensors behind the used layer, and for tokens of pretraining; key: the name inside the tower."""
    key = key.removeprefix("vision_model.")
    layer = _LAYER.match(key)
    return int(layer[1]) >= unit.transformer.num_layers if layer else _UNUSED.match(key) is not None


def _vision(name: str, model_type: str, key: str | None = None) -> Encoder:
    """Return the row of an encoder of images whose last layer is its output.

    name: its class in transformers; model_type: of its tower (`TOWERS`), if config.json names none; key: the part of config.json
    that describes the tower, None: all of it.
    """
    names = TOWERS[model_type].names

    def to_unit(config: Config) -> dict[str, Any]:
        given = {"model_type": model_type, **(config if key is None else config.get(key) or {})}
        where = "" if key is None else f"{key}: "
        unit = tower_named(given.get("model_type"), where=where).read(given, where=where)
        norm = "patches" if names.last else "none"
        return {**unit, "image": {"merge_size": 1, **unit["image"]}, "projector_norm": norm}

    def is_unused(name: str, unit: Unit) -> bool:
        return name.startswith(_TEXT) or is_unused_in_tower(name, unit)

    return Encoder(name, to_unit, names, is_unused, spellings=((), (("", "vision_model."),)))


def _whisper(name: str, prefix: str) -> Encoder:
    def to_unit(config: Config) -> dict[str, Any]:
        unit = WHISPER.read(config, where="audio_config: ")
        return {**unit, "has_linear_projector": False, "projector_norm": "patches"}  # without a projector

    names = WHISPER.names.inside(f"{prefix}encoder.")
    return Encoder(name, to_unit, names, lambda key, unit: key.startswith((f"{prefix}decoder.", "proj_out.")))


ENCODERS: dict[str, Encoder] = {
    encoder.name: encoder
    for encoder in (
        _whisper("WhisperForConditionalGeneration", "model."),
        _whisper("WhisperModel", ""),
        _vision("CLIPModel", "clip_vision_model", "vision_config"),
        _vision("CLIPVisionModel", "clip_vision_model"),
        _vision("CLIPVisionModelWithProjection", "clip_vision_model"),
        _vision("SiglipModel", "siglip_vision_model", "vision_config"),
        _vision("SiglipVisionModel", "siglip_vision_model"),
        _vision("Dinov2Model", "dinov2"),
        _vision("Dinov2WithRegistersModel", "dinov2_with_registers"),
    )
}
"""Families of encoders by their name in `architectures` of config.json."""
