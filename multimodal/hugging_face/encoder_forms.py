"""Encoders of images of one size: CLIP, SigLIP, DINOv2, Pixtral and InternViT, each as one description to read and to write."""

from collections.abc import Mapping
from typing import Any

from multimodal.hugging_face.architecture import Config, EncoderForm, Key, image_of, require
from multimodal.hugging_face.weight_names import Names, Rows, Tensor, UnitNames, Weight, layer_names
from multimodal.values.errors import ModelError
from multimodal.values.model_graph import Unit

ACTIVATIONS = {"quick_gelu": "quick_gelu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Their names of activations -> ours."""
NO_DROPOUT = (0, 0.0, None)
_LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16, "num_channels": 3}
_LAYERS = {"num_hidden_layers": 12, "num_attention_heads": 12, "num_channels": 3}
OF_CLIP: Mapping[str, Any] = {"mean": [0.48145466, 0.4578275, 0.40821073], "std": [0.26862954, 0.26130258, 0.27577711]}
OF_IMAGENET: Mapping[str, Any] = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
VIT = {"normalization": "LayerNorm", "activation": "gelu", "add_bias_linear": True, "has_rotary_positions": False}
_INIT = Key("initializer_range", "init_method_std")
_PATCHES = Key("patch_size", "patch_size"), Key("num_channels", "in_channels")


def shape_keys(layers: str, size: str, heads: str, *widths: str) -> tuple[Key, ...]:
    """Return the keys of a transformer's shape; widths: that of the MLP's width, if any, and that of the norms' epsilon."""
    ours = "num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "layernorm_epsilon"
    return (*map(Key, (layers, size, heads, *widths), ours), _INIT)


