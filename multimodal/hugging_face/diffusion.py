"""Families of diffusers' transformers whose layers a generator can have: Stable Diffusion 3 and DiT."""

from collections.abc import Iterator, Sequence
from typing import Any

from multimodal.hugging_face.architecture import Config, Encoder, require
from multimodal.hugging_face.weight_names import Names, Rows, UnitNames, Weight, grouped_qkv
from multimodal.values.errors import ModelError
from multimodal.values.model_graph import Unit

_PREFIX = "transformer_blocks.{}."
_TIMES = "timestep_embedder.linear_1", "timestep_embedder.linear_2"
_ALLOWED: dict[str, tuple[Any, ...]] = {"qk_norm": (None, "rms_norm"), "dual_attention_layers": ([], ())}


def _modulation(unit: Unit, keys: Sequence[str], num_rows: int) -> Iterator[Rows]:
    """Shift, scale and gate of two branches, for patches and conditions; conditions of the last layer have scale and shift."""
    size = unit.transformer.hidden_size
    is_last = keys[0].split(".")[1] == str(unit.transformer.num_layers - 1)
    for number, key in enumerate(keys):
        if number and is_last:
            yield Rows(key, size, 6 * size, size)
            yield Rows(key, 0, 7 * size, size)
        else:
            yield Rows(key, 0, 6 * size * number, 6 * size)


def _products(attention: str, *, output: str, added: str = "", endings: Sequence[str] = ("q", "k", "v")) -> Names:
    names = tuple(f"{attention}.{each}" for each in endings)
    ours, mlp = f".{added}" if added else "", "ff_context" if added else "ff"
    return (
        Weight(f"self_attention.linear_qkv{ours}", names, grouped_qkv),
        Weight(f"self_attention.linear_proj{ours}", (f"{attention}.{output}",)),
        Weight(f"mlp.linear_fc1{ours}", (f"{mlp}.net.0.proj",)),
        Weight(f"mlp.linear_fc2{ours}", (f"{mlp}.net.2",)),
    )


_OWN = "to_q", "to_k", "to_v"
_SD3 = UnitNames(
    first=(
        Weight("embedding.pos_embed.proj", ("pos_embed.proj",)),
        Weight("embedding.context_embedder", ("context_embedder",)),
        *(
            Weight(f"embedding.time_text_embed.{each}", (f"time_text_embed.{each}",))
            for each in (*_TIMES, "text_embedder.linear_1", "text_embedder.linear_2")
        ),
    ),
    body=(
        *_products("attn", output="to_out.0", endings=_OWN),
        *_products("attn", output="to_add_out", added="conditions", endings=("add_q_proj", "add_k_proj", "add_v_proj")),
        Weight("modulation", ("norm1.linear", "norm1_context.linear"), _modulation),
        *(Weight(f"self_attention.{each}_layernorm", (f"attn.norm_{each}",)) for each in "qk"),
        *(Weight(f"self_attention.{each}_layernorm.conditions", (f"attn.norm_added_{each}",)) for each in "qk"),
    ),
    last=(Weight("modulation", ("norm_out.linear",)), Weight("out", ("proj_out",))),
    prefix=_PREFIX,
)
_LABELS = *_TIMES, "class_embedder.embedding_table"
_DIT = UnitNames(
    first=(
        Weight("embedding.pos_embed.proj", ("pos_embed.proj",)),
        *(Weight(f"embedding.emb.{each}", (f"transformer_blocks.0.norm1.emb.{each}",)) for each in _LABELS),
    ),
    body=(
        *_products("attn1", output="to_out.0", endings=_OWN),
        Weight("modulation", ("norm1.linear",), _modulation),
        *(Weight(f"modulation.emb.{each}", (f"norm1.emb.{each}",)) for each in _LABELS),
    ),
    last=(Weight("modulation", ("proj_out_1",)), Weight("out", ("proj_out_2",))),
    prefix=_PREFIX,
)


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


DENOISERS: dict[str, Encoder] = {
    each.name: each
    for each in (
        Encoder("SD3Transformer2DModel", _sd3, _SD3, lambda key, unit: key == "pos_embed.pos_embed"),
        Encoder("DiTTransformer2DModel", _dit, _DIT, lambda key, unit: False),
    )
}
"""Families by their name in `_class_name` of config.json."""
