"""Real handwritten digits in pictures of many sizes, with a question and an answer: the samples of the quickstart.

The glyphs are the 1797 digits of 8x8 pixels that scikit-learn carries (UCI's optical recognition of handwritten digits), so
nothing is downloaded. Every sixth glyph is kept for validation; training never shows it.

A picture is a grid of square cells, filled with digits from the top left in reading order; the last cells may stay empty, so
its size does not give away how many digits it shows. A cell is one LLM token wide and high, or two. Encoders read pictures; a
generator is asked to draw them:

    begin user "draw 407" assistant [image] end

Those digits stand side by side, each drawn at random among the handwritten examples of its value: no model can know which, so
the best answer to "draw 4" is the mean of all fours.

This file is also an example of a program that makes samples: `--data-path FILE.py` calls its `open_samples` (docs/data.md).
"""

from abc import ABC, abstractmethod
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from multimodal.data.conversation import (
    Conversation,
    GeneratedSegment,
    ItemSegment,
    Segment,
    TextSegment,
    build_conversation,
    build_sample_lengths,
    build_sample_text,
)
from multimodal.data.image_processing import cut_patches
from multimodal.data.sample_source import ItemPixels, SampleRequest, SampleSource, SampleText
from multimodal.data.source_views import JoinedSources, SourceSubset
from multimodal.data.tokenizer import Tokenizer
from multimodal.values.errors import ConfigError, ModelError
from multimodal.values.model_graph import ImageInput, Role, Unit
from multimodal.values.sample_lengths import SampleLengths, count_llm_tokens

MAX_DIGITS = 12
"""Most digits in the pictures of one sample."""
MAX_PICTURES = 2
"""Most pictures of one sample."""
SUM_MAX_DIGITS = 2
"""Most digits if the question asks for their sum."""
QUESTIONS = {"read": "read", "count": "how many", "sum": "add"}
"""Kind of question -> its text."""
_KINDS = tuple(QUESTIONS)
_KINDS_UP_TO = (0.5, 0.7, 1.0)
"""Cumulative shares of the kinds of question."""
_TWO_PICTURES_SHARE = 0.15
_CELL_GRIDS = ((1, 4), (2, 2), (1, 5), (1, 6), (2, 3), (1, 8), (2, 4), (2, 5), (1, 12), (2, 6))
"""(rows, columns) of cells."""
_CELL_TOKENS = (1, 1, 2)
"""LLM tokens along a cell's side; a size that is listed twice is twice as frequent."""
_FIRST_SKEW = 5.0
"""Training begins with few digits a picture: their number goes by a uniform number to this power, which then falls to 1."""
_EVEN_FROM = 12000
"""The first training sample for which all numbers of digits are equally frequent."""
_MOST_MOVED = 1
"""Most pixels by which handwriting is moved from then on: with 1497 examples, seen 70 times each, others are read worse."""
_SMALLEST_GLYPH = 0.92
"""Side of the smallest glyph in a cell of several tokens, relative to the cell's."""


class PlacedGlyph(NamedTuple):
    """One handwritten digit in its cell."""

    glyph: int
    """Index into the handwritten digits."""
    size_pixels: int
    """Side of the square that it is scaled to."""
    top_pixels: int
    """Offset of that square inside the cell."""
    left_pixels: int
    down: int = 0
    """Pixels of the handwriting, before it is scaled, by which it is moved in its square; so is `right`."""
    right: int = 0


class Layout(NamedTuple):
    """The cells of a picture."""

    rows: int
    columns: int
    cell_pixels: int


@dataclass(frozen=True, slots=True)
class DigitsPicture:
    """One picture; its glyphs fill the cells in reading order."""

    layout: Layout
    glyphs: tuple[PlacedGlyph, ...]


@dataclass(frozen=True, slots=True)
class DigitsSample:
    """Pictures, a question about all of their digits (or that asks for them), and the answer."""

    pictures: tuple[DigitsPicture, ...]
    kind: str
    """A key of QUESTIONS, or "draw"."""
    answer: str


