"""Qwen3-VL: a vision encoder with learned and rotary positions, some layers of which feed the LLM's first ones, and a Qwen3."""

import math
from typing import Any

from multimodal.hugging_face.architecture import Config, Key, read_keys, with_defaults, write_keys
from multimodal.hugging_face.qwen2_5_vl import (
    PATCH_KEYS,
    SPELLINGS,
    VISION_KEYS,
    check_native_vision,
    placed_architecture,
    read_placed_text,
)
from multimodal.hugging_face.weight_names import Tensor, UnitNames, Weight, fused_qkv
from multimodal.values.errors import ModelError
from multimodal.values.model_graph import Unit

_TEXT_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000.0,
}
_VISION_DEFAULTS = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "initializer_range": 0.02,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
    "hidden_act": "gelu_pytorch_tanh",
}
_IMAGE_KEYS = (*PATCH_KEYS, Key("in_channels", "in_channels"))
_PIXELS = {"mean": [0.5], "std": [0.5], "min_pixels": 65536, "max_pixels": 16777216}
"""Values of the published image processors."""
_SECTIONS = (24, 20, 20)
_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}


def _merger_names(ours: str, theirs: str) -> tuple[Weight, ...]:
    return (
        Weight(f"{ours}norm", (f"{theirs}norm",)),
        Weight(f"{ours}mlp.linear_fc1", (f"{theirs}linear_fc1",)),
        Weight(f"{ours}mlp.linear_fc2", (f"{theirs}linear_fc2",)),
    )


VISION = UnitNames(
    first=(
        Tensor("weight", "visual.patch_embed.proj.weight"),
        Tensor("bias", "visual.patch_embed.proj.bias"),
        Tensor("positions", "visual.pos_embed.weight"),
    ),
    body=(
        Weight("input_layernorm", ("norm1",)),
        Weight("pre_mlp_layernorm", ("norm2",)),
        Weight("self_attention.linear_qkv", ("attn.qkv",), fused_qkv),
        Weight("self_attention.linear_proj", ("attn.proj",)),
        Weight("mlp.linear_fc1", ("mlp.linear_fc1",)),
        Weight("mlp.linear_fc2", ("mlp.linear_fc2",)),
    ),
    last=(
        *_merger_names("", "visual.merger."),
        *_merger_names("deepstack.{}.", "visual.deepstack_merger_list.{}."),
    ),
    prefix="visual.blocks.{}.",
)


def _read_qwen3_vl(config: Config) -> dict[str, Any]:
    llm = read_placed_text({"tie_word_embeddings": False, **config}, defaults=_TEXT_DEFAULTS, family="qwen3", sections=_SECTIONS)
    vision = _read_vision(config.get("vision_config") or {}, llm["hidden_size"])
    return {"units": {"vision": vision, "llm": {**llm, "has_interleaved_sections": True}}}


def _read_vision(given: Config, text_size: int) -> dict[str, Any]:
    vision = with_defaults(given, _VISION_DEFAULTS)
    check_native_vision(vision, tuple(_ACTIVATIONS), text_size)
    num_positions = vision["num_position_embeddings"]
    if not isinstance(num_positions, int) or num_positions < 1 or math.isqrt(num_positions) ** 2 != num_positions:
        raise ModelError(
            f"vision_config: num_position_embeddings is {num_positions!r}, expected those of a square; take a model with one"
        )
    return {
        "role": "encoder",
        **read_keys(VISION_KEYS, vision),
        "normalization": "LayerNorm",
        "activation": _ACTIVATIONS[vision["hidden_act"]],
        "add_bias_linear": True,
        "layernorm_epsilon": 1e-6,
        "image": {
            **_PIXELS,
            **read_keys(_IMAGE_KEYS, vision),
            "position_grid": math.isqrt(num_positions),
            "deepstack_layers": list(vision["deepstack_visual_indexes"]),
        },
    }


def _write_vision(vision: Unit, llm: Unit) -> dict[str, Any]:
    image, activations = vision.image, {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
    assert image is not None
    return {
        **write_keys((*VISION_KEYS, *_IMAGE_KEYS), vision),
        "hidden_act": activations.get(vision.transformer.activation),
        "num_position_embeddings": (image.position_grid or 0) ** 2,
        "deepstack_visual_indexes": list(image.deepstack_layers),
        "out_hidden_size": llm.transformer.hidden_size,
    }


QWEN3_VL = placed_architecture(
    "Qwen3VLForConditionalGeneration",
    "qwen3_vl",
    _read_qwen3_vl,
    _write_vision,
    VISION,
    written_spelling=SPELLINGS[1],
)
