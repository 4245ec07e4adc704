"""InternVL3: an InternViT, four patches of which become a token, and a Qwen2, Qwen3 or Llama."""

from functools import partial
from typing import Any

from multimodal.hugging_face.architecture import VIT_KEYS, Architecture, Config, read_keys, require, with_defaults, write_keys
from multimodal.hugging_face.llava import SPELLINGS, patch_shape
from multimodal.hugging_face.processors import write_image_processor
from multimodal.hugging_face.text_families import decoder_names
from multimodal.hugging_face.text_models import read_inner_text, write_inner_text
from multimodal.hugging_face.weight_names import Tensor, UnitNames, Weight, grouped_qkv
from multimodal.values.errors import ModelError
from multimodal.values.model_graph import ModelGraph

_DEFAULTS = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "layer_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "num_channels": 3,
    "image_size": [448, 448],
    "patch_size": [14, 14],
    "attention_bias": False,
    "norm_type": "layer_norm",
    "use_qk_norm": False,
}
_COMPUTED = {
    "attention_dropout": (0, 0.0, None),
    "hidden_dropout_prob": (0, 0.0, None),
    "projection_dropout": (0, 0.0, None),
    "hidden_act": ("gelu",),
    "use_absolute_position_embeddings": (True,),
    "use_mask_token": (False,),
    "use_mean_pooling": (True,),
}
_COMPUTED_OUTSIDE = {
    "downsample_ratio": (0.5,),
    "projector_hidden_act": ("gelu",),
    "vision_feature_layer": (-1,),
    "vision_feature_select_strategy": ("default",),
}
_PIXELS = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225], "fit": "stretch"}
"""Values of the published image processors."""
_PROJECTOR_EPSILON = 1e-5
_HEADS_EPSILON = 1e-6
"""Epsilon of norms of queries and keys, whatever that of the others is."""
_NORMS = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}

VISION = UnitNames(
    first=(
        Tensor("weight", "vision_tower.embeddings.patch_embeddings.projection.weight"),
        Tensor("bias", "vision_tower.embeddings.patch_embeddings.projection.bias"),
        Tensor("class_token", "vision_tower.embeddings.cls_token"),
        Tensor("positions", "vision_tower.embeddings.position_embeddings"),
    ),
    body=(
        Weight("input_layernorm", ("layernorm_before",)),
        Weight("pre_mlp_layernorm", ("layernorm_after",)),
        Weight("self_attention.linear_qkv", ("attention.q_proj", "attention.k_proj", "attention.v_proj"), grouped_qkv),
        Weight("self_attention.q_layernorm", ("attention.q_norm",)),
        Weight("self_attention.k_layernorm", ("attention.k_norm",)),
        Weight("self_attention.linear_proj", ("attention.projection_layer",)),
        Weight("mlp.linear_fc1", ("mlp.fc1",)),
        Weight("mlp.linear_fc2", ("mlp.fc2",)),
        Tensor("self_attn_bda.scale", "lambda_1"),
        Tensor("mlp_bda.scale", "lambda_2"),
    ),
    last=(
        Weight("norm", ("multi_modal_projector.layer_norm",)),
        Weight("mlp.linear_fc1", ("multi_modal_projector.linear_1",)),
        Weight("mlp.linear_fc2", ("multi_modal_projector.linear_2",)),
    ),
    prefix="vision_tower.encoder.layer.{}.",
)


def _read_internvl(config: Config) -> dict[str, Any]:
    require(config, _COMPUTED_OUTSIDE)
    llm = read_inner_text(config, model_type="qwen2")
    return {"units": {"vision": _read_vision(config.get("vision_config") or {}, llm["hidden_size"]), "llm": llm}}


def _read_vision(given: Config, text_size: int) -> dict[str, Any]:
    vision = with_defaults(given, _DEFAULTS)
    require(vision, {**_COMPUTED, "norm_type": tuple(_NORMS)}, where="vision_config: ")
    spans_heads = bool(vision["use_qk_norm"])
    if spans_heads:  # transformers' own norm
        require(
            vision, {"norm_type": ("rms_norm",), "layer_norm_eps": (_HEADS_EPSILON,)}, where="vision_config: use_qk_norm, but "
        )
    return {
        "role": "encoder",
        **read_keys(VIT_KEYS, vision),
        "normalization": _NORMS[vision["norm_type"]],
        "activation": "gelu",
        "add_qkv_bias": bool(vision["attention_bias"]),
        "add_proj_bias": True,
        "add_mlp_bias": True,
        "qk_layernorm": spans_heads,
        "qk_norm_spans_heads": spans_heads,
        "has_rotary_positions": False,
        "has_layer_scale": True,
        "image": {
            "image_size": _side(vision, "image_size"),
            "patch_size": _side(vision, "patch_size"),
            "merge_size": 2,
            "in_channels": vision["num_channels"],
            "class_token": "dropped",
            **_PIXELS,
        },
        "projector_hidden_size": text_size,
        "projector_norm": "merged",
        "projector_normalization": "LayerNorm",
        "projector_norm_epsilon": _PROJECTOR_EPSILON,
    }


def _write_internvl(graph: ModelGraph) -> dict[str, Any]:
    (vision,), image = graph.encoders, graph.encoders[0].image
    assert image is not None
    return {
        "architectures": ["InternVLForConditionalGeneration"],
        "model_type": "internvl",
        "text_config": write_inner_text(graph.backbone),
        "vision_config": {
            **{key: values[0] for key, values in _COMPUTED.items()},
            **write_keys(VIT_KEYS, vision),
            "norm_type": next((name for name, kind in _NORMS.items() if kind == vision.transformer.normalization)),
            "attention_bias": vision.transformer.biases["linear_qkv"],
            "use_qk_norm": vision.transformer.qk_norm_spans_heads,
            "image_size": [(image.position_grid or (image.image_size or 0) // image.patch_size) * image.patch_size] * 2,
            "patch_size": [image.patch_size, image.patch_size],
            "num_channels": image.in_channels,
            "model_type": "internvl_vision",
        },
        **{key: values[0] for key, values in _COMPUTED_OUTSIDE.items()},
        "image_seq_length": image.num_output_tokens((image.grid_size,) * 2) if image.image_size else None,
        "tie_word_embeddings": graph.backbone.ties_embeddings,
    }


def _internvl_shapes(graph: ModelGraph) -> dict[str, tuple[int, ...]]:
    """Return the shapes of patch embedding, class token and positions."""
    (vision,) = graph.encoders
    assert vision.image is not None
    size, place = vision.transformer.hidden_size, "vision_tower.embeddings."
    return {
        f"{place}patch_embeddings.projection.weight": patch_shape(vision),
        f"{place}cls_token": (1, 1, size),
        f"{place}position_embeddings": (1, vision.image.num_positions, size),
    }


def _side(vision: Config, key: str) -> Any:
    """Return a length that is given once, or for height and width."""
    value = vision[key]
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise ModelError(f"vision_config: {key} is {value}, and only squares can be trained here; take a model with one size")
    return value[0]


INTERNVL = Architecture(
    "InternVLForConditionalGeneration",
    _read_internvl,
    _write_internvl,
    (VISION, decoder_names("language_model.")),
    spellings=SPELLINGS,
    module_spelling=SPELLINGS[2],
    tied_copies=(("language_model.lm_head.weight", "language_model.model.embed_tokens.weight"),),
    to_processor=partial(write_image_processor, kind="GotOcr2ImageProcessor"),
    shapes=_internvl_shapes,
    placeholders={"image": "image_token_id"},
)
