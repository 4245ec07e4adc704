"""Messages between ranks and producers, numbered: JSON, followed by arrays as safetensors; nothing is executed or unpickled."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from multimodal.data.conversation import TextSegment
from multimodal.data.forms.segments import MEDIA, FileSegment, Segment, SegmentedSample
from multimodal.data.index.item_reader import WantedItem
from multimodal.data.index.sample_index import IndexedItem, SampleIndex
from multimodal.data.sample_source import ItemPixels
from multimodal.values.errors import ConfigError
from multimodal.values.units.items import Grid

MOST_REQUEST_BYTES, MOST_ANSWER_BYTES = 64 * 2**20, 2**32
"""Most bytes of a part of a message, to producers and from them; ranks send no numbers."""


class SampleBlock(NamedTuple):
    """Samples to index."""

    number: int
    samples: tuple[SegmentedSample, ...]


Wanted = WantedItem | SampleBlock


class WireError(Exception):
    """The peer is gone, does not know the token, or violates the protocol."""


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT; raises ConfigError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"'{text}' is no address of a producer; expected HOST:PORT, such as cpu-node-1:7070")
    return host.strip("[]"), int(port)


def pack_message(said: Any) -> bytes:
    """Return the message that says this."""
    return json.dumps(said).encode()


def unpack_message(text: bytes | memoryview) -> Any:
    """Return the argument of `pack_message`; raises WireError."""
    try:
        return json.loads(bytes(text))
    except (ValueError, RecursionError) as problem:
        raise WireError(f"a message that is no JSON ({problem})") from problem


def pack_wanted(wanted: Wanted) -> Any:
    """Return a request in JSON's form: an item, or a list of samples to index."""
    if isinstance(wanted, WantedItem):
        return {**asdict(wanted.item), "where": wanted.where}
    return [
        wanted.number,
        *([each.where, each.loss_weight, *(segment._asdict() for segment in each.segments)] for each in wanted.samples),
    ]


def unpack_wanted(said: Any) -> Wanted:
    """Return the argument of `pack_wanted`; raises WireError."""
    try:
        if not isinstance(said, list):
            return _unpack_item(**said)
        number, *samples = said
        found = ((where, weight, map(_unpack_segment, segments)) for where, weight, *segments in samples)
        segmented = (SegmentedSample(str(where), tuple(own), float(weight)) for where, weight, own in found)
        return SampleBlock(int(number), tuple(segmented))
    except (KeyError, TypeError, ValueError) as problem:
        raise WireError(f"a request that is none ({problem})") from problem


def _unpack_item(*, unit: str, path: str, size: Sequence[int], grid: Sequence[int], tile: int, where: str) -> WantedItem:
    width, height = map(int, size)
    return WantedItem(IndexedItem(str(unit), str(path), (width, height), _unpack_grid(grid), int(tile)), str(where))


def _unpack_grid(said: Sequence[int]) -> Grid:
    rows, columns, *times = map(int, said)
    if not times:
        return rows, columns
    (time,) = times
    return rows, columns, time


def _unpack_segment(said: Mapping[str, Any]) -> Segment:
    fields = dict(said)
    size = fields.pop("size", None)
    for name, value in fields.items():
        if not isinstance(value, str | bool | None):
            raise TypeError(f"a segment whose {name} is {type(value).__name__}")
    if "kind" not in fields:
        return TextSegment(**fields)
    if fields["kind"] not in MEDIA:
        raise ValueError(f"a segment of kind {fields['kind']!r}")
    return FileSegment(size=None if size is None else (int(size[0]), int(size[1])), **fields)


def pack_pixels(pixels: ItemPixels) -> tuple[dict[str, Any], bytes]:
    """Return the description that is needed to read an item, and its values."""
    return {"grid": pixels.grid}, save({"patches": pixels.patches})


def unpack_pixels(said: Mapping[str, Any], payload: bytearray | memoryview) -> ItemPixels:
    """Return the item from the results of `pack_pixels`; raises WireError."""
    try:
        (patches,) = load(bytes(payload)).values()
        if patches.dtype not in (np.uint8, np.float32):
            raise ValueError(f"values of type {patches.dtype}")
        return ItemPixels(patches, _unpack_grid(said["grid"]))
    except (KeyError, TypeError, ValueError, SafetensorError) as problem:
        raise WireError(f"an item that is none ({problem})") from problem


def pack_index(index: SampleIndex) -> tuple[dict[str, Any], bytes]:
    """Return the description that is needed to read an index, and its values."""
    return {"summary": index.summary}, save(dict(index.arrays))


def unpack_index(said: Mapping[str, Any], payload: bytearray | memoryview, *, num_samples: int) -> SampleIndex:
    """Return the index from the results of `pack_index`; raises WireError unless it is one of this many samples."""
    try:
        index = SampleIndex(load(bytes(payload)), said["summary"])
        if len(index) + sum(map(int, index.skipped.values())) != num_samples:
            raise ValueError(f"of other than {num_samples} samples")
        return index
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, SafetensorError) as problem:
        raise WireError(f"an index that is none ({problem})") from problem
