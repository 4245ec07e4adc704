"""Text models of one shape, RMSNorm, SwiGLU, rotary positions, grouped queries; one row for the differences of each family."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from multimodal.hugging_face.architecture import Architecture, Config, Key, read_keys, require, with_defaults, write_keys
from multimodal.hugging_face.rotary_positions import read_rotary, write_rotary
from multimodal.hugging_face.weight_names import UnitNames, Weight, fused_qkv, grouped_qkv, stacked, vocabulary
from multimodal.values.errors import ModelError
from multimodal.values.model_graph import ModelGraph, Unit

NORMS = (
    Weight("input_layernorm", ("input_layernorm",)),
    Weight("pre_mlp_layernorm", ("post_attention_layernorm",)),
)
DECODER_LAYER = (
    *NORMS,
    Weight("self_attention.linear_qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), grouped_qkv),
    Weight("self_attention.q_layernorm", ("self_attn.q_norm",)),
    Weight("self_attention.k_layernorm", ("self_attn.k_norm",)),
    Weight("self_attention.linear_proj", ("self_attn.o_proj",)),
    Weight("mlp.linear_fc1", ("mlp.gate_proj", "mlp.up_proj"), stacked),
    Weight("mlp.linear_fc2", ("mlp.down_proj",)),
)


PHI3_LAYER = (
    *NORMS,
    Weight("self_attention.linear_qkv", ("self_attn.qkv_proj",), fused_qkv),
    Weight("self_attention.linear_proj", ("self_attn.o_proj",)),
    Weight("mlp.linear_fc1", ("mlp.gate_up_proj",)),
    Weight("mlp.linear_fc2", ("mlp.down_proj",)),
)
INTERNLM2_LAYER = (
    Weight("input_layernorm", ("attention_norm",)),
    Weight("pre_mlp_layernorm", ("ffn_norm",)),
    Weight("self_attention.linear_qkv", ("attention.wqkv",)),  # by groups of heads, as here
    Weight("self_attention.linear_proj", ("attention.wo",)),
    Weight("mlp.linear_fc1", ("feed_forward.w1", "feed_forward.w3"), stacked),
    Weight("mlp.linear_fc2", ("feed_forward.w2",)),
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


_MIXTRAL = ExpertKeys(
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
    prefix: str = "",
    *,
    layer: tuple[Weight, ...] = DECODER_LAYER,
    embedding: str = "model.embed_tokens",
    head: str = "lm_head",
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

    @property
    def fits_inside(self) -> bool:
        """True if the LLM inside other models may be of the family: its weights are named as most are."""
        return self.names == decoder_names()


def _without_global_layers(config: Config) -> Iterable[int]:
    return ()


def _lower_layers(config: Config) -> Iterable[int]:
    return range(min(config["max_window_layers"], config["num_hidden_layers"]))


_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_BIASES = ("attention_bias", "mlp_bias")
TEXT_FAMILIES = {
    family.model_type: family
    for family in (
        TextFamily("LlamaForCausalLM", "llama", {"vocab_size": 32000, "intermediate_size": 11008}, bias_keys=_BIASES),
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
            bias_keys=_BIASES[:1],
            global_layers=_lower_layers,
        ),
        TextFamily(
            "MixtralForCausalLM",
            "mixtral",
            {"vocab_size": 32000, "intermediate_size": 14336, "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
            experts=_MIXTRAL,
            names=decoder_names(layer=(*DECODER_LAYER, *_MIXTRAL.names)),
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
            },
            qk_layernorm=True,
            bias_keys=_BIASES[:1],
            experts=_QWEN3_MOE,
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
            names=decoder_names(layer=PHI3_LAYER),
        ),
        TextFamily(
            "InternLM2ForCausalLM",
            "internlm2",
            {"vocab_size": 103168, "intermediate_size": 11008, "bias": True, "max_position_embeddings": 2048},
            bias_keys=("bias",),
            names=decoder_names(layer=INTERNLM2_LAYER, embedding="model.tok_embeddings", head="output"),
        ),
    )
}
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
}
_KEYS = (
    Key("num_hidden_layers", "num_layers"),
    Key("hidden_size", "hidden_size"),
    Key("num_attention_heads", "num_attention_heads"),
    Key("intermediate_size", "ffn_hidden_size"),
    Key("num_key_value_heads", "num_query_groups"),
    Key("head_dim", "kv_channels"),
    Key("rms_norm_eps", "layernorm_epsilon"),
    Key("initializer_range", "init_method_std"),
    Key("vocab_size", "vocab_size"),
)
_COMPUTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_dropout": (0, 0.0, None),
    "resid_pdrop": (0, 0.0, None),
    "embd_pdrop": (0, 0.0, None),
    "router_jitter_noise": (0, 0.0, None),
    "decoder_sparse_step": (1, None),
    "mlp_only_layers": ([], None),
    "pretraining_tp": (1, None),
}


def read_text_unit(config: Config, *, where: str = "") -> dict[str, Any]:
    """Return the plain form of an LLM; raises ModelError for unsupported values.

    where: the place of the configuration in a config.json, for messages.
    """
    known = {name: family for name, family in TEXT_FAMILIES.items() if family.fits_inside or not where}
    family = known.get(config.get("model_type", ""))
    if family is None:
        raise ModelError(f"{where}model_type is {config.get('model_type')!r}, expected one of {', '.join(known)}")
    require(config, _COMPUTED, where=where)
    if family.experts is not None:
        windows = {"sliding_window": (None,)} if family.experts is _MIXTRAL else {"use_sliding_window": (False, None)}
        require(config, windows, where=where)
    full = with_defaults(config, {**_DEFAULTS, **family.defaults})
    fields = read_keys(_KEYS, full)
    return {
        "role": "backbone",
        **fields,
        **read_rotary(full, where=where),
        **_read_biases(family, full, where=where),
        **_read_window(family, config, full, where=where),
        "qk_layernorm": family.qk_layernorm,
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        "has_exact_vocabulary": True,
        **({} if family.experts is None else {"experts": _read_experts(family.experts, config)}),
    }


def _read_window(family: TextFamily, config: Config, full: Config, *, where: str) -> dict[str, Any]:
    """Return the window and the layers without it. A sliding_window that is null is none; no key means transformers' default."""
    window = config.get("sliding_window", full.get("sliding_window"))
    if family.global_layers is None or window is None or not full.get("use_sliding_window", True):
        return {}
    types, num_layers = config.get("layer_types"), full["num_hidden_layers"]
    if types is None:
        without = list(family.global_layers(full))
    elif isinstance(types, list) and len(types) == num_layers and set(types) <= {_LOCAL, _GLOBAL}:
        without = [index for index, name in enumerate(types) if name == _GLOBAL]
    else:
        raise ModelError(f"{where}layer_types is {types!r}, expected '{_LOCAL}' or '{_GLOBAL}' for each of {num_layers} layers")
    return {"sliding_window": window, "global_layers": without} if len(without) < num_layers else {}


