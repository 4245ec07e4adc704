"""The digits to draw: the question says what the image shows, and the two data sets mix without changing each other."""

from typing import Any

import numpy as np
import pytest

from examples.digits.handwritten_digits import DigitsSource, DigitsToDrawSource, in_turn, load_handwritten_digits
from multimodal.data.tokenizer import ByteTokenizer
from multimodal.values.errors import ConfigError, ModelError
from multimodal.values.model_graph import ImageInput
from multimodal.values.sample_lengths import ItemLengths

pytest.importorskip("sklearn")

TOKENIZER = ByteTokenizer()
IMAGE = ImageInput(patch_size=4, merge_size=1, in_channels=1, min_pixels=64, max_pixels=192)


def open_drawings(num_samples: int = 200, **changes: Any) -> DigitsToDrawSource:
    settings: dict[str, Any] = {
        "seed": 5,
        "split": "train",
        "unit": "painter",
        "image": IMAGE,
        "tokenizer": TOKENIZER,
        "seq_length": 64,
    }
    return DigitsToDrawSource(num_samples, **(settings | changes))


def test_the_image_shows_the_digits_that_the_question_names() -> None:
    source, glyphs = open_drawings(), load_handwritten_digits()
    for index in range(40):
        digits = source.question(index)
        assert TOKENIZER.decode(source.text(index).token_ids) == "draw " + "".join(map(str, digits))
        pixels = source.item(index, 0)
        assert pixels.grid == (2, 2 * len(digits))
        picture = pixels.patches.reshape(2, -1, 4, 4).transpose(0, 2, 1, 3).reshape(8, -1)
        for position, digit in enumerate(digits):
            ink = (picture[:, 8 * position : 8 * position + 8] + 1) / 2
            (found,) = np.flatnonzero((glyphs.ink == ink).all(axis=(1, 2)))[:1]
            assert glyphs.digits[found] == digit


def test_lengths_and_text_agree() -> None:
    source = open_drawings()
    for index in range(40):
        lengths, text = source.lengths(index), source.text(index)
        assert lengths.items == (ItemLengths("painter", 4 * len(source.question(index)), 0),)
        assert len(text.token_ids) == lengths.num_tokens == lengths.num_text_tokens
        assert int(text.is_target.sum()) == lengths.num_target_tokens == 2
        ((item, start, num_tokens),) = text.item_starts
        assert (item, num_tokens, text.token_ids[start]) == (0, 0, TOKENIZER.special.vision_start)


def test_drawings_depend_on_seed_split_and_index_only() -> None:
    first, again = open_drawings(), open_drawings(500)
    assert [first.question(index) for index in range(50)] == [again.question(index) for index in range(50)]
    for other in (open_drawings(seed=6), open_drawings(split="valid")):
        assert [first.question(index) for index in range(50)] != [other.question(index) for index in range(50)]


def test_bounds_decide_how_many_digits_there_are() -> None:
    counts = {len(open_drawings(image=ImageInput(4, 1, 1, 100, 150)).question(index)) for index in range(50)}
    assert counts == {2}
    with pytest.raises(ModelError, match="'painter'.*widen"):
        open_drawings(image=ImageInput(4, 1, 1, 3136, 10000))
    with pytest.raises(ConfigError, match="--seq-length is 8"):
        open_drawings(seq_length=8)


def test_sources_take_turns() -> None:
    image = ImageInput(patch_size=4, merge_size=2, in_channels=1, min_pixels=256, max_pixels=2560)
    reading = DigitsSource(20, seed=5, split="train", unit="vision", image=image, tokenizer=TOKENIZER, seq_length=256)
    drawing = open_drawings(20)
    both = in_turn([reading, drawing])
    assert len(both) == 40
    for index in range(len(both)):
        source = (reading, drawing)[index % 2]
        assert both.lengths(index).sample_id == index
        assert both.lengths(index).items == source.lengths(index // 2).items
        np.testing.assert_array_equal(both.text(index).token_ids, source.text(index // 2).token_ids)
        np.testing.assert_array_equal(both.item(index, 0).patches, source.item(index // 2, 0).patches)
        assert both.item_grid(index, 0) == source.item_grid(index // 2, 0)
    with pytest.raises(IndexError):
        both.lengths(40)
