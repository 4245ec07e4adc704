"""Handwritten digits that the model is asked to draw: the question names them, and a generator makes the answer, an image.

    begin user "draw 407" assistant [image] end

The digits stand side by side, each drawn at random among the handwritten examples of its value: no model can know which, so the
best answer to "draw 4" is the mean of all fours.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from multimodal.data.conversation import GeneratedSegment, Segment, TextSegment
from multimodal.data.digits import RandomPictures, Split
from multimodal.data.digits_layout import DigitsPicture, DigitsSample, Layout, PlacedGlyph
from multimodal.values.errors import ConfigError, ModelError

MAX_DIGITS_TO_DRAW = 3
QUESTION = "draw "
_GLYPH_PIXELS = 8


class DigitsToDrawSource(RandomPictures):
    """Pictures of digits that a generator is to make."""

    _STREAMS: ClassVar[Mapping[Split, int]] = {"train": 2, "valid": 3}

    def _prepare(self) -> None:
        self._pools = [self._pool[self._glyphs.digits[self._pool] == digit] for digit in range(10)]
        factor = self._image.patch_size * self._image.merge_size
        self._cell_pixels = -(-_GLYPH_PIXELS // factor) * factor
        self._counts = [
            count
            for count in range(1, MAX_DIGITS_TO_DRAW + 1)
            if self._image.min_pixels <= count * self._cell_pixels**2 <= self._image.max_pixels
        ]
        if not self._counts:
            raise ModelError(
                f"no digit to draw fits unit '{self._unit}': one has {self._cell_pixels**2} pixels, its image's min_pixels is "
                f"{self._image.min_pixels}, max_pixels {self._image.max_pixels}; widen these bounds"
            )
        longest = len(self._tokenizer.encode(QUESTION)) + MAX_DIGITS_TO_DRAW + 6
        if longest > self._seq_length:
            raise ConfigError(
                f"a sample of the digits to draw has up to {longest} tokens, --seq-length is {self._seq_length}; set it to "
                f"{longest} or more"
            )

    def question(self, index: int) -> tuple[int, ...]:
        """Return the digits in the question of sample `index`; raises IndexError beyond the end."""
        return tuple(map(int, self.sample(index).answer))

    def _draw(self, random: np.random.Generator) -> DigitsSample:
        digits = random.integers(10, size=self._counts[int(random.integers(len(self._counts)))])
        glyphs = tuple(PlacedGlyph(int(random.choice(self._pools[digit])), self._cell_pixels, 0, 0) for digit in digits)
        picture = DigitsPicture(Layout(1, len(glyphs), self._cell_pixels), glyphs)
        return DigitsSample((picture,), "draw", "".join(map(str, digits)))

    def _segments(self, sample: DigitsSample) -> Sequence[Segment]:
        return TextSegment("user", QUESTION + sample.answer), GeneratedSegment()
