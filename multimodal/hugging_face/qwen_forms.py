"""The encoders of Qwen's models: images at native resolution, and Whisper's encoder; each as one description."""

import math
from collections.abc import Mapping
from typing import Any

from multimodal.hugging_face.architecture import Config, EncoderForm, Key, image_of, require
from multimodal.hugging_face.encoder_forms import ACTIVATIONS, NO_DROPOUT, OF_CLIP, VIT, shape_keys
from multimodal.hugging_face.weight_names import Tensor, UnitNames, Weight, grouped_qkv_without_key_bias, layer_names
from multimodal.values.errors import ModelError
from multimodal.values.model_graph import Unit

_CHANNELS = Key("in_channels", "in_channels")
_QWEN_PATCHES = Key("patch_size", "patch_size"), Key("spatial_merge_size", "merge_size"), Key("temporal_patch_size", "num_frames")
_QWEN_SIZES = {"num_heads": 16, "initializer_range": 0.02, "spatial_merge_size": 2, "temporal_patch_size": 2}
_QWEN2_SIZES = {"depth": 32, "hidden_size": 3584, "patch_size": 14, **_QWEN_SIZES}
_QWEN: Mapping[str, Any] = {"add_bias_linear": True, "layernorm_epsilon": 1e-6}
_PIXELS = {**OF_CLIP, "min_pixels": 3136, "max_pixels": 12845056}
"""Values of the published image processors."""


def _qwen_names(qkv: str, fc1: str, fc2: str, *more: Tensor) -> UnitNames:
    first = Tensor("weight", "patch_embed.proj.weight"), *more
    return UnitNames(first, layer_names("norm1 norm2", qkv, "attn.proj", fc1, fc2), (), "blocks.{}.")


def _read_qwen2_vl(config: Config, where: str) -> dict[str, Any]:
    size, ratio = config["embed_dim"], config["mlp_ratio"]
    if not isinstance(size, int) or isinstance(ratio, bool) or not isinstance(ratio, int | float):
        raise ModelError(f"{where}embed_dim is {size!r} and mlp_ratio {ratio!r}, expected numbers; correct them")
    return {"ffn_hidden_size": int(size * ratio), "image": {"video": {}}}


QWEN2_VL = EncoderForm(
    shape_keys("depth", "embed_dim", "num_heads"),
    (*_QWEN_PATCHES, _CHANNELS),
    {"normalization": "LayerNorm", "activation": "quick_gelu", **_QWEN},
    {**_PIXELS, "has_patch_bias": False},
    _qwen_names("attn.qkv", "mlp.fc1", "mlp.fc2"),
    defaults={**_QWEN2_SIZES, "embed_dim": 1280, "hidden_act": "quick_gelu", "mlp_ratio": 4},
    allowed={"hidden_act": ("quick_gelu",)},
    read_more=_read_qwen2_vl,
    # Reading it back shows that the inner width is no multiple of the hidden size, if it is none.
    write_more=lambda unit: {
        "mlp_ratio": unit.transformer.ffn_hidden_size // unit.transformer.hidden_size,
        "hidden_act": unit.transformer.activation,
    },
)


def _check_positions(config: Config, where: str) -> None:
    rotary = config.get("rope_parameters") or {}
    require(rotary, {"rope_type": ("axial", "default"), "rope_theta": (10000, 10000.0)}, where=where)


def _read_qwen2_5_vl(config: Config, where: str) -> dict[str, Any]:
    _check_positions(config, where)
    return {"image": {"video": {"tokens_per_second": config["tokens_per_second"]}}}


def _write_qwen2_5_vl(unit: Unit) -> dict[str, Any]:
    video = image_of(unit).video
    return {"hidden_act": "silu"} | ({} if video is None else {"tokens_per_second": video.tokens_per_second})


def _qwen2_5_vl(qkv: str) -> EncoderForm:
    """With windows in most layers; qkv: names of queries, keys and values."""
    windows = Key("window_size", "window_size"), Key("fullatt_block_indexes", "full_attention_layers")
    return EncoderForm(
        shape_keys("depth", "hidden_size", "num_heads", "intermediate_size"),
        (*_QWEN_PATCHES, *windows, _CHANNELS),
        _QWEN,
        {**_PIXELS, "has_patch_bias": False},
        _qwen_names(qkv, "mlp.gate_proj mlp.up_proj", "mlp.down_proj"),
        defaults={
            **_QWEN2_SIZES,
            "intermediate_size": 3420,
            "window_size": 112,
            "out_hidden_size": 3584,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "tokens_per_second": 4,
        },
        allowed={"hidden_act": ("silu",)},
        read_more=_read_qwen2_5_vl,
        write_more=_write_qwen2_5_vl,
    )


