"""Llama, Qwen2, Qwen3 and Mixtral: RMSNorm, SwiGLU, rotary positions, grouped queries; one row for the differences of each."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from multimodal.hugging_face.architecture import Architecture, Config, Key, read_keys, require, write_keys
from multimodal.hugging_face.weight_names import UnitNames, Weight, grouped_qkv, stacked, vocabulary
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


def decoder_names(prefix: str = "", *, experts: ExpertKeys | None = None) -> UnitNames:
    """Return the names of an LLM's weights, all of which begin with `prefix`."""
    return UnitNames(
        first=(Weight("word_embeddings", (f"{prefix}model.embed_tokens",), vocabulary),),
        body=(*DECODER_LAYER, *(experts.names if experts is not None else ())),
        last=(Weight("norm", (f"{prefix}model.norm",)), Weight("output_layer", (f"{prefix}lm_head",), vocabulary)),
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
    may_have_biases: bool = False
    """True if attention_bias and mlp_bias together give every matrix a bias."""
    experts: ExpertKeys | None = None
    """For families whose layers have experts."""


TEXT_FAMILIES = {
    family.model_type: family
    for family in (
        TextFamily("LlamaForCausalLM", "llama", {"vocab_size": 32000, "intermediate_size": 11008}, may_have_biases=True),
        TextFamily("Qwen2ForCausalLM", "qwen2", {"vocab_size": 151936, "num_key_value_heads": 32}, add_qkv_bias=True),
        TextFamily(
            "Qwen3ForCausalLM", "qwen3", {"vocab_size": 151936, "num_key_value_heads": 32, "head_dim": 128}, qk_layernorm=True
        ),
        TextFamily(
            "MixtralForCausalLM",
            "mixtral",
            {"vocab_size": 32000, "intermediate_size": 14336, "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
            experts=_MIXTRAL,
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
            experts=_QWEN3_MOE,
        ),
    )
}
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
    "use_sliding_window": (False, None),
    "router_jitter_noise": (0, 0.0, None),
    "decoder_sparse_step": (1, None),
    "mlp_only_layers": ([], None),
    "pretraining_tp": (1, None),
}
_ROTARY_TYPES = (None, "default", "llama3", "dynamic")
_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_LENGTH = "max_position_embeddings"
_DYNAMIC_SCALING = ("factor", _LENGTH)
_FIELDS = {"llama3": "rotary_scaling", "dynamic": "rotary_dynamic_scaling"}


def read_text_unit(config: Config, *, where: str = "") -> dict[str, Any]:
    """Return the plain form of an LLM; raises ModelError for unsupported values.

    where: the place of the configuration in a config.json, for messages.
    """
    family = TEXT_FAMILIES.get(config.get("model_type", ""))
    if family is None:
        raise ModelError(f"{where}model_type is {config.get('model_type')!r}, expected one of {', '.join(TEXT_FAMILIES)}")
    require(config, _COMPUTED, where=where)
    if family.model_type == "mixtral":
        require(config, {"sliding_window": (None,)}, where=where)
    given = {key: value for key, value in config.items() if value is not None}
    fields = read_keys(_KEYS, {**_DEFAULTS, **family.defaults, **given})
    return {
        "role": "backbone",
        **fields,
        **_read_rotary(config, where=where),
        "add_qkv_bias": family.add_qkv_bias,
        "add_bias_linear": _has_biases(family, config, where=where),
        "qk_layernorm": family.qk_layernorm,
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        "has_exact_vocabulary": True,
        **({} if family.experts is None else {"experts": _read_experts(family.experts, config)}),
    }


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


def _has_biases(family: TextFamily, config: Config, *, where: str) -> bool:
    """Return whether all matrices have a bias; raises ModelError if only some have one, besides queries, keys and values."""
    attention, mlp = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    if family.add_qkv_bias:  # the family has these biases and no others, whatever its config.json says
        return False
    if attention != mlp or (attention and not family.may_have_biases):
        raise ModelError(
            f"{where}attention_bias is {attention} and mlp_bias {mlp}; layers have all biases here or none, so take a model "
            "without them"
        )
    return attention


def rotary_entries(config: Config, *, where: str) -> dict[str, Any]:
    """Return the entries of `rope_scaling` and `rope_parameters`, as versions of transformers call them; raises ModelError."""
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(key), Mapping | None):
            raise ModelError(f"{where}{key} is {config[key]!r}, expected a mapping, or null; correct it")
    return {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}


