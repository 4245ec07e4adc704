"""Messages of decoded samples between ranks: JSON and plain numbers; nothing that is received is unpickled or executed."""

import json
import struct
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy.typing as npt

from megatron.runtime.feed.producers.wire import pack_arrays, unpack_arrays
from multimodal.data.sample_source import ItemPixels, SampleText
from multimodal.values.sample_lengths import ItemLengths, SampleLengths

WHOLE_TEXT = -1
"""Item index of a sample's text."""
_HEAD = struct.Struct("!Q")


class Piece(NamedTuple):
    """The unit of sending: a sample's text or one item."""

    sample_id: int
    item_index: int
    """WHOLE_TEXT for its text."""


class Described(NamedTuple):
    """Facts about a sample that all ranks know: its lengths, and the (rows, columns) of patches of its items."""

    lengths: SampleLengths
    grids: tuple[tuple[int, int], ...]


Pieces = Mapping[Piece, SampleText | ItemPixels]


def pack_pieces(pieces: Pieces) -> bytes:
    """Return one message: JSON that describes the pieces, then the numbers of all pieces. O(bytes)."""
    about: list[Any] = []
    arrays: list[npt.NDArray[Any]] = []
    for piece, content in pieces.items():
        if isinstance(content, SampleText):
            about.append([*piece, content.item_starts])
            arrays += content.token_ids, content.labels, content.is_target
        else:
            about.append([*piece, content.grid])
            arrays.append(content.patches)
    described, values = pack_arrays(arrays)
    text = json.dumps([about, described], default=int).encode()
    text += b" " * (-len(text) % _HEAD.size)  # so that the numbers are aligned
    return b"".join([_HEAD.pack(len(text)), text, values])


def unpack_pieces(message: bytearray) -> dict[Piece, SampleText | ItemPixels]:
    """Return the argument of `pack_pieces`; arrays are views of the message."""
    (length,) = _HEAD.unpack_from(message)
    start = _HEAD.size + length
    pieces, described = json.loads(message[_HEAD.size : start])
    arrays = iter(unpack_arrays(described, memoryview(message)[start:]))
    found: dict[Piece, SampleText | ItemPixels] = {}
    for sample_id, item_index, about in pieces:
        if item_index == WHOLE_TEXT:
            ids, labels, is_target = islice(arrays, 3)
            found[Piece(sample_id, item_index)] = SampleText(ids, labels, is_target, tuple(tuple(start) for start in about))
        else:
            rows, columns = about
            found[Piece(sample_id, item_index)] = ItemPixels(next(arrays), (rows, columns))
    return found


def pack_described(described: Mapping[int, Described], failure: str | None) -> bytes:
    """Return a rank's message to all others about its share: lengths and grids, or the reason for its failure."""
    samples = [
        [
            *(lengths.sample_id, lengths.items, lengths.num_text_tokens, lengths.num_target_tokens, lengths.item_starts),
            *(lengths.loss_weight, grids),
        ]
        for lengths, grids in described.values()
    ]
    return json.dumps([samples, failure], default=int).encode()


def unpack_described(message: bytes | bytearray) -> tuple[dict[int, Described], str | None]:
    """Return the arguments of `pack_described`."""
    samples, failure = json.loads(message)
    return {sample[0]: _unpack_sample(*sample) for sample in samples}, failure


def _unpack_sample(
    sample_id: int,
    items: Sequence[Sequence[Any]],
    num_text_tokens: int,
    num_target_tokens: int,
    item_starts: Sequence[int] | None,
    loss_weight: float,
    grids: Sequence[Sequence[int]],
) -> Described:
    starts = None if item_starts is None else tuple(item_starts)
    lengths = SampleLengths(sample_id, _unpack_items(items), num_text_tokens, num_target_tokens, starts, loss_weight)
    return Described(lengths, tuple((rows, columns) for rows, columns in grids))


def _unpack_items(items: Sequence[Sequence[Any]]) -> tuple[ItemLengths, ...]:
    return tuple(ItemLengths(item[0], item[1], item[2], _unpack_items(item[3])) for item in items)
