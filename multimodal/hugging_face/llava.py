"""LLaVA-1.5: a CLIP or SigLIP vision tower, a projector of two layers, and a Llama, Qwen2 or Qwen3."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from multimodal.hugging_face.architecture import VIT_KEYS, Architecture, Config, Key, read_keys, require, write_keys
from multimodal.hugging_face.processors import write_image_processor
from multimodal.hugging_face.text_models import decoder_names, read_text_unit, write_inner_text
from multimodal.hugging_face.weight_names import Tensor, UnitNames, Weight, grouped_qkv
from multimodal.values.errors import ModelError
from multimodal.values.model_graph import ModelGraph, Unit


class Tower(NamedTuple):
    """The facts in which vision towers differ."""

    defaults: Mapping[str, Any]
    """Values of keys that a vision_config lacks, as transformers has them."""
    image: Mapping[str, Any]
    """How its images are treated, and embedded."""
    has_class_token: bool
    has_last_norm: bool
    """True if what transformers calls the output of the last layer has gone through a norm."""


_SHAPE = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12, "num_channels": 3}
TOWERS = {
    "clip_vision_model": Tower(
        {**_SHAPE, "image_size": 224, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
        {
            "fit": "crop",
            "mean": [0.48145466, 0.4578275, 0.40821073],
            "std": [0.26862954, 0.26130258, 0.27577711],
            "has_patch_bias": False,
            "has_pre_norm": True,
        },
        has_class_token=True,
        has_last_norm=False,
    ),
    "siglip_vision_model": Tower(
        {**_SHAPE, "image_size": 224, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
        {"fit": "stretch"},
        has_class_token=False,
        has_last_norm=True,
    ),
}
_ACTIVATIONS = {"quick_gelu": "quick_gelu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
_IMAGE_KEYS = (Key("image_size", "image_size"), Key("patch_size", "patch_size"), Key("num_channels", "in_channels"))
_COMPUTED = {"projector_hidden_act": ("gelu",), "multimodal_projector_bias": (True,)}
_NORMS, _PRODUCTS = ("layer_norm1", "layer_norm2"), tuple(f"self_attn.{part}_proj" for part in ("q", "k", "v", "out"))

TOWER = UnitNames(
    first=(
        Tensor("weight", "vision_tower.embeddings.patch_embedding.weight"),
        Tensor("bias", "vision_tower.embeddings.patch_embedding.bias"),
        Tensor("class_token", "vision_tower.embeddings.class_embedding"),
        Tensor("positions", "vision_tower.embeddings.position_embedding.weight"),
        Weight("norm", ("vision_tower.pre_layrnorm",)),
    ),
    body=(
        Weight("input_layernorm", ("layer_norm1",)),
        Weight("pre_mlp_layernorm", ("layer_norm2",)),
        Weight("self_attention.linear_qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), grouped_qkv),
        Weight("self_attention.linear_proj", ("self_attn.out_proj",)),
        Weight("mlp.linear_fc1", ("mlp.fc1",)),
        Weight("mlp.linear_fc2", ("mlp.fc2",)),
    ),
    last=(
        Weight("mlp.linear_fc1", ("multi_modal_projector.linear_1",)),
        Weight("mlp.linear_fc2", ("multi_modal_projector.linear_2",)),
    ),
    prefix="vision_tower.encoder.layers.{}.",
)
_INSIDE = (
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head.", "lm_head."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
)
SPELLINGS = (
    (),
    (("vision_tower.", "vision_tower.vision_model."),),
    (*_INSIDE, ("vision_tower.", "model.vision_tower.")),
    (*_INSIDE, ("vision_tower.", "model.vision_tower.vision_model.")),
)
"""As transformers 5 saves, as 4 did, and what both call them inside."""


def read_llava(config: Config) -> dict[str, Any]:
    """Return the plain form of the model graph; raises ModelError for what cannot be computed here."""
    require(config, _COMPUTED)
    text = {"model_type": "llama", **(config.get("text_config") or {})}
    if config.get("tie_word_embeddings") is not None:
        text["tie_word_embeddings"] = config["tie_word_embeddings"]
    llm = read_text_unit(text, where="text_config: ")
    return {"units": {"vision": _read_tower(config, llm["hidden_size"]), "llm": llm}}


def _read_tower(config: Config, text_size: int) -> dict[str, Any]:
    given = config.get("vision_config") or {}
    tower = TOWERS.get(given.get("model_type", ""))
    if tower is None:
        raise ModelError(f"vision_config: model_type is {given.get('model_type')!r}, expected one of {', '.join(TOWERS)}")
    vision = {**tower.defaults, **{key: value for key, value in given.items() if value is not None}}
    require(vision, {"hidden_act": tuple(_ACTIVATIONS), "attention_dropout": (0, 0.0, None)}, where="vision_config: ")
    num_layers = _num_layers_used(config, tower, vision["num_hidden_layers"])
    return {
        "role": "encoder",
        **read_keys(VIT_KEYS, vision),
        "num_layers": num_layers,
        "normalization": "LayerNorm",
        "activation": _ACTIVATIONS[vision["hidden_act"]],
        "add_bias_linear": True,
        "has_rotary_positions": False,
        "image": {"merge_size": 1, **read_keys(_IMAGE_KEYS, vision), **tower.image, "class_token": _class_token(config, tower)},
        "projector_hidden_size": text_size,
        "projector_norm": "none",
    }


def _num_layers_used(config: Config, tower: Tower, num_layers: int) -> int:
    layer = config.get("vision_feature_layer", -2)
    used = layer + num_layers + 1 if isinstance(layer, int) and layer < 0 else layer
    most = num_layers - 1 if tower.has_last_norm else num_layers
    if not isinstance(used, int) or not 1 <= used <= most:
        raise ModelError(
            f"vision_feature_layer is {layer!r}, and only the output of one of the first {most} of {num_layers} layers can "
            "be taken here; take a model of that kind"
        )
    return used


def _class_token(config: Config, tower: Tower) -> str | None:
    strategy = config.get("vision_feature_select_strategy", "default")
    allowed = ("default", "full") if tower.has_class_token else ("full",)
    require({"vision_feature_select_strategy": strategy}, {"vision_feature_select_strategy": allowed})
    if not tower.has_class_token:
        return None
    return "dropped" if strategy == "default" else "kept"


def write_llava(graph: ModelGraph) -> dict[str, Any]:
    """Return a config.json of towers all of whose layers are used, but for a last one that has a norm behind it."""
    (vision,), image = graph.encoders, graph.encoders[0].image
    assert image is not None
    name, tower = _tower_of(vision)
    text = write_inner_text(graph.backbone)
    activations = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "text_config": text,
        "vision_config": {
            **tower.defaults,
            **write_keys((*VIT_KEYS, *_IMAGE_KEYS), vision),
            "model_type": name,
            "num_hidden_layers": vision.transformer.num_layers + tower.has_last_norm,
            "hidden_act": activations.get(vision.transformer.activation),
            "vision_use_head": False,
        },
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": True,
        "image_seq_length": image.num_output_tokens((image.grid_size,) * 2) if image.image_size else None,
        "vision_feature_layer": -1 - tower.has_last_norm,
        "vision_feature_select_strategy": "default" if image.class_token == "dropped" else "full",
        "tie_word_embeddings": graph.backbone.ties_embeddings,
    }


def _tower_of(vision: Unit) -> tuple[str, Tower]:
    name = "clip_vision_model" if vision.image is not None and vision.image.has_pre_norm else "siglip_vision_model"
    return name, TOWERS[name]


def llava_shapes(graph: ModelGraph) -> dict[str, tuple[int, ...]]:
    """Return those of the patches, and of what follows the layer whose output is taken."""
    vision = graph.encoders[0]
    _, tower = _tower_of(vision)
    size, inner = vision.transformer.hidden_size, vision.transformer.ffn_hidden_size
    unused: dict[str, tuple[int, ...]] = {"post_layernorm": (size,)}
    if tower.has_last_norm:
        layer = dict.fromkeys(_NORMS, (size,)) | dict.fromkeys(_PRODUCTS, (size, size))
        layer |= {"mlp.fc1": (inner, size), "mlp.fc2": (size, inner)}
        unused |= {f"encoder.layers.{vision.transformer.num_layers}.{name}": shape for name, shape in layer.items()}
    shapes = {f"vision_tower.{key}.weight": shape for key, shape in unused.items()}
    shapes |= {f"vision_tower.{key}.bias": shape[:1] for key, shape in unused.items()}
    return {**shapes, "vision_tower.embeddings.patch_embedding.weight": patch_shape(vision)}


def patch_shape(vision: Unit) -> tuple[int, ...]:
    """Return the shape of what embeds patches: of pixels, or of pixels in frames."""
    image = vision.image
    assert image is not None
    frames = (image.num_frames,) if image.num_frames > 1 else ()
    return (vision.transformer.hidden_size, image.in_channels, *frames, image.patch_size, image.patch_size)


_LAYER = re.compile(r"vision_tower\.(?:vision_model\.)?encoder\.layers\.(\d+)\.")
_UNUSED = re.compile(r"vision_tower\.(?:vision_model\.)?(?:post_layernorm|head|embeddings\.position_ids)\b|rotary_emb\.inv_freq$")


def is_unused(key: str, graph: ModelGraph) -> bool:
    """True for layers behind the one whose output is taken, and for what follows the last one."""
    layer = _LAYER.search(key)
    num_layers = graph.encoders[0].transformer.num_layers
    return int(layer[1]) >= num_layers if layer else _UNUSED.search(key) is not None


LLAVA = Architecture(
    "LlavaForConditionalGeneration",
    "llava",
    read_llava,
    write_llava,
    (TOWER, decoder_names("language_model.")),
    is_unused=is_unused,
    spellings=SPELLINGS,
    module_spelling=SPELLINGS[2],
    tied_copies=(("language_model.lm_head.weight", "language_model.model.embed_tokens.weight"),),
    to_processor=write_image_processor,
    shapes=llava_shapes,
    placeholders={"image": "image_token_index"},
)
