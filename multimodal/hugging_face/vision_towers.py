"""Vision towers with learned positions: CLIP, SigLIP, and DINOv2 with registers or without."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from multimodal.hugging_face.architecture import VIT_KEYS, Config, Encoder, Key, read_keys, require, with_defaults, write_keys
from multimodal.hugging_face.dinov2 import (
    DINOV2_COMPUTED,
    DINOV2_DEFAULTS,
    DINOV2_IMAGE,
    DINOV2_NAMES,
    read_dinov2_ffn,
    write_dinov2_ffn,
)
from multimodal.hugging_face.weight_names import Tensor, UnitNames, Weight, grouped_qkv
from multimodal.values.errors import ModelError
from multimodal.values.model_graph import Unit


class Tower(NamedTuple):
    """The facts in which vision towers differ."""

    model_type: str
    classes: Mapping[str, str | None]
    """Classes whose folders contain such a tower -> the key of config.json that describes it; None: all of config.json."""
    defaults: Mapping[str, Any]
    """Values of keys that a vision_config lacks, as in transformers."""
    image: Mapping[str, Any]
    """Fields of the unit that say how images are processed and embedded."""
    names: UnitNames
    """Names of its weights inside the tower; last: the norm before its last_hidden_state, if any."""
    has_class_token: bool
    has_last_norm: bool
    """True if the output of the last layer has passed a norm in some versions of transformers, unless one more layer follows."""
    is_scaled: bool = False
    """True if its layers scale their branches, and its positions are interpolated to images of another size."""
    computed: Mapping[str, tuple[Any, ...]] = {}
    """Supported values of keys, in addition to those of all towers."""
    read_ffn: Callable[[Config], dict[str, Any]] = lambda config: {}
    """From a vision_config that lacks the MLP's width to the fields of the unit that give it."""
    write_ffn: Callable[[Unit], dict[str, Any]] = lambda unit: {}
    """The inverse of `read_ffn`."""


def _clip_names(last: tuple[Weight, ...]) -> UnitNames:
    return UnitNames(
        first=(
            Tensor("weight", "embeddings.patch_embedding.weight"),
            Tensor("bias", "embeddings.patch_embedding.bias"),
            Tensor("class_token", "embeddings.class_embedding"),
            Tensor("positions", "embeddings.position_embedding.weight"),
            Weight("norm", ("pre_layrnorm",)),
        ),
        body=(
            Weight("input_layernorm", ("layer_norm1",)),
            Weight("pre_mlp_layernorm", ("layer_norm2",)),
            Weight("self_attention.linear_qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), grouped_qkv),
            Weight("self_attention.linear_proj", ("self_attn.out_proj",)),
            Weight("mlp.linear_fc1", ("mlp.fc1",)),
            Weight("mlp.linear_fc2", ("mlp.fc2",)),
        ),
        last=last,
        prefix="encoder.layers.{}.",
    )


_SHAPE = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12, "num_channels": 3}


def _dinov2(model_type: str, name: str, **more: Any) -> Tower:
    return Tower(
        model_type,
        {name: None},
        {**DINOV2_DEFAULTS, **more},
        DINOV2_IMAGE,
        DINOV2_NAMES,
        has_class_token=True,
        has_last_norm=False,
        is_scaled=True,
        computed=DINOV2_COMPUTED,
        read_ffn=read_dinov2_ffn,
        write_ffn=write_dinov2_ffn,
    )


