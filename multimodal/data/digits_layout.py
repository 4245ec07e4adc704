"""The pictures, question and answer of one sample of the digits data, drawn at random without any pixels.

A picture is a grid of square cells, filled with digits from the top left in reading order; the last cells may stay empty, so
its size does not give away how many digits it shows. A cell is one LLM token wide and high, or two.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from multimodal.values.errors import ModelError
from multimodal.values.model_graph import ImageInput

MAX_DIGITS = 12
"""Most digits in the pictures of one sample."""
MAX_PICTURES = 2
"""Most pictures of one sample."""
SUM_MAX_DIGITS = 2
"""Most digits if the question asks for their sum."""
QUESTIONS = {"read": "read it", "count": "how many", "sum": "what is the sum"}
"""Kind of question -> its text."""
_KINDS = tuple(QUESTIONS)
_KINDS_UP_TO = (0.5, 0.7, 1.0)
"""Cumulative shares of the kinds of question."""
_TWO_PICTURES_SHARE = 0.15
_CELL_GRIDS = ((1, 4), (2, 2), (1, 5), (1, 6), (2, 3), (1, 8), (2, 4), (2, 5), (1, 12), (2, 6))
"""(rows, columns) of cells."""
_CELL_TOKENS = (1, 1, 2)
"""LLM tokens along a cell's side; a size that is listed twice is twice as frequent."""
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
) -> DigitsSample:
    """Draw one sample.

    layouts: equally frequent; pool: indices of the glyphs to choose from; digits: [num_glyphs], the digit that each shows.
    """
    kind = _KINDS[int(np.searchsorted(_KINDS_UP_TO, random.random()))]
    num_pictures = MAX_PICTURES if random.random() < _TWO_PICTURES_SHARE else 1
    max_digits = (SUM_MAX_DIGITS if kind == "sum" else MAX_DIGITS) // num_pictures
    pictures = tuple(_draw_picture(random, layouts=layouts, pool=pool, max_digits=max_digits) for _ in range(num_pictures))
    shown = [int(digits[placed.glyph]) for picture in pictures for placed in picture.glyphs]
    return DigitsSample(pictures, kind, _answer(kind, shown))


def _draw_picture(
    random: np.random.Generator, *, layouts: Sequence[Layout], pool: npt.NDArray[np.int64], max_digits: int
) -> DigitsPicture:
    layout = layouts[int(random.integers(len(layouts)))]
    num_digits = int(random.integers(1, min(max_digits, layout.rows * layout.columns) + 1))
    is_smallest_cell = layout.cell_pixels == layouts[0].cell_pixels
    smallest = layout.cell_pixels if is_smallest_cell else round(_SMALLEST_GLYPH * layout.cell_pixels)
    glyphs = pool[random.integers(len(pool), size=num_digits)]
    sizes = random.integers(smallest, layout.cell_pixels + 1, size=num_digits)
    tops, lefts = (random.random((2, num_digits)) * (layout.cell_pixels - sizes + 1)).astype(np.int64)
    placed = zip(glyphs.tolist(), sizes.tolist(), tops.tolist(), lefts.tolist(), strict=True)
    return DigitsPicture(layout, tuple(PlacedGlyph(*glyph) for glyph in placed))


def _answer(kind: str, shown: Sequence[int]) -> str:
    if kind == "read":
        return "".join(map(str, shown))
    return str(len(shown) if kind == "count" else sum(shown))