QWEN2_5_VL, OMNI_VISION = _qwen2_5_vl("attn.qkv"), _qwen2_5_vl("attn.q attn.k attn.v")
_QWEN3_PATCHES = Tensor("bias", "patch_embed.proj.bias"), Tensor("positions", "pos_embed.weight")
_QWEN3_ACTIVATIONS = {theirs: ACTIVATIONS[theirs] for theirs in ("gelu_pytorch_tanh", "gelu")}


def _read_qwen3_vl(config: Config, where: str) -> dict[str, Any]:
    _check_positions(config, where)
    num_positions = config["num_position_embeddings"]
    if not isinstance(num_positions, int) or num_positions < 1 or math.isqrt(num_positions) ** 2 != num_positions:
        raise ModelError(f"{where}num_position_embeddings is {num_positions!r}, expected those of a square; take another model")
    image: dict[str, Any] = {"position_grid": math.isqrt(num_positions)}
    image["deepstack_layers"] = list(config["deepstack_visual_indexes"])
    image["video"] = {"has_timestamps": True, "min_pixels": 128 * 32 * 32, "max_pixels": 768 * 32 * 32}
    return {"activation": _QWEN3_ACTIVATIONS[config["hidden_act"]], "image": image}


def _write_qwen3_vl(unit: Unit) -> dict[str, Any]:
    image, activations = image_of(unit), {ours: theirs for theirs, ours in _QWEN3_ACTIVATIONS.items()}
    return {
        "hidden_act": activations.get(unit.transformer.activation),
        "num_position_embeddings": (image.position_grid or 0) ** 2,
        "deepstack_visual_indexes": list(image.deepstack_layers),
    }


QWEN3_VL = EncoderForm(
    shape_keys("depth", "hidden_size", "num_heads", "intermediate_size"),
    (*_QWEN_PATCHES, _CHANNELS),
    {"normalization": "LayerNorm", **_QWEN},
    {"mean": [0.5], "std": [0.5], "min_pixels": 65536, "max_pixels": 16777216},
    _qwen_names("attn.qkv", "mlp.linear_fc1", "mlp.linear_fc2", *_QWEN3_PATCHES),
    defaults={
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "in_channels": 3,
        "patch_size": 16,
        "out_hidden_size": 3584,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
        "hidden_act": "gelu_pytorch_tanh",
        **_QWEN_SIZES,
    },
    allowed={"hidden_act": tuple(_QWEN3_ACTIVATIONS)},
    read_more=_read_qwen3_vl,
    write_more=_write_qwen3_vl,
)

# Whisper's encoder: two convolutions, a ViT's layers, and an average of tokens

_MAX_POSITIONS = 1500
_AVERAGED = {"merge_factor": 2, "merge": "averaged"}
_WHISPER_ALLOWED: Mapping[str, tuple[Any, ...]] = {
    "activation_function": ("gelu",),
    "scale_embedding": (False,),
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "encoder_layerdrop"), NO_DROPOUT),
}
WHISPER = EncoderForm(
    shape_keys("encoder_layers", "d_model", "encoder_attention_heads", "encoder_ffn_dim"),
    (Key("num_mel_bins", "num_mel_bins"),),
    {**VIT, "layernorm_epsilon": 1e-5, "has_linear_projector": True, "projector_norm": "merged"},
    {},
    UnitNames(
        first=(Weight("conv1", ("conv1",)), Weight("conv2", ("conv2",)), Tensor("positions", "embed_positions.weight")),
        body=layer_names(
            "self_attn_layer_norm final_layer_norm",
            "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
            "self_attn.out_proj",
            "fc1",
            "fc2",
            merge=grouped_qkv_without_key_bias,
        ),
        last=(Weight("norm", ("layer_norm",)),),
        prefix="layers.{}.",
    ),
    kind="audio",
    defaults={
        "num_mel_bins": 128,
        "encoder_layers": 32,
        "encoder_attention_heads": 20,
        "encoder_ffn_dim": 5120,
        "d_model": 1280,
        "max_source_positions": _MAX_POSITIONS,
        "initializer_range": 0.02,
        "activation_function": "gelu",
    },
    allowed=_WHISPER_ALLOWED,
    read_more=lambda config, where: {"audio": {**_AVERAGED, "max_tokens": config["max_source_positions"]}},
    write_more=lambda unit: {"max_source_positions": (unit.audio and unit.audio.num_positions) or _MAX_POSITIONS},
    written={key: values[0] for key, values in _WHISPER_ALLOWED.items()},
)
