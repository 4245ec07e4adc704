"""The vision tower of Pixtral, a LLaVA whose images keep their size: rows of patches, each with a token of the text behind it."""

from typing import Any

from multimodal.hugging_face.architecture import Config, Key, read_keys, require, with_defaults, write_keys
from multimodal.hugging_face.weight_names import Tensor, UnitNames, Weight, grouped_qkv, stacked
from multimodal.values.model_graph import Unit

_DEFAULTS = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 1024,
    "patch_size": 16,
    "hidden_act": "gelu",
    "initializer_range": 0.02,
}
_COMPUTED: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu",), "attention_dropout": (0, 0.0, None)}
_KEYS = (
    Key("num_hidden_layers", "num_layers"),
    Key("hidden_size", "hidden_size"),
    Key("num_attention_heads", "num_attention_heads"),
    Key("intermediate_size", "ffn_hidden_size"),
    Key("initializer_range", "init_method_std"),
)
_IMAGE_KEYS = (Key("patch_size", "patch_size"), Key("num_channels", "in_channels"), Key("image_size", "longest_side"))
_IMAGE = {
    "merge_size": 1,
    "has_row_ends": True,
    "has_patch_bias": False,
    "has_pre_norm": True,
    "mean": [0.48145466, 0.4578275, 0.40821073],
    "std": [0.26862954, 0.26130258, 0.27577711],
}
PIXTRAL = "pixtral"
"""The model_type of the tower."""


def pixtral_names(prefix: str, last: tuple[Weight, ...]) -> UnitNames:
    """Return the names of the tower's weights, all of which begin with `prefix`; last: of the projector's."""
    return UnitNames(
        first=(Tensor("weight", f"{prefix}patch_conv.weight"), Weight("norm", (f"{prefix}ln_pre",))),
        body=(
            Weight("input_layernorm", ("attention_norm",)),
            Weight("pre_mlp_layernorm", ("ffn_norm",)),
            Weight("self_attention.linear_qkv", ("attention.q_proj", "attention.k_proj", "attention.v_proj"), grouped_qkv),
            Weight("self_attention.linear_proj", ("attention.o_proj",)),
            Weight("mlp.linear_fc1", ("feed_forward.gate_proj", "feed_forward.up_proj"), stacked),
            Weight("mlp.linear_fc2", ("feed_forward.down_proj",)),
        ),
        last=last,
        prefix=prefix + "transformer.layers.{}.",
    )


def is_pixtral(vision: Unit) -> bool:
    """Return True if an encoder may be this tower; reading back its config.json shows if it is."""
    return vision.image is not None and vision.image.has_row_ends


def read_pixtral(given: Config, *, where: str) -> dict[str, Any]:
    """Return the plain form of the encoder without its projector; raises ModelError for unsupported values."""
    vision = with_defaults(given, _DEFAULTS)
    head_channels = vision["hidden_size"] // vision["num_attention_heads"]
    require(vision, {**_COMPUTED, "head_dim": (head_channels, None)}, where=where)
    rotary = vision.get("rope_parameters") or {}
    require(rotary, {"rope_type": ("axial", "default")}, where=f"{where}rope_parameters: ")
    return {
        "role": "encoder",
        **read_keys(_KEYS, vision),
        "layernorm_epsilon": 1e-5,
        "rotary_base": float(rotary.get("rope_theta") or vision.get("rope_theta") or 10000.0),
        "has_staggered_axes": True,
        "image": {**read_keys(_IMAGE_KEYS, vision), **_IMAGE},
    }


def write_pixtral(vision: Unit) -> dict[str, Any]:
    """Return the configuration of the tower that an encoder corresponds to."""
    rotary = {"rope_type": "axial", "rope_theta": vision.transformer.rotary_base}
    return {**write_keys((*_KEYS, *_IMAGE_KEYS), vision), "model_type": PIXTRAL, "hidden_act": "silu", "rope_parameters": rotary}