def _write_window(family: TextFamily, unit: Unit) -> dict[str, Any]:
    shape = unit.transformer
    if family.global_layers is None:
        return {}
    types = {"layer_types": [_GLOBAL if index in shape.global_layers else _LOCAL for index in range(shape.num_layers)]}
    if "use_sliding_window" not in family.defaults:
        return {"sliding_window": shape.sliding_window, **(types if shape.global_layers else {})}
    if shape.sliding_window is None:
        return {"use_sliding_window": False}
    lower = {"max_window_layers": len(shape.global_layers)}
    return {"use_sliding_window": True, "sliding_window": shape.sliding_window, **lower, **types}


def _read_experts(experts: ExpertKeys, config: Config) -> dict[str, Any]:
    """Return the experts of a config.json; newer versions of Qwen3 name their number as Mixtral does."""
    given = {**config, "num_experts": config.get("num_experts") or config.get("num_local_experts")}
    is_among_chosen = experts.always_among_chosen or bool(config.get("norm_topk_prob"))
    balances = bool(config.get("output_router_logits"))
    return {
        **read_keys(experts.keys, given),
        "router_pre_softmax": not is_among_chosen,
        "aux_loss_coeff": float(config.get("router_aux_loss_coef") or 0.0) if balances else 0.0,
    }


