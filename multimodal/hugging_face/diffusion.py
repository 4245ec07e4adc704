"""Families of diffusers' transformers whose layers a generator can have: Stable Diffusion 3 and DiT."""

from typing import Any

from multimodal.hugging_face.architecture import Config, Encoder, require
from multimodal.hugging_face.families import FAMILIES
from multimodal.hugging_face.weight_names import names_in
from multimodal.values.errors import ModelError

_ALLOWED: dict[str, tuple[Any, ...]] = {"qk_norm": (None, "rms_norm"), "dual_attention_layers": ([], ())}


def _unit(config: Config, epsilon: float, **flow: Any) -> dict[str, Any]:
    width = config["num_attention_heads"] * config["attention_head_dim"]
    if config.get("caption_projection_dim", width) != width:
        raise ModelError(f"caption_projection_dim is {config['caption_projection_dim']}, expected the {width} of all heads")
    return {
        "role": "generator",
        "num_layers": config["num_layers"],
        "hidden_size": width,
        "num_attention_heads": config["num_attention_heads"],
        "ffn_hidden_size": 4 * width,
        "normalization": "LayerNorm",
        "activation": "gelu_tanh",
        "add_bias_linear": True,
        "has_rotary_positions": False,
        "layernorm_epsilon": epsilon,
        "qk_layernorm": config.get("qk_norm") is not None,
        "flow": flow,
        "weights": ".",
        "image": {"patch_size": config["patch_size"], "in_channels": config["in_channels"], "merge_size": 1},
    }


def _sd3(config: Config) -> dict[str, Any]:
    require(config, _ALLOWED)
    return _unit(config, 1e-6, form="sd3", has_joint_attention=True, condition_tokens=8)


def _dit(config: Config) -> dict[str, Any]:
    allowed = {"norm_elementwise_affine": (False,), "attention_bias": (True,), "activation_fn": ("gelu-approximate",)}
    require(config, {**allowed, "dropout": (0, 0.0), "upcast_attention": (False,)})
    flow = {"form": "dit", "prediction": "epsilon", "beta_start": 0.0001, "beta_end": 0.02, "beta_schedule": "linear"}
    return _unit(config, config.get("norm_eps", 1e-5), **flow)


_NAMES = {name: names_in(row) for name, row in FAMILIES["denoisers"].items()}
_SD3, _DIT = "SD3Transformer2DModel", "DiTTransformer2DModel"
DENOISERS: dict[str, Encoder] = {
    _SD3: Encoder(_SD3, _sd3, _NAMES[_SD3], lambda key, unit: key == "pos_embed.pos_embed"),
    _DIT: Encoder(_DIT, _dit, _NAMES[_DIT], lambda key, unit: False),
}
"""Families by their name in `_class_name` of config.json."""
