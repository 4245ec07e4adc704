"""Text models of one shape, RMSNorm, SwiGLU, rotary positions, grouped queries, from and to config.json."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from multimodal.hugging_face.architecture import Architecture, Config, read_keys, require, with_defaults, write_keys
from multimodal.hugging_face.families import FAMILIES, keys_in
from multimodal.hugging_face.rotary_positions import read_rotary, rotary_entries, write_rotary
from multimodal.hugging_face.text_families import BIASES, TEXT_FAMILIES, ExpertKeys, TextFamily, decoder_names
from multimodal.values.errors import ModelError
from multimodal.values.model_graph import ModelGraph, Unit

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_OF_ALL = FAMILIES["of_all_texts"]
_KEYS = keys_in(_OF_ALL["keys"])


def read_text_unit(config: Config, *, where: str = "") -> dict[str, Any]:
    """Return the plain form of an LLM; raises ModelError, with its place `where` in a config.json, for unsupported values."""
    # Inside other models the names of weights are those that most families have.
    known = {name: family for name, family in TEXT_FAMILIES.items() if not where or family.names == decoder_names()}
    family = known.get(config.get("model_type", ""))
    if family is None:
        raise ModelError(f"{where}model_type is {config.get('model_type')!r}, expected one of {', '.join(known)}")
    require(config, {**_OF_ALL["allowed"], **{key: (value,) for key, value in family.constants.items()}}, where=where)
    full = with_defaults(config, {**_OF_ALL["defaults"], **family.defaults})
    fields, window = read_keys(_KEYS, full), _read_window(family, config, full, where=where)
    return {
        "role": "backbone",
        **fields,
        **_read_positions(family, full, window, where=where),
        **{key.ours: config.get(key.theirs, full.get(key.theirs)) for key in family.keys},
        **family.fields,
        **_read_biases(family, full, where=where),
        **window,
        "qk_layernorm": family.qk_layernorm,
        "untie_embeddings_and_output_weights": not full.get("tie_word_embeddings", False),
        "has_exact_vocabulary": True,
        **({} if family.experts is None else {"experts": _read_experts(family.experts, config)}),
    }


def _read_positions(family: TextFamily, full: Config, window: Config, *, where: str) -> dict[str, Any]:
    """Return the rotary positions, and the base of layers with windows, which newer versions list by kind of layer."""
    if family.local_base_key is None:
        return read_rotary(full, where=where)
    entries, local = rotary_entries(full, where=where), full[family.local_base_key]
    if _GLOBAL in entries or _LOCAL in entries:
        of_all, of_local = (entries.get(kind) or {} for kind in (_GLOBAL, _LOCAL))
        if not (isinstance(of_all, Mapping) and isinstance(of_local, Mapping)):
            raise ModelError(f"{where}rope_parameters are {entries!r}, expected a mapping for each kind of layer; correct them")
        require(of_local, {"rope_type": ("default", None)}, where=f"{where}rope_parameters.{_LOCAL}.")
        local = of_local.get("rope_theta") or local
        full = {**full, "rope_scaling": None, "rope_parameters": of_all}
    return {**read_rotary(full, where=where), **({"rotary_local_base": local} if window else {})}


def _read_window(family: TextFamily, config: Config, full: Config, *, where: str) -> dict[str, Any]:
    """Return the window and the layers without it. A sliding_window that is null is none; no key means transformers' default."""
    window = config.get("sliding_window", full.get("sliding_window"))
    if family.global_layers is None or window is None or not full.get("use_sliding_window", True):
        return {}
    types, num_layers = config.get("layer_types"), full["num_hidden_layers"]
    if family.experts is not None:
        types = None  # transformers do not look at it
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
    is_global = [shape.sliding_window is None or index in shape.global_layers for index in range(shape.num_layers)]
    types = {"layer_types": [_GLOBAL if each else _LOCAL for each in is_global]}
    if "use_sliding_window" not in family.defaults:
        return {"sliding_window": shape.sliding_window, **(types if shape.global_layers or family.keys else {})}
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
    if described.aux_loss_coeff:
        config |= {"output_router_logits": True, "router_aux_loss_coef": described.aux_loss_coeff}
    return config | ({} if experts.always_among_chosen else {"norm_topk_prob": not described.router_pre_softmax})


def _read_biases(family: TextFamily, config: Config, *, where: str) -> dict[str, bool]:
    """Return the matrices that have a bias; raises ModelError for biases that models of the family cannot have."""
    if family.add_qkv_bias:  # the family has these biases and no others, whatever its config.json says
        return {"add_qkv_bias": True}
    require(config, {key: (False, None) for key in BIASES if key not in family.bias_keys}, where=where)
    attention, mlp = (bool(config.get(key)) for key in (*family.bias_keys, *BIASES[len(family.bias_keys) :]))
    if attention and mlp:
        return {"add_bias_linear": True}
    return {"add_qkv_bias": attention, "add_proj_bias": attention, "add_mlp_bias": mlp}


def write_text_unit(family: TextFamily, unit: Unit) -> dict[str, Any]:
    """Return the configuration of an LLM in the form of config.json."""
    shape = unit.transformer
    return {
        "architectures": [family.name],
        "model_type": family.model_type,
        **write_keys((*_KEYS, *family.keys), unit),
        **write_rotary(unit),
        **({} if family.local_base_key is None else {family.local_base_key: shape.rotary_local_base}),
        **dict(zip(family.bias_keys, (shape.biases["linear_proj"], shape.biases["linear_fc1"]), strict=False)),
        **_write_window(family, unit),
        **({} if family.experts is None else _write_experts(family.experts, unit)),
        **family.constants,
        "tie_word_embeddings": unit.ties_embeddings,
    }


def read_inner_text(config: Config, *, model_type: str) -> dict[str, Any]:
    """Return the LLM inside another model, whose `text_config` may lack a model_type; ties may be said outside of it."""
    text = {"model_type": model_type, **(config.get("text_config") or {})}
    if config.get("tie_word_embeddings") is not None:
        text["tie_word_embeddings"] = config["tie_word_embeddings"]
    return read_text_unit(text, where="text_config: ")


def write_inner_text(unit: Unit) -> dict[str, Any]:
    """Return the configuration of an LLM inside another model, by the only family that can describe it."""
    shape = unit.transformer
    has_qkv_bias_alone = shape.biases["linear_qkv"] and not shape.biases["linear_proj"]
    name = "qwen3" if shape.qk_layernorm else "qwen2" if has_qkv_bias_alone else "llama"
    name = "mistral" if shape.sliding_window is not None and name == "llama" else name
    return write_text_unit(TEXT_FAMILIES[name], unit)


def write_model(
    name: str, model_type: str, graph: ModelGraph, *, text: Mapping[str, Any] | None = None, **parts: Any
) -> dict[str, Any]:
    """Return a config.json of a model with encoders; text: of its LLM, by default in the form of a family of text models."""
    text = write_inner_text(graph.backbone) if text is None else text
    named = {"architectures": [name], "model_type": model_type, "text_config": text}
    return {**named, **parts, "tie_word_embeddings": graph.backbone.ties_embeddings}


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
    return Architecture(
        family.name,
        to_graph=lambda config: {"units": {"llm": read_text_unit(config)}},
        to_config=lambda graph: write_text_unit(family, graph.backbone),
        names=(family.names,),
    )
