"""Encoders of images of one size: CLIP, SigLIP, DINOv2, Pixtral and InternViT, beyond what `families.yaml` says of them."""

from collections.abc import Mapping
from typing import Any

from multimodal.hugging_face.architecture import Config, image_of, require
from multimodal.hugging_face.families import EncoderForm, encoder_form
from multimodal.values.errors import ModelError
from multimodal.values.model_graph import Unit


def _read_tower(config: Config, where: str) -> dict[str, Any]:
    registers = config.get("num_register_tokens")
    return {} if registers is None else {"image": {"num_registers": registers}}


def _write_tower(unit: Unit) -> dict[str, Any]:
    """Return the size of images that has a position for every patch."""
    image = image_of(unit)
    return {"image_size": image.image_size if image.position_grid is None else image.position_grid * image.patch_size}


def _dinov2_width(hidden_size: int, mlp_ratio: float, *, is_gated: bool) -> int:
    """Return the inner width of DINOv2's MLP; with a gate it is two thirds of that, rounded to a multiple of 8."""
    width = int(hidden_size * mlp_ratio)
    return (int(width * 2 / 3) + 7) // 8 * 8 if is_gated else width


def _read_dinov2(config: Config, where: str) -> dict[str, Any]:
    for key in ("hidden_size", "mlp_ratio"):
        if not isinstance(config[key], int | float):
            raise ModelError(f"{key} is {config[key]!r}, expected a number; correct it")
    is_gated = bool(config["use_swiglu_ffn"])
    width = _dinov2_width(config["hidden_size"], config["mlp_ratio"], is_gated=is_gated)
    activation = {"activation": "swiglu"} if is_gated else {}
    return {**_read_tower(config, where), "ffn_hidden_size": width, **activation}


def _write_dinov2(unit: Unit) -> dict[str, Any]:
    shape, image = unit.transformer, image_of(unit)
    widths = {_dinov2_width(shape.hidden_size, ratio, is_gated=shape.is_gated): ratio for ratio in range(16, 0, -1)}
    registers = {"num_register_tokens": image.num_registers} if image.num_registers else {}
    ratio = widths.get(shape.ffn_hidden_size, 4)
    return {**_write_tower(unit), "mlp_ratio": ratio, "use_swiglu_ffn": shape.is_gated, **registers}


def _read_pixtral(config: Config, where: str) -> dict[str, Any]:
    require(config, {"head_dim": (config["hidden_size"] // config["num_attention_heads"], None)}, where=where)
    rotary = config.get("rope_parameters") or {}
    require(rotary, {"rope_type": ("axial", "default")}, where=f"{where}rope_parameters: ")
    return {"rotary_base": float(rotary.get("rope_theta") or config.get("rope_theta") or 10000.0)}


def _write_pixtral(unit: Unit) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "axial", "rope_theta": unit.transformer.rotary_base}}


_HEADS_EPSILON = 1e-6
"""Epsilon of norms of queries and keys, whatever that of the others is."""


def _read_internvit(config: Config, where: str) -> dict[str, Any]:
    if spans_heads := bool(config["use_qk_norm"]):  # transformers' own norm
        needed = {"norm_type": ("rms_norm",), "layer_norm_eps": (_HEADS_EPSILON,)}
        require(config, needed, where=f"{where}use_qk_norm, but ")
    sides = {key: _side(config, key, where) for key in ("image_size", "patch_size")}
    return {
        "add_qkv_bias": bool(config["attention_bias"]),
        "qk_layernorm": spans_heads,
        "qk_norm_spans_heads": spans_heads,
        "image": {**sides, "in_channels": config["num_channels"]},
    }


def _side(config: Config, key: str, where: str) -> Any:
    """Return a length that is given once, or for height and width."""
    value = config[key]
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise ModelError(f"{where}{key} is {value}, and only squares can be trained here; take a model with one size")
    return value[0]


def _write_internvit(unit: Unit) -> dict[str, Any]:
    shape, image = unit.transformer, image_of(unit)
    return {
        "attention_bias": shape.biases["linear_qkv"],
        "use_qk_norm": shape.qk_norm_spans_heads,
        "image_size": [(image.position_grid or (image.image_size or 0) // image.patch_size) * image.patch_size] * 2,
        "patch_size": [image.patch_size, image.patch_size],
        "num_channels": image.in_channels,
    }


PIXTRAL = "pixtral"
TOWERS: Mapping[str, EncoderForm] = {
    "clip_vision_model": encoder_form("clip", _read_tower, _write_tower),
    "siglip_vision_model": encoder_form("siglip", _read_tower, _write_tower),
    "dinov2": encoder_form("dinov2", _read_dinov2, _write_dinov2),
    "dinov2_with_registers": encoder_form("dinov2_with_registers", _read_dinov2, _write_dinov2),
    PIXTRAL: encoder_form(PIXTRAL, _read_pixtral, _write_pixtral),
}
"""Vision towers by their model_type in config.json."""
INTERNVIT = encoder_form("internvit", _read_internvit, _write_internvit)
"""InternVL3's tower."""