_VIT_KEYS = shape_keys("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "layer_norm_eps")


# Towers with learned positions: CLIP, SigLIP, DINOv2 with registers or without
def _clip_names(last: Names) -> UnitNames:
    qkv = "self_attn.q_proj self_attn.k_proj self_attn.v_proj"
    return UnitNames(
        first=(
            Tensor("weight", "embeddings.patch_embedding.weight"),
            Tensor("bias", "embeddings.patch_embedding.bias"),
            Tensor("class_token", "embeddings.class_embedding"),
            Tensor("positions", "embeddings.position_embedding.weight"),
            Weight("norm", ("pre_layrnorm",)),
        ),
        body=layer_names("layer_norm1 layer_norm2", qkv, "self_attn.out_proj", "mlp.fc1", "mlp.fc2"),
        last=last,
        prefix="encoder.layers.{}.",
    )


def _read_tower(config: Config, where: str) -> dict[str, Any]:
    registers = config.get("num_register_tokens")
    image = {} if registers is None else {"num_registers": registers}
    return {"image": image, "activation": ACTIVATIONS[config["hidden_act"]]}


def _write_tower(unit: Unit) -> dict[str, Any]:
    """Return the size of images that has a position for every patch, and the activation."""
    image = image_of(unit)
    size = image.image_size if image.position_grid is None else image.position_grid * image.patch_size
    names = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
    return {"image_size": size, "hidden_act": "gelu" if unit.transformer.is_gated else names.get(unit.transformer.activation)}


def _tower(names: UnitNames, item: Mapping[str, Any], **defaults: Any) -> EncoderForm:
    defaults = {"hidden_size": 768, "intermediate_size": 3072, **_LAYERS, "image_size": 224, **defaults}
    return EncoderForm(
        _VIT_KEYS,
        (Key("image_size", "image_size"), *_PATCHES),
        {**VIT, "has_layer_scale": False},
        item,
        names,
        defaults=defaults,
        allowed={"hidden_act": tuple(ACTIVATIONS), "attention_dropout": NO_DROPOUT},
        read_more=_read_tower,
        write_more=_write_tower,
        written=defaults,
    )


CLIP = _tower(
    _clip_names(()),
    {"fit": "crop", **OF_CLIP, "has_patch_bias": False, "has_pre_norm": True, "class_token": "dropped"},
    patch_size=32,
    hidden_act="quick_gelu",
    layer_norm_eps=1e-5,
)
SIGLIP = _tower(
    _clip_names((Weight("norm", ("post_layernorm",)),)),
    {"fit": "stretch", "class_token": None},
    patch_size=16,
    hidden_act="gelu_pytorch_tanh",
    layer_norm_eps=1e-6,
)

_DINOV2_NAMES = UnitNames(
    first=(
        Tensor("weight", "embeddings.patch_embeddings.projection.weight"),
        Tensor("bias", "embeddings.patch_embeddings.projection.bias"),
        Tensor("class_token", "embeddings.cls_token"),
        Tensor("registers", "embeddings.register_tokens"),
        Tensor("positions", "embeddings.position_embeddings"),
    ),
    body=layer_names(
        "norm1 norm2",
        "attention.attention.query attention.attention.key attention.attention.value",
        "attention.output.dense",
        "mlp.fc1 mlp.weights_in",
        "mlp.fc2 mlp.weights_out",
        Tensor("self_attn_bda.scale", "layer_scale1.lambda1"),
        Tensor("mlp_bda.scale", "layer_scale2.lambda1"),
        mlp=lambda unit, keys, count: iter([Rows(keys[unit.transformer.is_gated], 0, 0, count)]),  # gate and up are one tensor
    ),
    last=(Weight("norm", ("layernorm",)),),
    prefix="encoder.layer.{}.",
)


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


def _dinov2(**more: Any) -> EncoderForm:
    kinds = {"hidden_act": "gelu", "layer_norm_eps": 1e-6, "mlp_ratio": 4, "use_swiglu_ffn": False, "qkv_bias": True}
    defaults = {"hidden_size": 768, **_LAYERS, "image_size": 224, "patch_size": 14, **kinds, **more}
    no_dropout = ("attention_dropout", "drop_path_rate", "hidden_dropout_prob", "attention_probs_dropout_prob")
    return EncoderForm(
        tuple(key for key in _VIT_KEYS if key.theirs != "intermediate_size"),
        (Key("image_size", "image_size"), *_PATCHES),
        {**VIT, "has_layer_scale": True},
        {"fit": "crop", **OF_IMAGENET, "class_token": "dropped"},
        _DINOV2_NAMES,
        defaults=defaults,
        allowed={"hidden_act": ("gelu",), "qkv_bias": (True,), **dict.fromkeys(no_dropout, NO_DROPOUT)},
        read_more=_read_dinov2,
        write_more=_write_dinov2,
        written=defaults,
    )


# Pixtral's tower: images keep their size; a token of the text stands behind each row of patches
def _read_pixtral(config: Config, where: str) -> dict[str, Any]:
    require(config, {"head_dim": (config["hidden_size"] // config["num_attention_heads"], None)}, where=where)
    rotary = config.get("rope_parameters") or {}
    require(rotary, {"rope_type": ("axial", "default")}, where=f"{where}rope_parameters: ")
    return {"rotary_base": float(rotary.get("rope_theta") or config.get("rope_theta") or 10000.0)}


_PIXTRAL = EncoderForm(
    tuple(key for key in _VIT_KEYS if key.theirs != "layer_norm_eps"),
    (*_PATCHES, Key("image_size", "longest_side")),
    {"layernorm_epsilon": 1e-5, "has_staggered_axes": True},
    {"merge_size": 1, "has_row_ends": True, "has_patch_bias": False, "has_pre_norm": True, **OF_CLIP},
    UnitNames(
        first=(Tensor("weight", "patch_conv.weight"), Weight("norm", ("ln_pre",))),
        body=layer_names(
            "attention_norm ffn_norm",
            "attention.q_proj attention.k_proj attention.v_proj",
            "attention.o_proj",
            "feed_forward.gate_proj feed_forward.up_proj",
            "feed_forward.down_proj",
        ),
        last=(),
        prefix="transformer.layers.{}.",
    ),
    defaults={**_LARGE, "image_size": 1024, "patch_size": 16, "hidden_act": "gelu", "initializer_range": 0.02},
    allowed={"hidden_act": ("silu",), "attention_dropout": NO_DROPOUT},
    read_more=_read_pixtral,
    write_more=lambda unit: {
        "model_type": "pixtral",
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "axial", "rope_theta": unit.transformer.rotary_base},
    },
)
PIXTRAL = "pixtral"
TOWERS: Mapping[str, EncoderForm] = {
    "clip_vision_model": CLIP,
    "siglip_vision_model": SIGLIP,
    "dinov2": _dinov2(),
    "dinov2_with_registers": _dinov2(patch_size=16, num_register_tokens=4),
    PIXTRAL: _PIXTRAL,
}
"""Vision towers by their model_type in config.json."""

# InternVL3's tower

_INTERNVIT_ALLOWED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("attention_dropout", "hidden_dropout_prob", "projection_dropout"), NO_DROPOUT),
    "hidden_act": ("gelu",),
    "use_absolute_position_embeddings": (True,),
    "use_mask_token": (False,),
    "use_mean_pooling": (True,),
}
_NORMS = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}
_HEADS_EPSILON = 1e-6
"""Epsilon of norms of queries and keys, whatever that of the others is."""


