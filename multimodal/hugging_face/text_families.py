"""The families of text models, one row for the differences of each, and the names of their weights."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from multimodal.hugging_face.architecture import Config, Key
from multimodal.hugging_face.weight_names import Names, UnitNames, Weight, layer_names, same, stacked, vocabulary

_QKV, _MLP = "self_attn.q_proj self_attn.k_proj self_attn.v_proj", ("mlp.gate_proj mlp.up_proj", "mlp.down_proj")
_HEAD_NORMS = (
    Weight("self_attention.q_layernorm", ("self_attn.q_norm",)),
    Weight("self_attention.k_layernorm", ("self_attn.k_norm",)),
)
_NORMS = "input_layernorm post_attention_layernorm"
DECODER_LAYER = layer_names(_NORMS, _QKV, "self_attn.o_proj", *_MLP, *_HEAD_NORMS)
_PHI3_LAYER = layer_names(_NORMS, "self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
_INTERNLM2_LAYER = layer_names(
    "attention_norm ffn_norm",
    "attention.wqkv",
    "attention.wo",
    "feed_forward.w1 feed_forward.w3",
    "feed_forward.w2",
    merge=same,  # by groups of heads, as here
)
_GEMMA_LAYER = layer_names(
    "input_layernorm pre_feedforward_layernorm",
    _QKV,
    "self_attn.o_proj",
    *_MLP,
    *_HEAD_NORMS,
    Weight("self_attn_bda.norm", ("post_attention_layernorm",)),
    Weight("mlp_bda.norm", ("post_feedforward_layernorm",)),
)


def _expert_names(block: str, gate: str, up: str, down: str) -> tuple[Weight, ...]:
    """Return the names of the weights of a router and its experts."""
    return (
        Weight("mlp.router", (f"{block}.gate",)),
        Weight("mlp.experts.{}.linear_fc1", (f"{block}.experts.{{}}.{gate}", f"{block}.experts.{{}}.{up}"), stacked),
        Weight("mlp.experts.{}.linear_fc2", (f"{block}.experts.{{}}.{down}",)),
    )


class ExpertKeys(NamedTuple):
    """The keys of a family's config.json that describe experts, and the names of their weights."""

    keys: tuple[Key, ...]
    names: tuple[Weight, ...]
    always_among_chosen: bool
    """True if the weights of chosen experts add up to 1 in every model; else norm_topk_prob says so."""


MIXTRAL = ExpertKeys(
    (Key("num_local_experts", "num_experts", 8), Key("num_experts_per_tok", "router_topk", 2)),
    _expert_names("block_sparse_moe", "w1", "w3", "w2"),
    always_among_chosen=True,
)
_QWEN3_MOE = ExpertKeys(
    (
        Key("num_experts", "num_experts", 128),
        Key("num_experts_per_tok", "router_topk", 8),
        Key("moe_intermediate_size", "ffn_hidden_size", 768),
    ),
    _expert_names("mlp", "gate_proj", "up_proj", "down_proj"),
    always_among_chosen=False,
)


def decoder_names(
    prefix: str = "", *, layer: Names = DECODER_LAYER, embedding: str = "model.embed_tokens", head: str = "lm_head"
) -> UnitNames:
    """Return the names of an LLM's weights, all of which begin with `prefix`; layer: those inside a layer."""
    return UnitNames(
        first=(Weight("word_embeddings", (f"{prefix}{embedding}",), vocabulary),),
        body=layer,
        last=(Weight("norm", (f"{prefix}model.norm",)), Weight("output_layer", (f"{prefix}{head}",), vocabulary)),
        prefix=prefix + "model.layers.{}.",
    )


class TextFamily(NamedTuple):
    """The facts in which families of text models differ."""

    name: str
    model_type: str
    defaults: Mapping[str, Any]
    """Values of keys that a config.json lacks, as in transformers."""
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    bias_keys: tuple[str, ...] = ()
    """The keys that give attention a bias, and the MLP, as far as the family has them."""
    experts: ExpertKeys | None = None
    """For families whose layers have experts."""
    global_layers: Callable[[Config], Iterable[int]] | None = None
    """For families with sliding_window: from a config.json that does not list its layers to those that it does not bound."""
    names: UnitNames = decoder_names()
    """Names of its weights."""
    keys: tuple[Key, ...] = ()
    """Keys of config.json that it alone has; null in a config.json means none."""
    constants: Mapping[str, Any] = MappingProxyType({"hidden_act": "silu"})
    """Entries of config.json that are the same in all its models."""
    fields: Mapping[str, Any] = MappingProxyType({})
    """Fields of a unit that are."""
    local_base_key: str | None = None
    """The key of the rotary base of layers with windows, for families that have two."""