TOWERS = {
    tower.model_type: tower
    for tower in (
        Tower(
            "clip_vision_model",
            {"CLIPModel": "vision_config", "CLIPVisionModel": None, "CLIPVisionModelWithProjection": None},
            {**_SHAPE, "image_size": 224, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
            {
                "fit": "crop",
                "mean": [0.48145466, 0.4578275, 0.40821073],
                "std": [0.26862954, 0.26130258, 0.27577711],
                "has_patch_bias": False,
                "has_pre_norm": True,
            },
            _clip_names(()),
            has_class_token=True,
            has_last_norm=False,
        ),
        Tower(
            "siglip_vision_model",
            {"SiglipModel": "vision_config", "SiglipVisionModel": None},
            {**_SHAPE, "image_size": 224, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
            {"fit": "stretch"},
            _clip_names((Weight("norm", ("post_layernorm",)),)),
            has_class_token=False,
            has_last_norm=True,
        ),
        _dinov2("dinov2", "Dinov2Model"),
        _dinov2("dinov2_with_registers", "Dinov2WithRegistersModel", patch_size=16, num_register_tokens=4),
    )
}
"""Towers by their model_type in config.json."""
_ACTIVATIONS = {"quick_gelu": "quick_gelu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
_IMAGE_KEYS = (Key("image_size", "image_size"), Key("patch_size", "patch_size"), Key("num_channels", "in_channels"))
_REGISTERS = Key("num_register_tokens", "num_registers")


def read_tower(given: Config, *, class_token: str | None, where: str = "") -> dict[str, Any]:
    """Return the plain form of an encoder with all layers of a tower, without its projector.

    class_token: `Image.class_token`, for towers that have one. Raises ModelError for unsupported values.
    """
    tower = tower_named(given.get("model_type"), where=where)
    vision = with_defaults(given, tower.defaults)
    computed = {"hidden_act": tuple(_ACTIVATIONS), "attention_dropout": (0, 0.0, None), **tower.computed}
    require(vision, computed, where=where)
    image = {**read_keys((*_IMAGE_KEYS, _REGISTERS), vision), **tower.image}
    image["class_token"] = class_token if tower.has_class_token else None
    return {
        "role": "encoder",
        **read_keys(VIT_KEYS, vision),
        "normalization": "LayerNorm",
        "activation": _ACTIVATIONS[vision["hidden_act"]],
        "add_bias_linear": True,
        "has_rotary_positions": False,
        "has_layer_scale": tower.is_scaled,
        "image": {"merge_size": 1, **image},
        **tower.read_ffn(vision),
    }


def tower_named(model_type: Any, *, where: str = "") -> Tower:
    """Return the tower with this model_type; raises ModelError."""
    tower = TOWERS.get(model_type if isinstance(model_type, str) else "")
    if tower is None:
        raise ModelError(f"{where}model_type is {model_type!r}, expected one of {', '.join(TOWERS)}")
    return tower


def write_tower(vision: Unit) -> dict[str, Any]:
    """Return the configuration of the tower that an encoder corresponds to, all of whose layers are used."""
    tower, image = tower_of(vision), vision.image
    assert image is not None
    activations = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
    sizes = write_keys((*VIT_KEYS, *_IMAGE_KEYS), vision)
    if image.position_grid is not None:
        sizes["image_size"] = image.position_grid * image.patch_size
    activation = "gelu" if vision.transformer.is_gated else activations.get(vision.transformer.activation)
    written = {**tower.defaults, **sizes, "model_type": tower.model_type, "hidden_act": activation, **tower.write_ffn(vision)}
    return written if "intermediate_size" in tower.defaults else {k: v for k, v in written.items() if k != "intermediate_size"}


def tower_of(vision: Unit) -> Tower:
    """Return the tower that an encoder may be; reading back its config.json shows if it is."""
    image = vision.image
    if image is not None and image.has_pre_norm:
        return TOWERS["clip_vision_model"]
    if not vision.transformer.has_layer_scale:
        return TOWERS["siglip_vision_model"]
    return TOWERS["dinov2_with_registers" if image is not None and image.num_registers else "dinov2"]


def names_inside(tower: Tower, prefix: str, *, last: tuple[Weight, ...] | None = None) -> UnitNames:
    """Return the names of a tower inside another model, all of which begin with `prefix`; last: of the projector's weights."""
    first = (
        each._replace(theirs=prefix + each.theirs)
        if isinstance(each, Tensor)
        else each._replace(theirs=tuple(prefix + name for name in each.theirs))
        for each in tower.names.first
    )
    return UnitNames(tuple(first), tower.names.body, tower.names.last if last is None else last, prefix + tower.names.prefix)


_LAYER = re.compile(r"(?:encoder|transformer)\.layers?\.(\d+)\.")
_UNUSED = re.compile(r"(?:post_layernorm|layernorm|head|embeddings\.(?:position_ids|mask_token))\b")
_TEXT = ("text_model.", "text_projection.", "visual_projection.", "logit_scale", "logit_bias")


def is_unused_in_tower(key: str, unit: Unit) -> bool:
    """True for tensors behind the used layer, and for tokens of pretraining; key: the name inside the tower."""
    key = key.removeprefix("vision_model.")
    layer = _LAYER.match(key)
    return int(layer[1]) >= unit.transformer.num_layers if layer else _UNUSED.match(key) is not None


def _encoder(name: str, key: str | None, tower: Tower) -> Encoder:
    """Return the family of encoders of a class: a tower all of whose layers are used, with its last_hidden_state as output."""

    def to_unit(config: Config) -> dict[str, Any]:
        given = {"model_type": tower.model_type, **(config if key is None else config.get(key) or {})}
        where = "" if key is None else f"{key}: "
        norm = "patches" if tower.names.last else "none"
        return {**read_tower(given, class_token="dropped", where=where), "projector_norm": norm}

    def is_unused(name: str, unit: Unit) -> bool:
        return name.startswith(_TEXT) or is_unused_in_tower(name, unit)

    return Encoder(name, to_unit, tower.names, is_unused, spellings=((), (("", "vision_model."),)))


VISION_ENCODERS = tuple(_encoder(name, key, tower) for tower in TOWERS.values() for name, key in tower.classes.items())