def possible_layouts(image_input: ImageInput) -> tuple[Layout, ...]:
    """Return the layouts whose area lies within the encoder's pixel bounds; raises ModelError if none does."""
    token_pixels = image_input.patch_size * image_input.merge_size
    layouts = tuple(
        Layout(rows, columns, side * token_pixels)
        for side in _CELL_TOKENS
        for rows, columns in _CELL_GRIDS
        if image_input.min_pixels <= rows * columns * (side * token_pixels) ** 2 <= image_input.max_pixels
    )
    if not layouts:
        raise ModelError(
            f"no picture of digits fits the encoder's image: patch_size x merge_size = {token_pixels} pixels make pictures of "
            f"{4 * token_pixels**2} to {MAX_DIGITS * 4 * token_pixels**2} pixels, and min_pixels is {image_input.min_pixels}, "
            f"max_pixels {image_input.max_pixels}; widen these bounds"
        )
    return layouts


def draw_digits_sample(
    random: np.random.Generator,
    *,
    layouts: Sequence[Layout],
    pool: npt.NDArray[np.int64],
    digits: npt.NDArray[np.int64],
    skew: float = 1.0,
    most_moved: int = 0,
) -> DigitsSample:
    """Draw one sample.

    layouts: equally frequent; pool: indices of the glyphs to choose from; digits: [num_glyphs], the digit that each shows; skew:
    above 1 pictures with few digits are more frequent than those with many; most_moved: pixels, of a digit's handwriting.
    """
    kind = _KINDS[bisect(_KINDS_UP_TO, random.random())]
    num_pictures = MAX_PICTURES if random.random() < _TWO_PICTURES_SHARE else 1
    max_digits = (SUM_MAX_DIGITS if kind == "sum" else MAX_DIGITS) // num_pictures
    pictures = tuple(
        draw_picture(random, layouts=layouts, pool=pool, max_digits=max_digits, skew=skew, most_moved=most_moved)
        for _ in range(num_pictures)
    )
    shown = [int(digits[placed.glyph]) for picture in pictures for placed in picture.glyphs]
    return DigitsSample(pictures, kind, _answer(kind, shown))


def draw_picture(
    random: np.random.Generator,
    *,
    layouts: Sequence[Layout],
    pool: npt.NDArray[np.int64],
    max_digits: int,
    skew: float = 1.0,
    most_moved: int = 0,
) -> DigitsPicture:
    """Draw one picture, as `draw_digits_sample` does."""
    layout = layouts[int(random.integers(len(layouts)))]
    num_digits = 1 + int(random.random() ** skew * min(max_digits, layout.rows * layout.columns))
    is_smallest_cell = layout.cell_pixels == layouts[0].cell_pixels
    smallest = layout.cell_pixels if is_smallest_cell else round(_SMALLEST_GLYPH * layout.cell_pixels)
    drawn = random.random((6, num_digits))
    sizes = smallest + (drawn[1] * (layout.cell_pixels + 1 - smallest)).astype(np.int64)
    moves = ((2 * most_moved + 1) * drawn[4:]).astype(np.int64) - most_moved
    tops, lefts = (drawn[2:4] * (layout.cell_pixels + 1 - sizes)).astype(np.int64).tolist()
    glyphs = pool[(drawn[0] * len(pool)).astype(np.int64)].tolist()
    return DigitsPicture(layout, tuple(map(PlacedGlyph, glyphs, sizes.tolist(), tops, lefts, *moves.tolist())))


def _answer(kind: str, shown: Sequence[int]) -> str:
    if kind == "read":
        return "".join(map(str, shown))
    if kind == "sum" and len(shown) > 1:
        return f"{'+'.join(map(str, shown))}={sum(shown)}"
    return str(len(shown) if kind == "count" else sum(shown))


Split = Literal["train", "valid"]

