"""Messages of decoded samples between ranks: JSON and plain numbers; nothing that is received is unpickled or executed."""

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.runtime.feed.producers.wire import build_pixels, describe_pixels
from multimodal.data.sample_source import ItemPixels, SampleText
from multimodal.values.sample_lengths import ItemLengths, SampleLengths

WHOLE_TEXT = -1
"""Item index of a sample's text."""
_HEAD = struct.Struct("!Q")
_ALIGNMENT = 8
"""Alignment of every array in bytes."""


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
    said: list[Any] = []
    arrays: list[npt.NDArray[Any]] = []
    for piece, content in pieces.items():
        if isinstance(content, SampleText):
            own: tuple[npt.NDArray[Any], ...] = (content.token_ids, content.labels, content.is_target)
            about: dict[str, Any] = {"num_tokens": len(content.token_ids), "item_starts": content.item_starts}
        else:
            own, about = (content.patches,), describe_pixels(content)
        said.append([*piece, about])
        arrays += own
    text = json.dumps(said, default=int).encode()
    return b"".join([_HEAD.pack(len(text)), _padded(text, after=_HEAD.size), *(_padded(array.tobytes()) for array in arrays)])


def unpack_pieces(message: bytearray) -> dict[Piece, SampleText | ItemPixels]:
    """Return the argument of `pack_pieces`; arrays are views of the message."""
    (length,) = _HEAD.unpack_from(message)
    place = _HEAD.size + length + -(_HEAD.size + length) % _ALIGNMENT
    found: dict[Piece, SampleText | ItemPixels] = {}

    def take(dtype: npt.DTypeLike, count: int) -> memoryview:
        nonlocal place
        num_bytes = np.dtype(dtype).itemsize * count
        taken = memoryview(message)[place : place + num_bytes]
        place += num_bytes + -num_bytes % _ALIGNMENT
        return taken

    for sample_id, item_index, about in json.loads(message[_HEAD.size : _HEAD.size + length]):
        if item_index == WHOLE_TEXT:
            count = int(about["num_tokens"])
            ids, labels = (np.frombuffer(take(np.int64, count), np.int64) for _ in range(2))
            is_target = np.frombuffer(take(np.bool_, count), np.bool_)
            starts = tuple((int(item), int(start), int(outputs)) for item, start, outputs in about["item_starts"])
            found[Piece(sample_id, item_index)] = SampleText(ids, labels, is_target, starts)
        else:
            num_values = int(np.prod(about["shape"], dtype=np.int64))
            found[Piece(sample_id, item_index)] = build_pixels(about, take(about["dtype"], num_values))
    return found


def _padded(part: bytes, *, after: int = 0) -> bytes:
    return part + bytes(-(after + len(part)) % _ALIGNMENT)


def pack_described(described: Mapping[int, Described], failure: str | None) -> bytes:
    """Return a rank's message to all others about its share: lengths and grids, or the reason for its failure."""
    samples = [[*_plain(each.lengths), each.grids] for each in described.values()]
    return json.dumps([samples, failure], default=int).encode()


def _plain(lengths: SampleLengths) -> tuple[Any, ...]:
    return lengths.sample_id, lengths.items, lengths.num_text_tokens, lengths.num_target_tokens, lengths.item_starts


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
    grids: Sequence[Sequence[int]],
) -> Described:
    starts = None if item_starts is None else tuple(item_starts)
    lengths = SampleLengths(sample_id, _unpack_items(items), num_text_tokens, num_target_tokens, starts)
    return Described(lengths, tuple((rows, columns) for rows, columns in grids))


def _unpack_items(items: Sequence[Sequence[Any]]) -> tuple[ItemLengths, ...]:
    return tuple(ItemLengths(item[0], item[1], item[2], _unpack_items(item[3])) for item in items)