def _read_internvit(config: Config, where: str) -> dict[str, Any]:
    if spans_heads := bool(config["use_qk_norm"]):  # transformers' own norm
        needed = {"norm_type": ("rms_norm",), "layer_norm_eps": (_HEADS_EPSILON,)}
        require(config, needed, where=f"{where}use_qk_norm, but ")
    sides = {key: _side(config, key, where) for key in ("image_size", "patch_size")}
    return {
        "normalization": _NORMS[config["norm_type"]],
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
        "norm_type": next(name for name, kind in _NORMS.items() if kind == shape.normalization),
        "attention_bias": shape.biases["linear_qkv"],
        "use_qk_norm": shape.qk_norm_spans_heads,
        "image_size": [(image.position_grid or (image.image_size or 0) // image.patch_size) * image.patch_size] * 2,
        "patch_size": [image.patch_size, image.patch_size],
        "num_channels": image.in_channels,
    }


INTERNVIT = EncoderForm(
    _VIT_KEYS,
    (),
    {"activation": "gelu", "add_proj_bias": True, "add_mlp_bias": True, "has_rotary_positions": False, "has_layer_scale": True},
    {"merge_size": 2, "class_token": "dropped", **OF_IMAGENET, "fit": "stretch"},
    UnitNames(
        first=tuple(each for each in _DINOV2_NAMES.first if each.ours != "registers"),
        body=layer_names(
            "layernorm_before layernorm_after",
            "attention.q_proj attention.k_proj attention.v_proj",
            "attention.projection_layer",
            "mlp.fc1",
            "mlp.fc2",
            Weight("self_attention.q_layernorm", ("attention.q_norm",)),
            Weight("self_attention.k_layernorm", ("attention.k_norm",)),
            Tensor("self_attn_bda.scale", "lambda_1"),
            Tensor("mlp_bda.scale", "lambda_2"),
        ),
        last=(),
        prefix="encoder.layer.{}.",
    ),
    defaults={
        **_LARGE,
        "layer_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "image_size": [448, 448],
        "patch_size": [14, 14],
        "attention_bias": False,
        "norm_type": "layer_norm",
        "use_qk_norm": False,
    },
    allowed={**_INTERNVIT_ALLOWED, "norm_type": tuple(_NORMS)},
    read_more=_read_internvit,
    write_more=_write_internvit,
    written={key: values[0] for key, values in _INTERNVIT_ALLOWED.items()},
)
