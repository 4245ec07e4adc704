"""The rows of a Hugging Face checkpoint's tensors that make up each parameter of a unit.

A parameter here is one or several of their tensors, stacked by rows and otherwise unchanged; that covers the merging of queries,
keys and values, or of gate and up. So one table of names serves reading and writing, for whole tensors and parts of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from multimodal.values.model_graph import Unit


class Rows(NamedTuple):
    """Rows of one of Hugging Face's tensors, and their place in a parameter."""

    key: str
    start: int
    """The first row in Hugging Face's tensor."""
    target: int
    """The first row in the parameter."""
    num_rows: int


Spelling = tuple[tuple[str, str], ...]
"""Pairs that replace the prefix of a name by another; the first pair that matches applies."""
Merge = Callable[[Unit, Sequence[str], int], Iterator[Rows]]
"""From a unit, the names of their tensors and the parameter's number of rows to the rows that make up the parameter."""


def stacked(unit: Unit, keys: Sequence[str], num_rows: int) -> Iterator[Rows]:
    """Tensors with equal numbers of rows, stacked: [gate; up]; one alone is unchanged."""
    count = num_rows // len(keys)
    for index, key in enumerate(keys):
        yield Rows(key, 0, index * count, count)


def vocabulary(unit: Unit, keys: Sequence[str], num_rows: int) -> Iterator[Rows]:
    """One tensor without the rows that pad the vocabulary."""
    yield Rows(keys[0], 0, 0, min(unit.vocab_size or num_rows, num_rows))


def grouped_qkv(unit: Unit, keys: Sequence[str], num_rows: int) -> Iterator[Rows]:
    """Queries, keys and values: here the queries of every group are followed by its key and its value."""
    channels, num_groups = unit.transformer.head_channels, unit.transformer.query_groups
    query = unit.transformer.num_attention_heads // num_groups * channels
    for group in range(num_groups):
        target = group * (query + 2 * channels)
        yield Rows(keys[0], group * query, target, query)
        yield Rows(keys[1], group * channels, target + query, channels)
        yield Rows(keys[2], group * channels, target + query + channels, channels)


def grouped_qkv_without_key_bias(unit: Unit, keys: Sequence[str], num_rows: int) -> Iterator[Rows]:
    """The same without a bias of keys, which has no effect without rotary positions: here it is zero."""
    return (rows for rows in grouped_qkv(unit, keys, num_rows) if rows.key != keys[1] or not rows.key.endswith(".bias"))


def fused_qkv(unit: Unit, keys: Sequence[str], num_rows: int) -> Iterator[Rows]:
    """The same from one tensor: all queries, then all keys, then all values."""
    shape = unit.transformer
    size = shape.num_attention_heads * shape.head_channels, shape.query_groups * shape.head_channels
    starts = {"q": 0, "k": size[0], "v": size[0] + size[1]}
    for rows in grouped_qkv(unit, tuple(starts), num_rows):
        yield rows._replace(key=keys[0], start=rows.start + starts[rows.key])


def second_if_gated(unit: Unit, keys: Sequence[str], num_rows: int) -> Iterator[Rows]:
    """One tensor, under the second of two names in an MLP with a gate, whose gate and up it holds."""
    yield Rows(keys[unit.transformer.is_gated], 0, 0, num_rows)


def modulation(unit: Unit, keys: Sequence[str], num_rows: int) -> Iterator[Rows]:
    """Shift, scale and gate of two branches, for patches and conditions; conditions of the last layer have scale and shift."""
    size = unit.transformer.hidden_size
    is_last = keys[0].split(".")[1] == str(unit.transformer.num_layers - 1)
    for number, key in enumerate(keys):
        if number and is_last:
            yield Rows(key, size, 6 * size, size)
            yield Rows(key, 0, 7 * size, size)
        else:
            yield Rows(key, 0, 6 * size * number, 6 * size)


class Weight(NamedTuple):
    """A module of ours and the modules of theirs that make it up; weight and bias have the same names on both sides.

    `{}` in their names is the number of one of several equal modules inside a layer.
    """

    ours: str
    theirs: tuple[str, ...]
    merge: Merge = stacked
    is_module: bool = True
    """False for a parameter of ours that is no module's `weight` or `bias`, or has another name in the file."""

    @classmethod
    def parameter(cls, ours: str, theirs: str) -> "Weight":
        """Return a row for a parameter that is one of their tensors."""
        return cls(ours, (theirs,), is_module=False)


Names = tuple[Weight, ...]


@dataclass(frozen=True)
class UnitNames:
    """The names of a unit's weights: full names in its first and its last layer, names behind a prefix in the layers between."""

    first: Names
    body: Names
    last: Names
    prefix: str
    """Prefix of the layers between; `{}` is their number, counted from 0."""

    def inside(self, prefix: str, last: Names | None = None) -> "UnitNames":
        """Return the names inside another model, where all begin with `prefix`; last: full names in the last layer, if others."""

        def renamed(names: Names) -> Names:
            return tuple(each._replace(theirs=tuple(prefix + name for name in each.theirs)) for each in names)

        return UnitNames(renamed(self.first), self.body, renamed(self.last) if last is None else last, prefix + self.prefix)


MERGES = {
    each.__name__: each
    for each in (stacked, vocabulary, grouped_qkv, grouped_qkv_without_key_bias, fused_qkv, second_if_gated, modulation)
}
"""Merges by their names in `families.yaml`."""


def names_in(row: Mapping[str, Any]) -> UnitNames:
    """Return the names of a unit's weights in a row of `families.yaml`."""

    def names(layer: str, merges: Mapping[str, str]) -> Names:
        modules = ((ours, tuple(theirs.split())) for ours, theirs in row.get(layer, {}).items())
        weights = (Weight(ours, theirs, MERGES[merges.get(ours) or _usual_merge(ours, theirs)]) for ours, theirs in modules)
        return (*weights, *(Weight.parameter(*each) for each in row.get(f"{layer}_tensors", {}).items()))

    return UnitNames(names("first", {}), names("body", row.get("merges", {})), names("last", {}), row["prefix"])


def _usual_merge(ours: str, theirs: Sequence[str]) -> str:
    if ours in ("word_embeddings", "output_layer"):
        return "vocabulary"
    if "linear_qkv" in ours:
        return "grouped_qkv" if len(theirs) > 1 else "fused_qkv"
    return "stacked"


def rows_of(names: UnitNames, unit: Unit, parameter: str, *, num_rows: int) -> tuple[Rows, ...]:
    """Return the rows that make up a parameter (`layers.<index>. ...`); none if there is no such tensor in the file.

    num_rows: of the whole parameter. Rows that nothing fills are zero, such as a missing bias, or padding.
    """
    _, index_text, name = parameter.split(".", 2)
    index = int(index_text)
    is_last = index == len(unit.layers) - 1
    table = names.first if index == 0 else names.last if is_last else names.body
    prefix = "" if index == 0 or is_last else names.prefix.format(index - 1)
    module, _, tensor = name.rpartition(".")
    number = next((part for part in module.split(".") if part.isdigit()), "")
    for entry in table:
        wanted, ending = (module, f".{tensor}") if entry.is_module else (name, "")
        if entry.ours.format(number) == wanted:
            keys = [prefix + theirs.format(number) + ending for theirs in entry.theirs]
            return tuple(entry.merge(unit, keys, num_rows))
    return ()


def spelled(key: str, spelling: Spelling) -> str:
    """Return a name in another spelling."""
    for ours, theirs in spelling:
        if key.startswith(ours):
            return theirs + key.removeprefix(ours)
    return key
