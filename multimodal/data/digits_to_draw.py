"""Handwritten digits that the model is asked to draw: the question says which, the answer is an image that a generator makes.

    begin user "draw 407" assistant [image] end

The digits stand side by side, each drawn at random among the handwritten ones of its kind: no model can know which, so the best
answer to "draw 4" is the mean of all fours.
"""

from typing import Literal

import numpy as np

from multimodal.data.conversation import Conversation, GeneratedSegment, TextSegment, build_conversation, build_sample_text
from multimodal.data.digits import glyph_pool, load_handwritten_digits, render_ink
from multimodal.data.digits_layout import DigitsPicture, Layout, PlacedGlyph
from multimodal.data.image_processing import cut_patches
from multimodal.data.sample_source import ItemPixels, SampleText
from multimodal.data.tokenizer import Tokenizer
from multimodal.values.errors import ConfigError, ModelError
from multimodal.values.model_graph import ImageInput
from multimodal.values.sample_lengths import ItemLengths, SampleLengths

MAX_DIGITS_TO_DRAW = 3
QUESTION = "draw "
_GLYPH_PIXELS = 8
_STREAMS = {"train": 2, "valid": 3}
"""Numbers of the random streams, apart from those of the digits to read."""


class DigitsToDrawSource:
    """A `SampleSource` that draws sample `index` from (seed, split, index) alone."""

    def __init__(
        self,
        num_samples: int,
        *,
        seed: int,
        split: Literal["train", "valid"],
        unit: str,
        image: ImageInput,
        tokenizer: Tokenizer,
        seq_length: int,
    ) -> None:
        """unit: the generator that is to draw, image: how it cuts what it draws; seq_length: bound of a sample.

        Raises ModelError when the generator's pixel bounds admit no picture, ConfigError when scikit-learn is missing or a
        sample might be longer than seq_length.
        """
        self._num_samples, self._unit, self._image, self._tokenizer = num_samples, unit, image, tokenizer
        self._entropy = (seed, _STREAMS[split])
        self._glyphs = load_handwritten_digits()
        pool = glyph_pool(split)
        self._pools = [pool[self._glyphs.digits[pool] == digit] for digit in range(10)]
        factor = image.patch_size * image.merge_size
        self._cell_pixels = -(-_GLYPH_PIXELS // factor) * factor
        self._counts = [
            count
            for count in range(1, MAX_DIGITS_TO_DRAW + 1)
            if image.min_pixels <= count * self._cell_pixels**2 <= image.max_pixels
        ]
        self._seq_length = seq_length
        self._check()

    def __len__(self) -> int:
        """Number of samples."""
        return self._num_samples

    def question(self, index: int) -> tuple[int, ...]:
        """The digits that sample `index` asks for; raises IndexError beyond the end."""
        return self._draw(index)[0]

    def lengths(self, index: int) -> SampleLengths:
        """Lengths of one sample; `sample_id` is its index."""
        conversation, (rows, columns) = self._conversation(index), self.item_grid(index, 0)
        items = (ItemLengths(self._unit, rows * columns, 0),)
        starts = tuple(start for _, start, _ in conversation.item_starts)
        return SampleLengths(index, items, len(conversation.token_ids), conversation.num_target_tokens, starts)

    def text(self, index: int) -> SampleText:
        """Tokens, labels and where the image belongs, of one sample."""
        return build_sample_text(self._conversation(index), pad_id=self._tokenizer.special.pad)

    def item(self, index: int, item_index: int) -> ItemPixels:
        """Render the image that is to be drawn; ink is 1, paper -1."""
        _, glyphs = self._draw(index)
        placed = tuple(PlacedGlyph(glyph, self._cell_pixels, 0, 0) for glyph in glyphs)
        picture = DigitsPicture(Layout(1, len(glyphs), self._cell_pixels), placed)
        pixels = np.repeat((2 * render_ink(picture, glyphs=self._glyphs) - 1)[:, :, None], self._image.in_channels, axis=2)
        patches = cut_patches(pixels, patch_size=self._image.patch_size, merge_size=self._image.merge_size)
        return ItemPixels(patches, self.item_grid(index, item_index))

    def item_grid(self, index: int, item_index: int) -> tuple[int, int]:
        """(rows, columns) of patches of the image."""
        patches = self._cell_pixels // self._image.patch_size
        return patches, patches * len(self.question(index))

    def _draw(self, index: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(digits, the glyphs that stand for them)."""
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        random = np.random.Generator(np.random.Philox(np.random.SeedSequence((*self._entropy, index))))
        digits = random.integers(10, size=self._counts[int(random.integers(len(self._counts)))])
        glyphs = tuple(int(random.choice(self._pools[digit])) for digit in digits)
        return tuple(digits.tolist()), glyphs

    def _conversation(self, index: int) -> Conversation:
        question = QUESTION + "".join(map(str, self.question(index)))
        segments = (TextSegment("user", question), GeneratedSegment())
        return build_conversation(segments, tokenizer=self._tokenizer, seq_length=self._seq_length)

    def _check(self) -> None:
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
