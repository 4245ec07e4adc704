"""The digits to read and to draw: what is drawn and rendered, what training and validation do not share, and mixtures of both."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from examples.digits.handwritten_digits import QUESTIONS, DigitsSource, DigitsToDrawSource, glyph_pool, load_handwritten_digits
from examples.digits_generator.sums import open_samples as open_sums
from multimodal.data.sample_source import SampleRequest
from multimodal.data.tokenizer import ByteTokenizer
from multimodal.values.errors import ConfigError, ModelError
from multimodal.values.model_graph import ImageInput, ModelGraph

pytest.importorskip("sklearn")

IMAGE = ImageInput(patch_size=4, merge_size=2, in_channels=1, min_pixels=256, max_pixels=2560)
TO_DRAW = ImageInput(patch_size=4, merge_size=1, in_channels=1, min_pixels=64, max_pixels=192)
TOKENIZER = ByteTokenizer()


def open_digits(num_samples: int = 300, **changes: Any) -> DigitsSource:
    settings = {"seed": 5, "split": "train", "unit": "vision", "image": IMAGE, "tokenizer": TOKENIZER, "seq_length": 256}
    return DigitsSource(num_samples, **settings | changes)


def open_drawings(num_samples: int = 200, **changes: Any) -> DigitsToDrawSource:
    settings = {"seed": 5, "split": "train", "unit": "painter", "image": TO_DRAW, "tokenizer": TOKENIZER, "seq_length": 64}
    return DigitsToDrawSource(num_samples, **settings | changes)


def shown_glyphs(source: DigitsSource) -> list[list[int]]:
    """Indices of the handwritten digits in each sample, in reading order."""
    return [
        [placed.glyph for picture in source.sample(index).pictures for placed in picture.glyphs] for index in range(len(source))
    ]


def test_answers_follow_from_the_digits_shown() -> None:
    source, digits = open_digits(), load_handwritten_digits().digits
    kinds = Counter(source.sample(index).kind for index in range(len(source)))
    assert set(kinds) == set(QUESTIONS) and min(kinds.values()) > 30
    for index, glyphs in enumerate(shown_glyphs(source)):
        shown = [int(digits[glyph]) for glyph in glyphs]
        terms = f"{shown[0]}+{shown[1]}=" if len(shown) == 2 else ""
        expected = {"read": "".join(map(str, shown)), "count": str(len(shown)), "sum": f"{terms}{sum(shown)}"}
        sample = source.sample(index)
        assert sample.answer == expected[sample.kind]


@pytest.mark.parametrize(("opened", "name"), [(open_digits, "sample"), (open_drawings, "question")])
def test_a_sample_depends_on_seed_split_and_index_only(opened: Any, name: str) -> None:
    first, again = opened(), opened(500)
    for index in (40, 3, 40):
        np.testing.assert_array_equal(first.item(index, 0).patches, again.item(index, 0).patches)
    drawn, same, *others = (
        [getattr(source, name)(index) for index in range(50)] for source in (first, again, opened(seed=6), opened(split="valid"))
    )
    assert drawn == same and drawn not in others


def test_validation_shows_other_handwriting() -> None:
    train = {glyph for glyphs in shown_glyphs(open_digits(2500)) for glyph in glyphs}
    valid = {glyph for glyphs in shown_glyphs(open_digits(1000, split="valid")) for glyph in glyphs}
    assert not train & valid
    assert len(train) > 1200 and len(valid) > 250
    assert set(load_handwritten_digits().digits[sorted(valid)]) == set(range(10))


def test_an_encoder_that_no_picture_fits_is_an_error() -> None:
    with pytest.raises(ModelError, match=r"= 28 pixels make pictures of 3136 to 37632 pixels, and min_pixels is 40000"):
        open_digits(image=ImageInput(patch_size=14, merge_size=2, in_channels=3, min_pixels=40000))


def test_a_seq_length_that_would_cut_samples_is_an_error() -> None:
    longest = 2 * (40 + 2) + len("how many") + 12 + 4
    with pytest.raises(ConfigError, match=rf"up to {longest} tokens .* --seq-length is {longest - 1}; set it to {longest}"):
        open_digits(seq_length=longest - 1)
    assert max(open_digits(1000, seq_length=longest).lengths(index).num_tokens for index in range(1000)) <= longest


def test_the_image_shows_the_digits_that_the_question_names() -> None:
    source, glyphs = open_drawings(), load_handwritten_digits()
    for index in range(40):
        digits = source.question(index)
        assert TOKENIZER.decode(source.text(index).token_ids) == "draw " + "".join(map(str, digits))
        pixels = source.item(index, 0)
        assert pixels.grid == (2, 2 * len(digits))
        for cell, digit in zip(cells_of(pixels.patches, window=1), digits, strict=True):
            (found,) = np.flatnonzero((glyphs.ink == (cell + 1) / 2).all(axis=(1, 2)))[:1]
            assert glyphs.digits[found] == digit


def test_a_sum_is_that_of_the_pictures() -> None:
    graph, glyphs = ModelGraph.from_file("examples/digits_generator/model.yaml"), load_handwritten_digits()
    train, valid = open_sums(SampleRequest(graph, TOKENIZER, 128, seed=3, num_train=40, num_valid=40))
    held_out = set(glyph_pool("valid"))
    for source, is_held_out in ((train, False), (valid, True)):
        asked = [TOKENIZER.decode(source.text(index).token_ids) for index in range(8)]
        assert [text[:12] == "draw the sum" for text in asked] == [False, True] * 4
        for index in range(1, 8, 2):
            items = [source.item(index, item) for item in range(3)]
            assert [item.unit for item in source.lengths(index).items] == ["vision", "vision", "painter"]
            shown = [cells_of(item.patches, window=2)[0] for item in items[:2]] + cells_of(items[2].patches, window=1)
            found = [int(np.flatnonzero((glyphs.ink == (cell + 1) / 2).all(axis=(1, 2)))[0]) for cell in shown]
            first, second, tens, ones = glyphs.digits[found].tolist()
            assert 10 * tens + ones == first + second == int(asked[index][12:])
            assert {glyph in held_out for glyph in found} == {is_held_out}


def cells_of(patches: np.ndarray, *, window: int) -> list[np.ndarray]:
    """The 8x8 pixels of each cell of a row, of patches of 4x4 in windows of window x window."""
    if window == 2:
        return [*patches.reshape(-1, 2, 2, 4, 4).transpose(0, 1, 3, 2, 4).reshape(-1, 8, 8)]
    picture = patches.reshape(2, -1, 4, 4).transpose(0, 2, 1, 3).reshape(8, -1)
    return np.split(picture, picture.shape[1] // 8, axis=1)


def test_bounds_decide_how_many_digits_there_are() -> None:
    counts = {len(open_drawings(image=ImageInput(4, 1, 1, 100, 150)).question(index)) for index in range(50)}
    assert counts == {2}
    with pytest.raises(ModelError, match="'painter'.*widen"):
        open_drawings(image=ImageInput(4, 1, 1, 3136, 10000))
    with pytest.raises(ConfigError, match="--seq-length is 8"):
        open_drawings(seq_length=8)