def _write_experts(experts: ExpertKeys, unit: Unit) -> dict[str, Any]:
    described = unit.transformer.experts
    if described is None:  # reading back shows that it has some
        return {}
    fields = {**asdict(described), "ffn_hidden_size": unit.transformer.expert_hidden_size}
    config = {key.theirs: fields[key.ours] for key in experts.keys}
    balances = (
        {"output_router_logits": True, "router_aux_loss_coef": described.aux_loss_coeff} if described.aux_loss_coeff else {}
    )
    return {**config, **balances, **({} if experts.always_among_chosen else {"norm_topk_prob": not described.router_pre_softmax})}


def _read_biases(family: TextFamily, config: Config, *, where: str) -> dict[str, bool]:
    """Return the matrices that have a bias; raises ModelError for biases that models of the family cannot have."""
    if family.add_qkv_bias:  # the family has these biases and no others, whatever its config.json says
        return {"add_qkv_bias": True}
    require(config, {key: (False, None) for key in _BIASES if key not in family.bias_keys}, where=where)
    attention, mlp = (bool(config.get(key)) for key in (*family.bias_keys, *_BIASES[len(family.bias_keys) :]))
    if attention and mlp:
        return {"add_bias_linear": True}
    return {"add_qkv_bias": attention, "add_proj_bias": attention, "add_mlp_bias": mlp}


def _write_biases(family: TextFamily, unit: Unit) -> dict[str, bool]:
    found = unit.transformer.biases["linear_proj"], unit.transformer.biases["linear_fc1"]
    return dict(zip(family.bias_keys, found, strict=False))


def write_text_unit(family: TextFamily, unit: Unit) -> dict[str, Any]:
    """Return the configuration of an LLM in the form of config.json."""
    return {
        "architectures": [family.name],
        "model_type": family.model_type,
        **write_keys(_KEYS, unit),
        **write_rotary(unit),
        **_write_biases(family, unit),
        **_write_window(family, unit),
        **({} if family.experts is None else _write_experts(family.experts, unit)),
        "hidden_act": "silu",
        "tie_word_embeddings": unit.ties_embeddings,
    }


def write_inner_text(unit: Unit) -> dict[str, Any]:
    """Return the configuration of an LLM inside another model, by the only family that can describe it."""
    shape = unit.transformer
    has_qkv_bias_alone = shape.biases["linear_qkv"] and not shape.biases["linear_proj"]
    name = "qwen3" if shape.qk_layernorm else "qwen2" if has_qkv_bias_alone else "llama"
    name = "mistral" if shape.sliding_window is not None and name == "llama" else name
    return write_text_unit(TEXT_FAMILIES[name], unit)


def write_placed_text(unit: Unit, model_type: str) -> dict[str, Any]:
    """Return the configuration of an LLM whose tokens have a time, rows and columns."""
    plain = write_inner_text(unit)
    rotary = {"rope_type": "default", **plain.get("rope_scaling", {}), "rope_theta": unit.transformer.rotary_base}
    rotary |= {"mrope_section": list(unit.transformer.rotary_sections)}
    if unit.transformer.has_interleaved_sections:
        rotary["mrope_interleaved"] = True
    config = {key: value for key, value in plain.items() if key not in ("architectures", "rope_theta", "rope_scaling")}
    return {**config, "model_type": model_type, "rope_parameters": rotary}


def text_architecture(family: TextFamily) -> Architecture:
    """Return the architecture of a text model on its own."""

    def to_graph(config: Config) -> dict[str, Any]:
        return {"units": {"llm": read_text_unit(config)}}

    def to_config(graph: ModelGraph) -> dict[str, Any]:
        return write_text_unit(family, graph.backbone)

    return Architecture(family.name, family.model_type, to_graph, to_config, (family.names,))