def _without_global_layers(config: Config) -> Iterable[int]:
    return ()


def _lower_layers(config: Config) -> Iterable[int]:
    return range(min(config["max_window_layers"], config["num_hidden_layers"]))


def _every_sixth_layer(config: Config) -> Iterable[int]:
    pattern = config.get("sliding_window_pattern") or 6
    return range(pattern - 1, config["num_hidden_layers"], pattern)


_GEMMA_SIZES = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}
_GEMMA: Mapping[str, Any] = {
    "names": decoder_names(layer=_GEMMA_LAYER),
    "bias_keys": ("attention_bias",),
    "keys": (
        Key("query_pre_attn_scalar", "query_scalar"),
        Key("attn_logit_softcapping", "attention_softcap"),
        Key("final_logit_softcapping", "logit_softcap"),
    ),
    "constants": {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"},
    "fields": {
        "activation": "geglu_tanh",
        **dict.fromkeys(("layernorm_zero_centered_gamma", "has_post_norms", "scales_embeddings"), True),
    },
}
_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
BIASES = ("attention_bias", "mlp_bias")
TEXT_FAMILIES = {
    family.model_type: family
    for family in (
        TextFamily("LlamaForCausalLM", "llama", {"vocab_size": 32000, "intermediate_size": 11008}, bias_keys=BIASES),
        TextFamily(
            "Qwen2ForCausalLM",
            "qwen2",
            {"vocab_size": 151936, "num_key_value_heads": 32, **_QWEN_WINDOW},
            add_qkv_bias=True,
            global_layers=_lower_layers,
        ),
        TextFamily(
            "Qwen3ForCausalLM",
            "qwen3",
            {"vocab_size": 151936, "num_key_value_heads": 32, "head_dim": 128, **_QWEN_WINDOW},
            qk_layernorm=True,
            bias_keys=BIASES[:1],
            global_layers=_lower_layers,
        ),
        TextFamily(
            "MixtralForCausalLM",
            "mixtral",
            {"vocab_size": 32000, "intermediate_size": 14336, "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
            experts=MIXTRAL,
            global_layers=_without_global_layers,
            names=decoder_names(layer=(*DECODER_LAYER, *MIXTRAL.names)),
        ),
        TextFamily(
            "Qwen3MoeForCausalLM",
            "qwen3_moe",
            {
                "vocab_size": 151936,
                "hidden_size": 2048,
                "intermediate_size": 6144,
                "num_hidden_layers": 24,
                "num_key_value_heads": 4,
                **_QWEN_WINDOW,
            },
            qk_layernorm=True,
            bias_keys=BIASES[:1],
            experts=_QWEN3_MOE,
            global_layers=_without_global_layers,
            names=decoder_names(layer=(*DECODER_LAYER, *_QWEN3_MOE.names)),
        ),
        TextFamily(
            "MistralForCausalLM",
            "mistral",
            {"vocab_size": 32000, "intermediate_size": 14336, "num_key_value_heads": 8, "sliding_window": 4096},
            global_layers=_without_global_layers,
        ),
        TextFamily(
            "Phi3ForCausalLM",
            "phi3",
            {
                "vocab_size": 32064,
                "hidden_size": 3072,
                "intermediate_size": 8192,
                "rms_norm_eps": 1e-5,
                "max_position_embeddings": 4096,
                "original_max_position_embeddings": 4096,
            },
            global_layers=_without_global_layers,
            names=decoder_names(layer=_PHI3_LAYER),
        ),
        TextFamily(
            "Gemma2ForCausalLM",
            "gemma2",
            {**_GEMMA_SIZES, "vocab_size": 256000, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
            global_layers=lambda config: range(1, config["num_hidden_layers"], 2),
            **_GEMMA,
        ),
        TextFamily(
            "Gemma3ForCausalLM",
            "gemma3_text",
            {**_GEMMA_SIZES, "vocab_size": 262208, "rope_theta": 1e6, "rope_local_base_freq": 10000.0},
            qk_layernorm=True,
            global_layers=_every_sixth_layer,
            local_base_key="rope_local_base_freq",
            **_GEMMA,
        ),
        TextFamily(
            "InternLM2ForCausalLM",
            "internlm2",
            {"vocab_size": 103168, "intermediate_size": 11008, "bias": True, "max_position_embeddings": 2048},
            bias_keys=("bias",),
            names=decoder_names(layer=_INTERNLM2_LAYER, embedding="model.tok_embeddings", head="output"),
        ),
    )
}
