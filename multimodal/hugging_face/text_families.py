"""The families of text models, a row of `families.yaml` for the differences of each, and the names of their weights."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from multimodal.hugging_face.architecture import Config, Key
from multimodal.hugging_face.families import FAMILIES, keys_in
from multimodal.hugging_face.weight_names import UnitNames, names_in


class ExpertKeys(NamedTuple):
    """The keys of a family's config.json that describe experts."""

    keys: tuple[Key, ...]
    always_among_chosen: bool
    """True if the weights of chosen experts add up to 1 in every model; else norm_topk_prob says so."""


def decoder_names(
    prefix: str = "",
    *,
    layer: Mapping[str, str] = FAMILIES["decoder_layer"],
    merges: Mapping[str, str] = MappingProxyType({}),
    embedding: str = "model.embed_tokens",
    head: str = "lm_head",
) -> UnitNames:
    """Return the names of an LLM's weights, all of which begin with `prefix`; layer, merges: of those inside a layer."""
    first, last = {"word_embeddings": prefix + embedding}, {"norm": f"{prefix}model.norm", "output_layer": prefix + head}
    return names_in({"first": first, "body": layer, "merges": merges, "last": last, "prefix": prefix + "model.layers.{}."})


class TextFamily(NamedTuple):
    """The facts in which families of text models differ."""

    name: str
    model_type: str
    defaults: Mapping[str, Any]
    """Values of keys that a config.json lacks, as in transformers."""
    names: UnitNames
    """Names of its weights."""
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    bias_keys: tuple[str, ...] = ()
    """The keys that give attention a bias, and the MLP, as far as the family has them."""
    experts: ExpertKeys | None = None
    """For families whose layers have experts."""
    global_layers: Callable[[Config], Iterable[int]] | None = None
    """For families with sliding_window: from a config.json that does not list its layers to those that it does not bound."""
    keys: tuple[Key, ...] = ()
    """Keys of config.json that it alone has; null in a config.json means none."""
    constants: Mapping[str, Any] = MappingProxyType({"hidden_act": "silu"})
    """Entries of config.json that are the same in all its models."""
    fields: Mapping[str, Any] = MappingProxyType({})
    """Fields of a unit that are."""
    local_base_key: str | None = None
    """The key of the rotary base of layers with windows, for families that have two."""


def _every_sixth_layer(config: Config) -> Iterable[int]:
    pattern = config.get("sliding_window_pattern") or 6
    return range(pattern - 1, config["num_hidden_layers"], pattern)


_GLOBAL_LAYERS: Mapping[str, Callable[[Config], Iterable[int]]] = {
    "none": lambda config: (),
    "lower": lambda config: range(min(config["max_window_layers"], config["num_hidden_layers"])),
    "every_second": lambda config: range(1, config["num_hidden_layers"], 2),
    "by_pattern": _every_sixth_layer,
}


def _family(model_type: str, row: Mapping[str, Any]) -> TextFamily:
    """Return the family of a row."""
    facts = {"names": decoder_names(), **row}
    facts |= {name: read(row[name]) for name, read in _READERS.items() if name in row}
    return TextFamily(model_type=model_type, **facts)


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "bias_keys": tuple,
    "experts": lambda experts: ExpertKeys(keys_in(experts["keys"]), experts["always_among_chosen"]),
    "global_layers": _GLOBAL_LAYERS.__getitem__,
    "keys": keys_in,
    "names": lambda names: decoder_names(**names),
}
BIASES = ("attention_bias", "mlp_bias")
TEXT_FAMILIES = {model_type: _family(model_type, row) for model_type, row in FAMILIES["text"].items()}
