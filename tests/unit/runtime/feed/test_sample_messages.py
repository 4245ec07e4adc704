"""Messages about decoded samples, there and back."""

import numpy as np
import pytest

from megatron.runtime.feed.sample_messages import (
    WHOLE_TEXT,
    Described,
    Piece,
    pack_described,
    pack_pieces,
    unpack_described,
    unpack_pieces,
)
from multimodal.data.sample_source import ItemPixels, SampleText
from multimodal.values.sample_lengths import ItemLengths, SampleLengths

TEXT = SampleText(np.arange(5), np.arange(5) + 1, np.array([True, False, True, True, False]), ((0, 1, 2), (1, 4, 0)))
BYTES = ItemPixels(np.arange(9, dtype=np.uint8).reshape(3, 3), (3, 1))
VALUES = ItemPixels(np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3), (1, 2))


def test_texts_and_items_of_all_types_come_back_as_they_were_and_can_be_written_to() -> None:
    pieces = {Piece(7, WHOLE_TEXT): TEXT, Piece(7, 0): BYTES, Piece(9, 3): VALUES}
    found = unpack_pieces(bytearray(pack_pieces(pieces)))
    assert list(found) == list(pieces)
    text = found[Piece(7, WHOLE_TEXT)]
    assert isinstance(text, SampleText) and text.item_starts == TEXT.item_starts
    for name in ("token_ids", "labels", "is_target"):
        own, expected = getattr(text, name), getattr(TEXT, name)
        assert own.dtype == expected.dtype and (own == expected).all() and own.flags.writeable and own.flags.aligned
    for piece, expected in ((Piece(7, 0), BYTES), (Piece(9, 3), VALUES)):
        item = found[piece]
        assert isinstance(item, ItemPixels) and item.grid == expected.grid
        assert item.patches.dtype == expected.patches.dtype and (item.patches == expected.patches).all()
    assert unpack_pieces(bytearray(pack_pieces({}))) == {}


def test_values_of_other_types_are_refused() -> None:
    odd = ItemPixels(np.zeros((1, 1), dtype=np.float16), (1, 1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="values of type float16"):
        unpack_pieces(bytearray(pack_pieces({Piece(0, 0): odd})))


def test_lengths_come_back_as_they_were() -> None:
    items = (ItemLengths("vision", 16, 4), ItemLengths("audio", 8, 2))
    described = {
        4: Described(SampleLengths(4, items, 9, 3, (0, 5)), ((4, 4), (8, 1))),
        2: Described(SampleLengths(2, (), 5, 5), ()),
    }
    found, failure = unpack_described(pack_described(described, None))
    assert found == described and failure is None
    assert [each.lengths.item_starts for each in found.values()] == [(0, 5), None]
    assert unpack_described(pack_described({}, "x.png: no such file")) == ({}, "x.png: no such file")
