"""Assigns tensors to places in safetensors files, before any of the files is written."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron.runtime.hugging_face.named_weights import NamedWeights
from megatron.runtime.hugging_face.weight_files import DIFFUSERS_NAME, DTYPES, INDEX_ENDING, INDEX_NAME, SINGLE_NAME, SavedWeight
from multimodal.hugging_face.adapter_files import ADAPTER_WEIGHTS
from multimodal.hugging_face.safetensors_header import LENGTH_BYTES

MOST_BYTES = 5 * 10**9
"""Most bytes of a file, if no other folder gives the distribution of tensors."""
_ALIGNMENT = 8
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class PlacedWeight(NamedTuple):
    """A tensor, and the position of its bytes."""

    file: str
    start: int
    dtype: torch.dtype
    row_size: int

    def position(self, row: int, column: int) -> int:
        """Return the byte at which an element begins."""
        return self.start + (row * self.row_size + column) * self.dtype.itemsize


@dataclass(frozen=True)
class FileLayout:
    """All files of a folder."""

    headers: Mapping[str, bytes]
    """The bytes that each file begins with."""
    sizes: Mapping[str, int]
    """Bytes of each file."""
    weights: Mapping[str, PlacedWeight]
    num_parameters: int

    @property
    def index(self) -> dict[str, dict[str, object]]:
        """Return the name of the index file, by which transformers or diffusers find it, and its content; empty for one file."""
        if list(self.headers) in ([SINGLE_NAME], [DIFFUSERS_NAME], [ADAPTER_WEIGHTS]):
            return {}
        metadata: dict[str, object] = {"total_size": sum(self.sizes.values()) - sum(map(len, self.headers.values()))}
        weight_map = {key: place.file for key, place in sorted(self.weights.items())}
        if all(name.startswith(DIFFUSERS_NAME.removesuffix(".safetensors")) for name in self.headers):
            return {DIFFUSERS_NAME + INDEX_ENDING: {"metadata": metadata, "weight_map": weight_map}}  # it counts bytes only
        metadata = {"total_parameters": self.num_parameters, **metadata}
        return {INDEX_NAME: {"metadata": metadata, "weight_map": weight_map}}


def like_files(names: NamedWeights, found: Mapping[str, SavedWeight], metadata: Mapping[str, Mapping[str, str]]) -> FileLayout:
    """Return the layout of other files: every tensor in the same file, with the type and the shape that it has there.

    found: the tensors of the other files, a superset of `names`. If the vocabulary has grown, there are more rows of it.
    """
    grown = {
        key: found[key]._replace(shape=(shape.num_rows, *found[key].shape[1:]))
        for key, shape in names.shapes.items()
        if found[key].num_rows(shape.row_size) != shape.num_rows
    }
    return _lay_out({**found, **grown}, metadata, names)


def cut_into_files(names: NamedWeights, dtype: torch.dtype, *, given: Mapping[str, tuple[int, ...]] | None = None) -> FileLayout:
    """Return a layout of files of at most MOST_BYTES, in the order of names.

    given: shapes of tensors with more than two dimensions, and of some that `names` lacks.
    """
    shapes = {**_shapes(names), **(given or {})}
    groups: list[list[str]] = [[]]
    size = 0
    for key in sorted(shapes):
        num_bytes = math.prod(shapes[key]) * dtype.itemsize
        if groups[-1] and size + num_bytes > MOST_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(key)
        size += num_bytes
    count = len(groups)
    files = [SINGLE_NAME] if count == 1 else [f"model-{index + 1:05d}-of-{count:05d}.safetensors" for index in range(count)]
    wanted = {key: SavedWeight(name, dtype, shapes[key]) for name, keys in zip(files, groups, strict=True) for key in keys}
    return _lay_out(wanted, {name: {"format": "pt"} for name in files}, names)


def in_one_file(name: str, names: NamedWeights, dtype: torch.dtype) -> FileLayout:
    """Return a layout of one file, however large."""
    wanted = {key: SavedWeight(name, dtype, shape) for key, shape in _shapes(names).items()}
    return _lay_out(wanted, {name: {"format": "pt"}}, names)


def _shapes(names: NamedWeights) -> dict[str, tuple[int, ...]]:
    return {key: (num_rows,) if is_vector else (num_rows, size) for key, (num_rows, size, is_vector) in names.shapes.items()}


def _lay_out(wanted: Mapping[str, SavedWeight], metadata: Mapping[str, Mapping[str, str]], names: NamedWeights) -> FileLayout:
    headers: dict[str, bytes] = {}
    sizes: dict[str, int] = {}
    weights: dict[str, PlacedWeight] = {}
    for name in sorted({weight.file for weight in wanted.values()}):
        # The widest types first, as in safetensors, so that all are aligned.
        keys = sorted((key for key in wanted if wanted[key].file == name), key=lambda key: (-wanted[key].dtype.itemsize, key))
        entries: dict[str, object] = {"__metadata__": dict(metadata[name])} if metadata.get(name) else {}
        end = 0
        starts = {}
        for key in keys:
            weight = wanted[key]
            starts[key], end = end, end + math.prod(weight.shape) * weight.dtype.itemsize
            entries[key] = {"dtype": _NAMES[weight.dtype], "shape": list(weight.shape), "data_offsets": [starts[key], end]}
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        headers[name] = len(text).to_bytes(LENGTH_BYTES, "little") + text
        sizes[name] = len(headers[name]) + end
        for key in keys:
            row_size = names.shapes[key].row_size if key in names.shapes else math.prod(wanted[key].shape[1:])
            weights[key] = PlacedWeight(name, len(headers[name]) + starts[key], wanted[key].dtype, row_size)
    return FileLayout(headers, sizes, weights, sum(math.prod(weight.shape) for weight in wanted.values()))
