"""The lengths of a sample in tokens, known from metadata before any pixel is decoded."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice
from typing import NamedTuple

import numpy as np


class ItemLengths(NamedTuple):
    """One image or clip of a sample."""

    unit: str
    """The encoder that takes it, or the generator that makes it."""
    num_tokens: int
    """Tokens inside that unit (patches)."""
    num_output_tokens: int
    """Tokens that leave an encoder's projector and enter the LLM; 0 for an item that a generator makes."""
    passes: "tuple[ItemLengths, ...]" = ()
    """Lengths in every encoder of its path and behind each, where encoders feed encoders; empty: the fields above say it all."""

    @property
    def units(self) -> tuple[str, ...]:
        """All units that it passes through, the last one last."""
        return tuple(each.unit for each in self.passes) or (self.unit,)

    def inside(self, unit: str) -> "ItemLengths":
        """Return the lengths inside one of these units."""
        return next((each for each in self.passes if each.unit == unit), self)


@dataclass(frozen=True, slots=True)
class SampleLengths:
    """Lengths of one sample; an item's index counts over all items of the sample in document order."""

    sample_id: int
    items: tuple[ItemLengths, ...]
    num_text_tokens: int
    num_target_tokens: int
    """Text tokens that count in the loss."""
    item_starts: tuple[int, ...] | None = field(default=None, compare=False)
    """The position of each item's first token in the sample's LLM sequence (of a generator's item, that of the token whose hidden
    state it is given). None if unknown, as in tables of lengths; then all items are assumed to come before the text."""
    loss_weight: float = 1.0
    """By which the loss of each of its target tokens is multiplied, and counts in the mean."""
    data_set: int = field(default=0, compare=False)
    """Number of its data set in a mixture, to report losses by."""

    @property
    def starts(self) -> tuple[int, ...]:
        """`item_starts`, or the starts assumed in their place."""
        if self.item_starts is not None:
            return self.item_starts
        return tuple(accumulate((item.num_output_tokens for item in self.items), initial=0))[: len(self.items)]

    @property
    def num_tokens(self) -> int:
        """Tokens of the sample inside the LLM."""
        return self.num_text_tokens + sum(item.num_output_tokens for item in self.items)


def index_by_sample(lengths: Sequence[SampleLengths]) -> Mapping[int, SampleLengths]:
    """Map sample ids to lengths."""
    return {sample.sample_id: sample for sample in lengths}


def draw_length_batches(
    samples: Sequence[SampleLengths], *, batch_size: int, num_batches: int, seed: int | None = None
) -> Iterator[tuple[SampleLengths, ...]]:
    """Yield consecutive global batches of lengths, for tools that train nothing; the samples repeat when they run out.

    seed: for shuffling the samples in every pass; None keeps their order. Sample ids count from 0 over all batches.
    """
    stream = (replace(samples[index], sample_id=number) for number, index in enumerate(_indices(len(samples), seed)))
    for _ in range(num_batches):
        yield tuple(islice(stream, batch_size))


def _indices(count: int, seed: int | None) -> Iterator[int]:
    generator = np.random.default_rng(seed)
    while True:
        yield from range(count) if seed is None else generator.permutation(count).tolist()
