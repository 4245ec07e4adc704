"""Qwen2-VL: a vision encoder without windows, a merger, and a Qwen2 whose positions have rows and columns."""

from typing import Any

from multimodal.hugging_face.architecture import Config, Key, read_keys, require, with_defaults, write_keys
from multimodal.hugging_face.qwen2_5_vl import (
    PATCH_KEYS,
    PIXELS,
    TEXT_DEFAULTS,
    check_output_size,
    placed_architecture,
    read_placed_text,
    vision_names,
)
from multimodal.hugging_face.weight_names import Weight, fused_qkv
from multimodal.values.errors import ModelError
from multimodal.values.model_graph import Unit

_VISION_DEFAULTS = {
    "depth": 32,
    "embed_dim": 1280,
    "hidden_size": 3584,
    "hidden_act": "quick_gelu",
    "mlp_ratio": 4,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "initializer_range": 0.02,
}
_VISION_KEYS = (
    Key("depth", "num_layers"),
    Key("embed_dim", "hidden_size"),
    Key("num_heads", "num_attention_heads"),
    Key("initializer_range", "init_method_std"),
)


def _read_qwen2_vl(config: Config) -> dict[str, Any]:
    llm = read_placed_text(config, defaults=TEXT_DEFAULTS)
    vision = with_defaults(config.get("vision_config") or {}, _VISION_DEFAULTS)
    require(vision, {"hidden_act": ("quick_gelu",)}, where="vision_config: ")
    check_output_size(vision["hidden_size"], llm["hidden_size"], key="hidden_size")
    size, ratio = vision["embed_dim"], vision["mlp_ratio"]
    if not isinstance(size, int) or isinstance(ratio, bool) or not isinstance(ratio, int | float):
        raise ModelError(f"vision_config: embed_dim is {size!r} and mlp_ratio {ratio!r}, expected numbers; correct them")
    unit = {
        "role": "encoder",
        **read_keys(_VISION_KEYS, vision),
        "ffn_hidden_size": int(size * ratio),
        "normalization": "LayerNorm",
        "activation": "quick_gelu",
        "add_bias_linear": True,
        "layernorm_epsilon": 1e-6,
        "image": {
            **PIXELS,
            **read_keys(PATCH_KEYS, vision),
            "in_channels": vision.get("in_channels", vision.get("in_chans", 3)),
            "has_patch_bias": False,
        },
    }
    return {"units": {"vision": unit, "llm": llm}}


def _write_vision(vision: Unit, llm: Unit) -> dict[str, Any]:
    """Return a vision_config; reading it back shows that the inner width is no multiple of the hidden size, if it is none."""
    shape = vision.transformer
    channels = {"in_channels": vision.image.in_channels} if vision.image is not None else {}
    return {
        **write_keys((*_VISION_KEYS, *PATCH_KEYS), vision),
        **channels,
        "mlp_ratio": shape.ffn_hidden_size // shape.hidden_size,
        "hidden_act": shape.activation,
        "hidden_size": llm.transformer.hidden_size,
    }


_QKV = Weight("self_attention.linear_qkv", ("attn.qkv",), fused_qkv)
_MLP = Weight("mlp.linear_fc1", ("mlp.fc1",)), Weight("mlp.linear_fc2", ("mlp.fc2",))
QWEN2_VL = placed_architecture(
    "Qwen2VLForConditionalGeneration", "qwen2_vl", _read_qwen2_vl, _write_vision, vision_names(_QKV, mlp=_MLP)
)
