"""A family of Hugging Face's models: its config.json as model graph and back, names of weights, autoencoders of diffusers."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from multimodal.hugging_face.weight_names import Spelling, UnitNames
from multimodal.values.errors import ModelError, require_package
from multimodal.values.file_form import read_mapping
from multimodal.values.model_graph import ImageInput, ModelGraph, Unit

Config = Mapping[str, Any]
"""A config.json, or one of the configurations inside it."""


class Key(NamedTuple):
    """One number or word that config.json and a unit have in common."""

    theirs: str
    ours: str
    default: Any = None
    """The value if config.json lacks the key; None: Braid's own default."""


@dataclass(frozen=True)
class Architecture:
    """One family of models."""

    name: str
    """Its name in `architectures` of config.json."""
    to_graph: Callable[[Config], dict[str, Any]]
    """From a config.json to the plain form of a model graph; raises ModelError for unsupported values."""
    to_config: Callable[[ModelGraph], dict[str, Any]] | None
    """From a model graph with the right roles to a config.json; reading that back shows if the family describes the graph. None
    for models that are only written like an existing folder, with parts that are not trained here."""
    names: tuple[UnitNames | Callable[[Unit], UnitNames], ...]
    """Names of every unit's weights, in the order of the model graph; a function if they depend on the unit."""
    is_unused: Callable[[str, ModelGraph], bool] = lambda key, graph: key.endswith("rotary_emb.inv_freq")
    """True for tensors that are part of no parameter here, and are copied: older versions saved what config.json gives."""
    spellings: tuple[Spelling, ...] = ((),)
    """Spellings of the names: each replaces prefixes of names by others; the first one replaces none."""
    written_spelling: Spelling = ()
    """The spelling that is written without a folder to follow: that of transformers."""
    module_spelling: Spelling = ()
    """The spelling of modules inside transformers."""
    names_modules: Callable[[Unit], bool] = lambda unit: True
    """False for units whose modules and weights have different names in every spelling."""
    tied_copies: tuple[tuple[str, str], ...] = (("lm_head.weight", "model.embed_tokens.weight"),)
    """Tensors that some files contain in addition to those that they duplicate, if word embeddings are tied."""
    to_processor: Callable[[ModelGraph], dict[str, Any]] = lambda graph: {}
    """From a model graph to a preprocessor_config.json; empty where there is none."""
    shapes: Callable[[ModelGraph], Mapping[str, tuple[int, ...]]] = lambda graph: {}
    """Shapes of the tensors that are neither vectors nor matrices, and of those that transformers has but does not use: these are
    zero if there is no folder to copy them from."""
    placeholders: Mapping[str, str] = field(default_factory=dict)
    """Tokens that stand for images and sound, and some around them: the tokenizer's name -> the key of config.json."""

    def names_of(self, graph: ModelGraph) -> tuple[UnitNames, ...]:
        """Return the names of every unit's weights."""
        pairs = zip(self.names, graph.units, strict=True)
        return tuple(names if isinstance(names, UnitNames) else names(unit) for names, unit in pairs)

    @property
    def items(self) -> list[str]:
        """Kinds of items that its encoders take, in the order of units: image, audio."""
        return [kind for kind in self.placeholders if kind in ("image", "audio")]


@dataclass(frozen=True)
class Encoder:
    """One family of encoders that can be composed with an LLM of another folder, and the other tensors of its folders."""

    name: str
    """Its name in `architectures` of config.json."""
    to_unit: Callable[[Config], dict[str, Any]]
    """From a config.json to the plain form of an encoder; raises ModelError for unsupported values."""
    names: UnitNames
    is_unused: Callable[[str, Unit], bool]
    """True for tensors that are not part of the encoder, and are copied."""
    spellings: tuple[Spelling, ...] = ((),)
    """Spellings of the names, as above."""


def image_of(unit: Unit) -> ImageInput:
    """Return the images of a unit that takes some."""
    assert unit.image is not None
    return unit.image


def read_keys(keys: tuple[Key, ...], config: Config) -> dict[str, Any]:
    """Return the fields of a unit that a config.json gives."""
    found = {key.ours: key.default if config.get(key.theirs) is None else config[key.theirs] for key in keys}
    return {name: value for name, value in found.items() if value is not None}


def write_keys(keys: tuple[Key, ...], unit: Unit) -> dict[str, Any]:
    """Return the entries of config.json for a unit's own fields and those of its shape and its items."""
    fields = {**asdict(unit.transformer), "vocab_size": unit.vocab_size}
    fields |= {"num_query_groups": unit.transformer.query_groups, "kv_channels": unit.transformer.head_channels}
    fields |= asdict(unit.item_input) if unit.item_input is not None else {}
    return {key.theirs: list(value) if isinstance(value := fields[key.ours], tuple) else value for key in keys}


def with_defaults(given: Config, defaults: Config) -> dict[str, Any]:
    """Return a part of config.json, with transformers' values for keys that are missing or null."""
    return {**defaults, **{key: value for key, value in given.items() if value is not None}}


def require(config: Config, allowed: Mapping[str, tuple[Any, ...]], *, where: str = "") -> None:
    """Raise ModelError if a config.json has an unsupported value; a missing key is accepted."""
    for key, values in allowed.items():
        if key in config and config[key] not in values:
            raise ModelError(
                f"{where}{key} is {config[key]!r}, and only {' or '.join(map(repr, values))} can be trained here; "
                "take a model without it"
            )


_CONFIG = "config.json"


def check_autoencoders(graph: ModelGraph) -> None:
    """Raise ModelError if generators of latents have no autoencoder that makes such latents, or diffusers is missing."""
    for unit in graph.generators:
        if unit.image is None or unit.image.latents is None:
            continue
        where, latents = f"unit '{unit.name}', latents", unit.image.latents
        require_package("diffusers", extra="diffusion", needed_by=where, error=ModelError)
        folder = Path(latents.directory)
        if not (folder / _CONFIG).is_file() or not any(folder.glob("*.safetensors")):
            raise ModelError(
                f"{where}, directory: {folder} has no {_CONFIG} and *.safetensors; give the folder `vae` of a model of diffusers"
            )
        config = read_mapping(folder / _CONFIG, error=ModelError)
        name, factor = config.get("_class_name"), 2 ** (len(config.get("block_out_channels", ())) - 1)
        if name != "AutoencoderKL" or config.get("latents_mean") is not None:
            kind = "AutoencoderKL without latents_mean"
            raise ModelError(f"{where}, directory: {folder} holds a {name}, expected an {kind}; give another")
        for key, said, found in (
            ("channels", latents.channels, config.get("latent_channels")),
            ("factor", latents.factor, factor),
            ("in_channels", unit.image.in_channels, config.get("in_channels")),
        ):
            if found != said:
                raise ModelError(f"{where}: {key} is {said}, but the autoencoder in {folder} has {found}; set it to that")


def autoencoder_digest(image: ImageInput) -> str:
    """Return a digest of the weights and the scale of a generator's autoencoder; O(bytes of its files)."""
    assert image.latents is not None
    folder, found = Path(image.latents.directory), hashlib.blake2b(digest_size=16)
    config = json.loads((folder / _CONFIG).read_text())
    found.update(repr([config.get(key) for key in ("scaling_factor", "shift_factor")]).encode())
    for path in sorted(folder.glob("*.safetensors")):
        found.update(path.read_bytes())
    return found.hexdigest()