def _read_rotary(config: Config, *, where: str) -> dict[str, Any]:
    """Return the rotary positions, wherever a version of transformers put them; raises ModelError for unsupported ones."""
    parameters = rotary_entries(config, where=where)
    kind = parameters.get("rope_type", parameters.get("type"))
    if kind not in _ROTARY_TYPES:
        raise ModelError(
            f"{where}rope_parameters (or rope_scaling) are of type {kind!r}, which cannot be trained here; expected 'default', "
            "'llama3' or 'dynamic': take a model whose rotary positions are not scaled otherwise"
        )
    if parameters.get("partial_rotary_factor", config.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise ModelError(f"{where}partial_rotary_factor is not 1, which cannot be trained here; take another model")
    theta = parameters.get("rope_theta") or config.get("rope_theta") or 10000.0
    if not isinstance(theta, int | float):
        raise ModelError(f"{where}rope_theta is {theta!r}, expected a number; correct it")
    base = float(theta)
    if kind in (None, "default"):
        return {"rotary_base": base}
    given: Config = parameters
    needed: tuple[str, ...] = _SCALING
    if kind == "dynamic":
        given, needed = {**parameters, _LENGTH: config.get(_LENGTH)}, _DYNAMIC_SCALING
    if missing := [key for key in needed if given.get(key) is None]:
        raise ModelError(f"{where}rope_parameters (or rope_scaling) are of type '{kind}' without {missing[0]}; add it")
    return {"rotary_base": base, _FIELDS[kind]: [given[key] for key in needed]}


def write_text_unit(family: TextFamily, unit: Unit) -> dict[str, Any]:
    """Return the configuration of an LLM in the form of config.json."""
    config = write_keys(_KEYS, unit)
    if unit.transformer.rotary_scaling:
        values = dict(zip(_SCALING, unit.transformer.rotary_scaling, strict=True))
        config |= {"rope_scaling": {**values, "rope_type": "llama3", _SCALING[3]: int(values[_SCALING[3]])}}
    if unit.transformer.rotary_dynamic_scaling:
        factor, length = unit.transformer.rotary_dynamic_scaling
        config |= {"rope_scaling": {"factor": factor, "rope_type": "dynamic"}, _LENGTH: int(length)}
    if unit.transformer.add_bias_linear:
        config |= {"attention_bias": True, "mlp_bias": True}
    return {
        "architectures": [family.name],
        "model_type": family.model_type,
        **config,
        **({} if family.experts is None else _write_experts(family.experts, unit)),
        "hidden_act": "silu",
        "rope_theta": unit.transformer.rotary_base,
        "tie_word_embeddings": unit.ties_embeddings,
    }


def write_inner_text(unit: Unit) -> dict[str, Any]:
    """Return the configuration of an LLM inside another model, by the only family that can describe it."""
    name = "qwen3" if unit.transformer.qk_layernorm else "qwen2" if unit.transformer.add_qkv_bias else "llama"
    return write_text_unit(TEXT_FAMILIES[name], unit)


def write_placed_text(unit: Unit, model_type: str) -> dict[str, Any]:
    """Return the configuration of an LLM whose tokens have a time, rows and columns."""
    rotary = {"rope_type": "default", "rope_theta": unit.transformer.rotary_base}
    rotary |= {"mrope_section": list(unit.transformer.rotary_sections)}
    if unit.transformer.has_interleaved_sections:
        rotary["mrope_interleaved"] = True
    config = {key: value for key, value in write_inner_text(unit).items() if key not in ("architectures", "rope_theta")}
    return {**config, "model_type": model_type, "rope_parameters": rotary}


def text_architecture(family: TextFamily) -> Architecture:
    """Return the architecture of a text model on its own."""

    def to_graph(config: Config) -> dict[str, Any]:
        return {"units": {"llm": read_text_unit(config)}}

    def to_config(graph: ModelGraph) -> dict[str, Any]:
        return write_text_unit(family, graph.backbone)

    return Architecture(family.name, family.model_type, to_graph, to_config, (decoder_names(experts=family.experts),))
