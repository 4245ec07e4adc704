"""Real handwritten digits in pictures of many sizes, with a question and an answer: the training data of the quickstart.

The glyphs are the 1797 digits of 8x8 pixels that scikit-learn carries (UCI's optical recognition of handwritten digits), so
nothing is downloaded. Every sixth glyph is kept for validation; training never shows it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from multimodal.data.conversation import (
    Conversation,
    ItemSegment,
    Segment,
    TextSegment,
    build_conversation,
    build_sample_lengths,
    build_sample_text,
)
from multimodal.data.digits_layout import (
    MAX_DIGITS,
    MAX_PICTURES,
    QUESTIONS,
    DigitsPicture,
    DigitsSample,
    Layout,
    draw_digits_sample,
    possible_layouts,
)
from multimodal.data.image_processing import cut_patches
from multimodal.data.sample_source import ItemPixels, SampleText
from multimodal.data.tokenizer import Tokenizer
from multimodal.values.errors import ConfigError
from multimodal.values.model_graph import ImageInput
from multimodal.values.sample_lengths import SampleLengths

Split = Literal["train", "valid"]

_VALIDATION_EVERY = 6
_CACHED_SAMPLES = 4096


class HandwrittenDigits(NamedTuple):
    """All glyphs."""

    ink: npt.NDArray[np.float32]
    """[num_glyphs, 8, 8], from 0 (paper) to 1."""
    digits: npt.NDArray[np.int64]
    """[num_glyphs]: the digit that each shows."""


class RandomPictures(ABC):
    """A `SampleSource` that draws sample `index` from (seed, split, index) only; lengths and texts need no pixels."""

    _STREAMS: ClassVar[Mapping[Split, int]]
    """Numbers of the random streams, different for each kind of sample."""

    def __init__(
        self,
        num_samples: int,
        *,
        seed: int,
        split: Split,
        unit: str,
        image: ImageInput,
        tokenizer: Tokenizer,
        seq_length: int,
        count_outputs: Callable[[tuple[int, int]], int] | None = None,
    ) -> None:
        """unit: the encoder that takes the pictures, or the generator that makes them; image: the unit's image description.

        seq_length: the most tokens of a sample; count_outputs: returns the LLM tokens of a picture with this grid of patches;
        None: the patches after merging.

        Raises ModelError if the unit's pixel bounds admit no picture, ConfigError if scikit-learn is missing or a sample might be
        longer than seq_length.
        """
        self._num_samples, self._unit, self._image, self._tokenizer = num_samples, unit, image, tokenizer
        self._seq_length = seq_length
        self._count_outputs = count_outputs or image.num_output_tokens
        self._entropy = (seed, self._STREAMS[split])
        self._glyphs, self._pool = load_handwritten_digits(), glyph_pool(split)
        self._cached: dict[int, tuple[DigitsSample, Conversation]] = {}
        self._prepare()

    @abstractmethod
    def _prepare(self) -> None:
        """Compute values that drawing needs; raises ModelError or ConfigError if the arguments admit no sample."""

    @abstractmethod
    def _draw(self, random: np.random.Generator) -> DigitsSample:
        """Draw a sample."""

    @abstractmethod
    def _segments(self, sample: DigitsSample) -> Sequence[Segment]:
        """Return the segments of a sample with its pictures in order."""

    def __len__(self) -> int:
        """Number of samples."""
        return self._num_samples

    def sample(self, index: int) -> DigitsSample:
        """Return the pictures, question and answer of a sample; raises IndexError beyond the end."""
        return self._at(index)[0]

    def lengths(self, index: int) -> SampleLengths:
        """Lengths of one sample; `sample_id` is its index."""
        sample, conversation = self._at(index)
        sizes = [self._image.num_tokens(self._grid(picture)) for picture in sample.pictures]
        return build_sample_lengths(conversation, sample_id=index, units=[self._unit] * len(sizes), sizes=sizes)

    def text(self, index: int) -> SampleText:
        """Tokens, labels and picture positions of one sample."""
        return build_sample_text(self._at(index)[1], pad_id=self._tokenizer.special.pad)

    def item(self, index: int, item_index: int) -> ItemPixels:
        """Render one picture; ink is 1, paper -1."""
        picture = self.sample(index).pictures[item_index]
        pixels = np.repeat((2 * render_ink(picture, glyphs=self._glyphs) - 1)[:, :, None], self._image.in_channels, axis=2)
        patches = cut_patches(pixels, patch_size=self._image.patch_size, merge_size=self._image.merge_size)
        return ItemPixels(patches, self._grid(picture))

    def item_grid(self, index: int, item_index: int) -> tuple[int, int]:
        """(rows, columns) of patches of one picture."""
        return self._grid(self.sample(index).pictures[item_index])

    def _grid(self, picture: DigitsPicture) -> tuple[int, int]:
        return self._grid_of(picture.layout)

    def _grid_of(self, layout: Layout) -> tuple[int, int]:
        patches = layout.cell_pixels // self._image.patch_size
        return layout.rows * patches, layout.columns * patches

    def _at(self, index: int) -> tuple[DigitsSample, Conversation]:
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        if index not in self._cached:
            if len(self._cached) >= _CACHED_SAMPLES:
                self._cached.clear()
            sample = self._draw(np.random.Generator(np.random.Philox(np.random.SeedSequence((*self._entropy, index)))))
            segments = self._segments(sample)
            conversation = build_conversation(segments, tokenizer=self._tokenizer, seq_length=self._seq_length)
            self._cached[index] = sample, conversation
        return self._cached[index]


class DigitsSource(RandomPictures):
    """Pictures of digits to read, count or add up."""

    _STREAMS: ClassVar[Mapping[Split, int]] = {"train": 0, "valid": 1}

    def _prepare(self) -> None:
        self._layouts = possible_layouts(self._image)
        self._check_seq_length()

    def _draw(self, random: np.random.Generator) -> DigitsSample:
        return draw_digits_sample(random, layouts=self._layouts, pool=self._pool, digits=self._glyphs.digits)

    def _segments(self, sample: DigitsSample) -> Sequence[Segment]:
        return [
            *(ItemSegment(self._count_outputs(self._grid(picture))) for picture in sample.pictures),
            TextSegment("user", QUESTIONS[sample.kind]),
            TextSegment("assistant", sample.answer),
        ]

    def _check_seq_length(self) -> None:
        picture = max(self._count_outputs(self._grid_of(layout)) for layout in self._layouts)
        question = max(len(self._tokenizer.encode(text)) for text in QUESTIONS.values())
        longest = MAX_PICTURES * (picture + 2) + question + MAX_DIGITS + 4
        if longest > self._seq_length:
            raise ConfigError(
                f"a sample of the digits data has up to {longest} tokens ({MAX_PICTURES} pictures of {picture} and the text), "
                f"--seq-length is {self._seq_length}; set it to {longest} or more, or lower the encoder's max_pixels"
            )


def render_ink(picture: DigitsPicture, *, glyphs: HandwrittenDigits) -> npt.NDArray[np.float32]:
    """Draw a picture: [height, width] in pixels, 0 (paper) to 1; a glyph is scaled to its size by nearest neighbour."""
    rows, columns, cell = picture.layout
    ink = np.zeros((rows * cell, columns * cell), dtype=np.float32)
    for position, placed in enumerate(picture.glyphs):
        nearest = np.arange(placed.size_pixels) * glyphs.ink.shape[1] // placed.size_pixels
        top = position // columns * cell + placed.top_pixels
        left = position % columns * cell + placed.left_pixels
        ink[top : top + placed.size_pixels, left : left + placed.size_pixels] = glyphs.ink[placed.glyph][np.ix_(nearest, nearest)]
    return ink


def glyph_pool(split: Split) -> npt.NDArray[np.int64]:
    """Return the indices of the glyphs of a split."""
    held_out = np.arange(len(load_handwritten_digits().digits)) % _VALIDATION_EVERY == 0
    return np.flatnonzero(held_out if split == "valid" else ~held_out)


@lru_cache(maxsize=1)
def load_handwritten_digits() -> HandwrittenDigits:
    """Read scikit-learn's bundled digits; raises ConfigError when it is not installed."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as problem:
        raise ConfigError("--data-path digits needs scikit-learn; install it with: pip install braid[examples]") from problem
    bundle = load_digits()
    return HandwrittenDigits((bundle.images / bundle.images.max()).astype(np.float32), bundle.target.astype(np.int64))
