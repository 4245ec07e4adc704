"""DINOv2 as a vision tower: the names of its weights, and the MLP of its config.json."""

from collections.abc import Mapping
from typing import Any

from multimodal.hugging_face.architecture import Config
from multimodal.hugging_face.weight_names import Rows, Tensor, UnitNames, Weight, grouped_qkv
from multimodal.values.errors import ModelError
from multimodal.values.model_graph import Unit


def _mlp_or_swiglu(ours: str) -> Weight:
    """Return the names of a matrix of an MLP that may have a gate; gate and up are one tensor in the file, too."""
    theirs = {"mlp.linear_fc1": ("mlp.fc1", "mlp.weights_in"), "mlp.linear_fc2": ("mlp.fc2", "mlp.weights_out")}[ours]
    return Weight(ours, theirs, lambda unit, keys, count: iter([Rows(keys[unit.transformer.is_gated], 0, 0, count)]))


_QUERIES_KEYS_VALUES = tuple(f"attention.attention.{part}" for part in ("query", "key", "value"))
DINOV2_NAMES = UnitNames(
    first=(
        Tensor("weight", "embeddings.patch_embeddings.projection.weight"),
        Tensor("bias", "embeddings.patch_embeddings.projection.bias"),
        Tensor("class_token", "embeddings.cls_token"),
        Tensor("registers", "embeddings.register_tokens"),
        Tensor("positions", "embeddings.position_embeddings"),
    ),
    body=(
        Weight("input_layernorm", ("norm1",)),
        Weight("pre_mlp_layernorm", ("norm2",)),
        Weight("self_attention.linear_qkv", _QUERIES_KEYS_VALUES, grouped_qkv),
        Weight("self_attention.linear_proj", ("attention.output.dense",)),
        Tensor("self_attn_bda.scale", "layer_scale1.lambda1"),
        Tensor("mlp_bda.scale", "layer_scale2.lambda1"),
        *map(_mlp_or_swiglu, ("mlp.linear_fc1", "mlp.linear_fc2")),
    ),
    last=(Weight("norm", ("layernorm",)),),
    prefix="encoder.layer.{}.",
)
DINOV2_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 14,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "mlp_ratio": 4,
    "use_swiglu_ffn": False,
    "qkv_bias": True,
}
DINOV2_IMAGE: Mapping[str, Any] = {"fit": "crop", "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
DINOV2_COMPUTED: Mapping[str, tuple[Any, ...]] = {
    "qkv_bias": (True,),
    "hidden_act": ("gelu",),
    **dict.fromkeys(("drop_path_rate", "hidden_dropout_prob", "attention_probs_dropout_prob"), (0, 0.0, None)),
}


def _dinov2_width(hidden_size: int, mlp_ratio: float, *, is_gated: bool) -> int:
    """Return the inner width of DINOv2's MLP; with a gate it is two thirds of that, rounded to a multiple of 8."""
    width = int(hidden_size * mlp_ratio)
    return (int(width * 2 / 3) + 7) // 8 * 8 if is_gated else width


def read_dinov2_ffn(config: Config) -> dict[str, Any]:
    """Return the width of the MLP, and whether it has a gate; raises ModelError."""
    for key in ("hidden_size", "mlp_ratio"):
        if not isinstance(config[key], int | float):
            raise ModelError(f"{key} is {config[key]!r}, expected a number; correct it")
    is_gated = bool(config["use_swiglu_ffn"])
    width = _dinov2_width(config["hidden_size"], config["mlp_ratio"], is_gated=is_gated)
    return {"ffn_hidden_size": width, **({"activation": "swiglu"} if is_gated else {})}


def write_dinov2_ffn(unit: Unit) -> dict[str, Any]:
    """Return config.json's entries for the MLP and registers; reading them back shows if they describe the unit."""
    shape = unit.transformer
    is_gated = shape.is_gated
    widths = {_dinov2_width(shape.hidden_size, ratio, is_gated=is_gated): ratio for ratio in range(16, 0, -1)}
    found: dict[str, Any] = {"mlp_ratio": widths.get(shape.ffn_hidden_size, 4), "use_swiglu_ffn": is_gated}
    if unit.image is not None and unit.image.num_registers:
        return {**found, "num_register_tokens": unit.image.num_registers}
    return found
