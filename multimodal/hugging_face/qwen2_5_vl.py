"""Qwen2.5-VL: a vision encoder at native resolution with windows, a merger, and a Qwen2 whose positions have rows and columns."""

from collections.abc import Callable, Sequence
from typing import Any

from multimodal.hugging_face.architecture import Architecture, Config, Key, read_keys, require, with_defaults, write_keys
from multimodal.hugging_face.llava import patch_shape
from multimodal.hugging_face.processors import write_image_processor
from multimodal.hugging_face.rotary_positions import rotary_entries
from multimodal.hugging_face.text_families import decoder_names
from multimodal.hugging_face.text_models import read_text_unit, write_placed_text
from multimodal.hugging_face.weight_names import Tensor, UnitNames, Weight, fused_qkv, stacked
from multimodal.values.errors import ModelError
from multimodal.values.model_graph import ModelGraph, Unit

TEXT_DEFAULTS = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "max_window_layers": 80,
}
_VISION_DEFAULTS = {
    "depth": 32,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "num_heads": 16,
    "initializer_range": 0.02,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
VISION_KEYS = (
    Key("depth", "num_layers"),
    Key("hidden_size", "hidden_size"),
    Key("num_heads", "num_attention_heads"),
    Key("intermediate_size", "ffn_hidden_size"),
    Key("initializer_range", "init_method_std"),
)
PATCH_KEYS = (
    Key("patch_size", "patch_size"),
    Key("spatial_merge_size", "merge_size"),
    Key("temporal_patch_size", "num_frames"),
)
_IMAGE_KEYS = (*PATCH_KEYS, Key("window_size", "window_size"), Key("fullatt_block_indexes", "full_attention_layers"))
PIXELS = {
    "mean": [0.48145466, 0.4578275, 0.40821073],
    "std": [0.26862954, 0.26130258, 0.27577711],
    "min_pixels": 3136,
    "max_pixels": 12845056,
}
"""Values of the published image processors."""
_SECTIONS = (16, 24, 24)


_GATED = (
    Weight("mlp.linear_fc1", ("mlp.gate_proj", "mlp.up_proj"), stacked),
    Weight("mlp.linear_fc2", ("mlp.down_proj",)),
)


def vision_names(qkv: Weight, *, mlp: tuple[Weight, ...] = _GATED) -> UnitNames:
    """Return the names of the encoder's weights; qkv: those of queries, keys and values."""
    return UnitNames(
        first=(Tensor("weight", "visual.patch_embed.proj.weight"),),
        body=(
            Weight("input_layernorm", ("norm1",)),
            Weight("pre_mlp_layernorm", ("norm2",)),
            qkv,
            Weight("self_attention.linear_proj", ("attn.proj",)),
            *mlp,
        ),
        last=(
            Weight("norm", ("visual.merger.ln_q",)),
            Weight("mlp.linear_fc1", ("visual.merger.mlp.0",)),
            Weight("mlp.linear_fc2", ("visual.merger.mlp.2",)),
        ),
        prefix="visual.blocks.{}.",
    )


SPELLINGS = ((), (("visual.", "model.visual."), ("model.", "model.language_model.")))
"""The spelling that transformers saves, and the one of its modules."""

_IMAGE_TOKENS = {"image": "image_token_id", "vision_start": "vision_start_token_id", "vision_end": "vision_end_token_id"}
"""The tokenizer's name of a token -> the key of config.json."""


def _read_qwen2_5_vl(config: Config) -> dict[str, Any]:
    llm = read_placed_text(config, defaults=TEXT_DEFAULTS)
    return {"units": {"vision": read_native_vision(config.get("vision_config") or {}, llm["hidden_size"]), "llm": llm}}


def read_placed_text(
    config: Config, *, defaults: Config, family: str = "qwen2", sections: Sequence[int] = _SECTIONS
) -> dict[str, Any]:
    """Return an LLM whose tokens have a time, rows and columns.

    Its configuration is beside the encoder's or, in earlier versions, around it. defaults: values of missing keys; family: the
    model_type of the text model; sections: used if the configuration has none.
    """
    given = config.get("text_config") or config
    text = {**with_defaults(given, defaults), "model_type": family}
    if config.get("tie_word_embeddings") is not None:
        text["tie_word_embeddings"] = config["tie_word_embeddings"]
    if family != "qwen2":
        require(text, {"use_sliding_window": (False, None)}, where="the LLM's ")
    rotary = rotary_entries(text, where="the LLM's ")
    text.pop("rope_scaling", None)
    kinds = {rotary.pop("rope_type", "default"), rotary.pop("type", "default")} - {"mrope"}
    unit = read_text_unit({**text, "rope_parameters": {**rotary, "rope_type": max(kinds, default="default")}}, where="the LLM's ")
    return {**unit, "rotary_sections": list(rotary.get("mrope_section", sections))}


def read_native_vision(given: Config, text_size: int) -> dict[str, Any]:
    """Return the encoder; text_size: the hidden size of the LLM."""
    vision = with_defaults(given, _VISION_DEFAULTS)
    check_native_vision(vision, ("silu",), text_size)
    channels = vision.get("in_channels", vision.get("in_chans", 3))
    return {
        "role": "encoder",
        **read_keys(VISION_KEYS, vision),
        "add_bias_linear": True,
        "layernorm_epsilon": 1e-6,
        "image": {**PIXELS, **read_keys(_IMAGE_KEYS, vision), "in_channels": channels, "has_patch_bias": False},
    }


def write_native_vision(vision: Unit, llm: Unit) -> dict[str, Any]:
    """Return the configuration of the encoder."""
    channels = {"in_channels": vision.image.in_channels} if vision.image is not None else {}
    written = {**write_keys((*VISION_KEYS, *_IMAGE_KEYS), vision), **channels, "hidden_act": "silu"}
    return {**written, "out_hidden_size": llm.transformer.hidden_size}


def patch_shapes(graph: ModelGraph) -> dict[str, tuple[int, ...]]:
    """Return the shape of the patch embedding: a convolution over frames, even if there is one frame."""
    vision = next(unit for unit in graph.encoders if unit.image is not None)
    size, channels, *sides = patch_shape(vision)
    return {"visual.patch_embed.proj.weight": (size, channels, *([1] if len(sides) == 2 else []), *sides)}


def check_native_vision(vision: Config, activations: tuple[str, ...], text_size: int) -> None:
    """Raise ModelError for an encoder whose activation, rotary positions or output size cannot be trained here."""
    require(vision, {"hidden_act": activations}, where="vision_config: ")
    rotary = vision.get("rope_parameters") or {}
    require(rotary, {"rope_type": ("axial", "default"), "rope_theta": (10000, 10000.0)}, where="vision_config: ")
    check_output_size(vision["out_hidden_size"], text_size)


def check_output_size(found: int, text_size: int, *, key: str = "out_hidden_size") -> None:
    """Raise ModelError if an encoder's output size is not the LLM's."""
    if found != text_size:
        raise ModelError(f"vision_config: {key} is {found}, but the LLM's hidden_size {text_size}; correct one of them")


def placed_architecture(
    name: str,
    model_type: str,
    read: Callable[[Config], dict[str, Any]],
    write_vision: Callable[[Unit, Unit], dict[str, Any]],
    vision: UnitNames,
    **differences: Any,
) -> Architecture:
    """Return the architecture of an encoder before an LLM whose tokens have rows and columns.

    write_vision: from both units to a vision_config; vision: names of the encoder's weights.
    """

    def write(graph: ModelGraph) -> dict[str, Any]:
        return {
            "architectures": [name],
            "model_type": model_type,
            "text_config": write_placed_text(graph.backbone, f"{model_type}_text"),
            "vision_config": {**write_vision(graph.encoders[0], graph.backbone), "model_type": model_type},
            "tie_word_embeddings": graph.backbone.ties_embeddings,
        }

    return Architecture(
        name,
        read,
        write,
        (vision, decoder_names()),
        spellings=SPELLINGS,
        module_spelling=SPELLINGS[1],
        to_processor=write_image_processor,
        shapes=patch_shapes,
        placeholders=_IMAGE_TOKENS,
        **differences,
    )


QWEN2_5_VL = placed_architecture(
    "Qwen2_5_VLForConditionalGeneration",
    "qwen2_5_vl",
    _read_qwen2_5_vl,
    write_native_vision,
    vision_names(Weight("self_attention.linear_qkv", ("attn.qkv",), fused_qkv)),
)