_GLYPH_PIXELS = 8
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
        self._key, self._split = (8 * seed + self._STREAMS[split]) % 2**64 << 64, split
        self._glyphs, self._pool = load_handwritten_digits(), glyph_pool(split)
        self._cached: dict[int, tuple[DigitsSample, Conversation]] = {}
        self._prepare()

    @abstractmethod
    def _prepare(self) -> None:
        """Compute values that drawing needs; raises ModelError or ConfigError if the arguments admit no sample."""

    @abstractmethod
    def _draw(self, random: np.random.Generator, index: int) -> DigitsSample:
        """Draw sample `index`."""

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
        units = self._units(sample)
        grids = [self.item_grid(index, item_index) for item_index in range(len(units))]
        sizes = [image.num_tokens(grid) for (_, image), grid in zip(units, grids, strict=True)]
        return build_sample_lengths(conversation, sample_id=index, units=[name for name, _ in units], sizes=sizes)

    def text(self, index: int) -> SampleText:
        """Tokens, labels and picture positions of one sample."""
        return build_sample_text(self._at(index)[1], pad_id=self._tokenizer.special.pad)

    def item(self, index: int, item_index: int) -> ItemPixels:
        """Render one picture; ink is 1, paper -1."""
        sample = self.sample(index)
        picture, (_, image) = sample.pictures[item_index], self._units(sample)[item_index]
        pixels = np.repeat((2 * render_ink(picture, glyphs=self._glyphs) - 1)[:, :, None], image.in_channels, axis=2)
        patches = cut_patches(pixels, patch_size=image.patch_size, merge_size=image.merge_size)
        return ItemPixels(patches, grid_of(picture.layout, image))

    def item_grid(self, index: int, item_index: int) -> tuple[int, int]:
        """(rows, columns) of patches of one picture."""
        sample = self.sample(index)
        return grid_of(sample.pictures[item_index].layout, self._units(sample)[item_index][1])

    def _units(self, sample: DigitsSample) -> list[tuple[str, ImageInput]]:
        """Return the unit that takes or makes each picture, and its image description."""
        return [(self._unit, self._image)] * len(sample.pictures)

    def _at(self, index: int) -> tuple[DigitsSample, Conversation]:
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        if index not in self._cached:
            if len(self._cached) >= _CACHED_SAMPLES:
                self._cached.clear()
            random = np.random.Generator(np.random.Philox(key=self._key + index))
            sample = self._draw(random, index)
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

    def _draw(self, random: np.random.Generator, index: int) -> DigitsSample:
        skew = max(1.0, _FIRST_SKEW - (_FIRST_SKEW - 1) * index / _EVEN_FROM) if self._split == "train" else 1.0
        moved, digits = _MOST_MOVED * (self._split == "train" and index >= _EVEN_FROM), self._glyphs.digits
        return draw_digits_sample(random, layouts=self._layouts, pool=self._pool, digits=digits, skew=skew, most_moved=moved)

    def _segments(self, sample: DigitsSample) -> Sequence[Segment]:
        return [
            *(ItemSegment(self._count_outputs(grid_of(picture.layout, self._image))) for picture in sample.pictures),
            TextSegment("user", QUESTIONS[sample.kind]),
            TextSegment("assistant", sample.answer),
        ]

    def _check_seq_length(self) -> None:
        picture = max(self._count_outputs(grid_of(layout, self._image)) for layout in self._layouts)
        question = max(len(self._tokenizer.encode(text)) for text in QUESTIONS.values())
        longest = MAX_PICTURES * (picture + 2) + question + MAX_DIGITS + 4
        if longest > self._seq_length:
            raise ConfigError(
                f"a sample of the digits data has up to {longest} tokens ({MAX_PICTURES} pictures of {picture} and the text), "
                f"--seq-length is {self._seq_length}; set it to {longest} or more, or lower the encoder's max_pixels"
            )


def grid_of(layout: Layout, image: ImageInput) -> tuple[int, int]:
    """Return the (rows, columns) of patches of a picture with this layout."""
    patches = layout.cell_pixels // image.patch_size
    return layout.rows * patches, layout.columns * patches


def render_ink(picture: DigitsPicture, *, glyphs: HandwrittenDigits) -> npt.NDArray[np.float32]:
    """Draw a picture: [height, width] in pixels, 0 (paper) to 1; a glyph is scaled to its size by nearest neighbour."""
    rows, columns, cell = picture.layout
    ink = np.zeros((rows * cell, columns * cell), dtype=np.float32)
    for position, placed in enumerate(picture.glyphs):
        side = glyphs.ink.shape[1]
        nearest = np.arange(placed.size_pixels) * side // placed.size_pixels
        within = np.ix_(*((nearest - moved).clip(0, side - 1) for moved in (placed.down, placed.right)))
        top = position // columns * cell + placed.top_pixels
        left = position % columns * cell + placed.left_pixels
        ink[top : top + placed.size_pixels, left : left + placed.size_pixels] = glyphs.ink[placed.glyph][within]
    return ink


