"""Samples that ask to draw a number of one to three digits, and as many the sum of two pictures of handwritten digits.

    begin user "draw 407" assistant [image] end
    begin [image] [image] user "draw the sum" assistant [image] "13" end

Both pictures show one digit, and the sum is drawn with two. The words behind it say what was drawn.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np

from examples.digits.handwritten_digits import (
    DigitsSample,
    DigitsToDrawSource,
    Split,
    draw_picture,
    grid_of,
    in_turn,
    possible_layouts,
)
from multimodal.data.conversation import GeneratedSegment, ItemSegment, Segment, TextSegment
from multimodal.data.sample_source import SampleRequest, SampleSource
from multimodal.values.errors import ConfigError
from multimodal.values.model_graph import ImageInput, Unit
from multimodal.values.sample_lengths import count_llm_tokens

QUESTION = "draw the sum"


class DigitsToAddSource(DigitsToDrawSource):
    """Pictures of one digit each, whose sum a generator is to draw."""

    _STREAMS: ClassVar[Mapping[Split, int]] = {"train": 4, "valid": 5}

    def __init__(
        self, num_samples: int, *, encoder: Unit, count_outputs: Callable[[tuple[int, int]], int], **others: Any
    ) -> None:
        """encoder: takes the pictures; count_outputs: returns the LLM tokens of one; others: as for `DigitsToDrawSource`."""
        assert encoder.image is not None
        self._encoder, self._shown, self._count_shown = encoder.name, encoder.image, count_outputs
        super().__init__(num_samples, **others)

    def _prepare(self) -> None:
        super()._prepare()
        self._layouts = possible_layouts(self._shown)[:1]

    def _draw(self, random: np.random.Generator, index: int) -> DigitsSample:
        shown = [draw_picture(random, layouts=self._layouts, pool=self._pool, max_digits=1) for _ in range(2)]
        answer = f"{sum(int(self._glyphs.digits[picture.glyphs[0].glyph]) for picture in shown):02d}"
        return DigitsSample((*shown, self._written(random, [*map(int, answer)])), "draw", answer)

    def _units(self, sample: DigitsSample) -> list[tuple[str, ImageInput]]:
        return [*[(self._encoder, self._shown)] * 2, (self._unit, self._image)]

    def _segments(self, sample: DigitsSample) -> Sequence[Segment]:
        pictures = (ItemSegment(self._count_shown(grid_of(picture.layout, self._shown))) for picture in sample.pictures[:2])
        question, answer = TextSegment("user", QUESTION), TextSegment("assistant", sample.answer)
        return *pictures, question, GeneratedSegment(), answer


def open_samples(request: SampleRequest) -> tuple[SampleSource, SampleSource]:
    """Return the training and the validation samples; raises ConfigError or ModelError if the model cannot take them."""
    graph = request.graph
    encoder = next((unit for unit in graph.item_encoders if unit.image is not None), None)
    if not graph.generators or encoder is None:
        raise ConfigError("sums.py needs a model with an image encoder and a generator; use examples/digits_generator/model.yaml")
    painter, count_outputs = graph.generators[0], partial(count_llm_tokens, graph, encoder)
    given = {"seed": request.seed, "unit": painter.name, "image": painter.image, "tokenizer": request.tokenizer}

    def build(num_samples: int, split: Split) -> SampleSource:
        half, more = -(-num_samples // 2), {**given, "split": split, "seq_length": request.seq_length}
        sums = DigitsToAddSource(half, encoder=encoder, count_outputs=count_outputs, **more)
        return in_turn([DigitsToDrawSource(half, **more), sums])

    return build(request.num_train, "train"), build(request.num_valid, "valid")
