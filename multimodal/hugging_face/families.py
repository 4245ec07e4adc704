"""The table `families.yaml` of facts in which families of Hugging Face's models differ, and the encoders in it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multimodal.hugging_face.architecture import Config, Key, read_keys, require, with_defaults, write_keys
from multimodal.hugging_face.weight_names import UnitNames, names_in
from multimodal.values.file_form import read_table
from multimodal.values.model_graph import Unit

FAMILIES = read_table(Path(__file__).with_suffix(".yaml"))


def keys_in(row: Mapping[str, Any]) -> tuple[Key, ...]:
    """Return the keys of a row: their name -> our field, or that and the value of a missing key."""
    return tuple(Key(theirs, *([ours] if isinstance(ours, str) else ours)) for theirs, ours in row.items())


@dataclass(frozen=True)
class EncoderForm:
    """An encoder as a unit, as a part of config.json, and as tensors; one description reads and writes all models of its kind."""

    keys: tuple[Key, ...]
    """The fields of the unit that config.json has under another name."""
    fields: Mapping[str, Any]
    """Fields of the unit that are the same in all models."""
    names: UnitNames
    """Names of its weights inside the encoder; last: those of a norm behind its layers, or of its projector."""
    kind: str = "image"
    item_keys: tuple[Key, ...] = ()
    """Like `keys`, for fields of its `image` or `audio`."""
    item: Mapping[str, Any] = field(default_factory=dict)
    """Like `fields`, of its `image` or `audio`."""
    choices: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    """Key of config.json -> field of the unit -> their words for its values; no others can be trained here."""
    defaults: Config = field(default_factory=dict)
    """Values of keys that are missing or null, as in transformers."""
    allowed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values of keys that can be trained here."""
    read_more: Callable[[Config, str], dict[str, Any]] = lambda config, where: {}
    """Fields that depend on several keys, or have other values here; from the config.json and its place in a larger one."""
    write_more: Callable[[Unit], dict[str, Any]] = lambda unit: {}
    """The inverse of `read_more`; reading back shows if it describes the unit."""
    written: Config = field(default_factory=dict)
    """Entries of config.json that are written if nothing else says so."""

    def read(self, given: Config, *, where: str = "") -> dict[str, Any]:
        """Return the plain form of the unit without its projector; raises ModelError, with its place `where` in config.json."""
        config = with_defaults(given, self.defaults)
        config.setdefault("in_channels", config.get("in_chans", 3))  # earlier versions of Qwen2-VL
        chosen = [(theirs, ours, words) for theirs, of_field in self.choices.items() for ours, words in of_field.items()]
        require(config, {**{theirs: tuple(words) for theirs, _, words in chosen}, **self.allowed}, where=where)
        fields = {**self.fields, **{ours: words[config[theirs]] for theirs, ours, words in chosen}}
        more = self.read_more(config, where)
        item = {**read_keys(self.item_keys, config), **more.pop(self.kind, {}), **self.item}
        return {"role": "encoder", **read_keys(self.keys, config), **fields, self.kind: item, **more}

    def write(self, unit: Unit) -> dict[str, Any]:
        """Return the part of a config.json that describes the unit."""
        chosen = {
            theirs: next((word for word, value in words.items() if value == getattr(unit.transformer, ours)), None)
            for theirs, of_field in self.choices.items()
            for ours, words in of_field.items()
        }
        return {**self.written, **write_keys((*self.keys, *self.item_keys), unit), **chosen, **self.write_more(unit)}


def encoder_form(
    name: str, read_more: Callable[[Config, str], dict[str, Any]], write_more: Callable[[Unit], dict[str, Any]]
) -> EncoderForm:
    """Return the encoder of a row; the functions are those of `EncoderForm`."""
    row = FAMILIES["forms"][name]
    read = {"keys": keys_in(row["keys"]), "item_keys": keys_in(row.get("item_keys", {})), "names": names_in(row["names"])}
    return EncoderForm(**{**row, **read}, read_more=read_more, write_more=write_more)