def glyph_pool(split: Split) -> npt.NDArray[np.int64]:
    """Return the indices of the glyphs of a split."""
    held_out = np.arange(len(load_handwritten_digits().digits)) % _VALIDATION_EVERY == 0
    return np.flatnonzero(held_out if split == "valid" else ~held_out)


@lru_cache(maxsize=1)
def load_handwritten_digits() -> HandwrittenDigits:
    """Read scikit-learn's bundled digits; raises ConfigError when it is not installed."""
    package = find_spec("sklearn")  # found, not imported, for which every start would wait longer than for all else of this file
    if package is None or package.origin is None:
        raise ConfigError("--data-path digits needs scikit-learn; install it with: pip install 'braid[examples]'")
    rows = np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    ink = rows[:, :-1].reshape(-1, _GLYPH_PIXELS, _GLYPH_PIXELS)
    return HandwrittenDigits((ink / ink.max()).astype(np.float32), rows[:, -1].astype(np.int64))


MAX_DIGITS_TO_DRAW = 3
QUESTION = "draw "


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

    def _draw(self, random: np.random.Generator, index: int) -> DigitsSample:
        digits = random.integers(10, size=self._counts[int(random.integers(len(self._counts)))])
        return DigitsSample((self._written(random, digits),), "draw", "".join(map(str, digits)))

    def _written(self, random: np.random.Generator, digits: Sequence[int] | npt.NDArray[np.int64]) -> DigitsPicture:
        """Return digits side by side, in handwriting of any hand."""
        glyphs = tuple(PlacedGlyph(int(random.choice(self._pools[digit])), self._cell_pixels, 0, 0) for digit in digits)
        return DigitsPicture(Layout(1, len(glyphs), self._cell_pixels), glyphs)

    def _segments(self, sample: DigitsSample) -> Sequence[Segment]:
        return TextSegment("user", QUESTION + sample.answer), GeneratedSegment()


def open_samples(request: SampleRequest) -> tuple[SampleSource, SampleSource]:
    """Return the training and the validation samples; raises ConfigError or ModelError if the model cannot take them."""
    graph = request.graph
    encoders = [unit for unit in graph.item_encoders if unit.image is not None]
    if not encoders:
        raise ConfigError("--data-path digits needs a model with an image encoder, found none; use examples/digits/model.yaml")
    for unit in encoders:
        if unit.image is not None and (unit.image.image_size is not None or unit.image.num_frames > 1):
            raise ConfigError(
                f"--data-path digits draws pictures of many sizes and one frame, but the images of unit '{unit.name}' have "
                "one size (image_size) or several frames (num_frames); use a manifest"
            )
    if len(graph.generators) > 1:
        raise ConfigError(
            f"--data-path digits has work for one generator, found {len(graph.generators)}; use "
            "examples/digits_generator/model.yaml"
        )
    kinds: list[tuple[Callable[..., SampleSource], Unit]] = [(DigitsSource, unit) for unit in encoders]
    kinds += [(DigitsToDrawSource, unit) for unit in graph.generators]

    def build(num_samples: int, split: Split) -> SampleSource:
        sources = [
            kind(
                -(-num_samples // len(kinds)),
                seed=request.seed,
                split=split,
                unit=unit.name,
                image=unit.image,
                count_outputs=partial(count_llm_tokens, graph, unit) if unit.role is Role.ENCODER else None,
                tokenizer=request.tokenizer,
                seq_length=request.seq_length,
            )
            for kind, unit in kinds
        ]
        return sources[0] if len(sources) == 1 else in_turn(sources)

    return build(request.num_train, "train"), build(request.num_valid, "valid")


def in_turn(sources: Sequence[SampleSource]) -> SampleSource:
    """Return the samples of sources of one length in turn: the first of each, the second of each, and so on."""
    joined = JoinedSources(sources)
    return SourceSubset(joined, np.arange(len(joined)).reshape(len(sources), -1).T.ravel())
