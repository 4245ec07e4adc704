"""The lengths of a sample in tokens, known from metadata before any pixel is decoded, and of its items in all encoders.

Those of a global batch also as arrays.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain, count, islice
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from multimodal.values.arrays.rows import Integers, row_numbers, row_starts, row_sums, take_rows
from multimodal.values.errors import DataError
from multimodal.values.model_graph import ModelGraph, Unit
from multimodal.values.units.items import Grid


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


def draw_length_batches(
    samples: Sequence[SampleLengths], *, batch_size: int, num_batches: int, seed: int | None = None
) -> Iterator[tuple[SampleLengths, ...]]:
    """Yield consecutive global batches of lengths, for tools that train nothing; the samples repeat when they run out.

    seed: for shuffling the samples in every pass; None keeps their order. Sample ids count from 0 over all batches.
    """
    size, generator = len(samples), np.random.default_rng(seed)
    passes = (range(size) if seed is None else generator.permutation(size).tolist() for _ in count())
    stream = (replace(samples[index], sample_id=number) for number, index in enumerate(chain.from_iterable(passes)))
    for _ in range(num_batches):
        yield tuple(islice(stream, batch_size))


def pass_items(graph: ModelGraph, items: Sequence[ItemLengths]) -> tuple[ItemLengths, ...]:
    """Return the lengths of a sample's items in every unit that they pass through; arguments and errors as of `pass_item`.

    A generator makes its items under the condition of tokens that encoders give it, those of the items before each, and of the
    LLM's last tokens; the last one of these is added to all patches.
    """
    passed: list[ItemLengths] = []
    for item in items:
        num_given = sum(count for _, count in list_conditions(graph, item.unit, passed))
        num_tokens = item.num_tokens + num_given + graph.unit(item.unit).num_conditions - 1
        passes = (ItemLengths(item.unit, num_tokens, item.num_tokens),)
        passed.append(item._replace(passes=passes) if num_tokens > item.num_tokens else pass_item(graph, item))
    return tuple(passed)


def list_conditions(graph: ModelGraph, generator: str, items: Sequence[ItemLengths]) -> Iterator[tuple[int, int]]:
    """Yield the items that condition a generator's item, with their tokens; items: all that come before the generator's item."""
    sources = graph.conditions(generator)
    return ((index, each.num_output_tokens) for index, each in enumerate(items) if each.units[-1] in sources)


def condition_tokens(start: int, count: int) -> list[int]:
    """Return the LLM's tokens that condition an item, in its sample; the first one stands for those before the sample.

    start: the token that opens the item; count: how many there are (`Unit.num_conditions`).
    """
    return [max(0, token) for token in range(start + 1 - count, start + 1)]


def pass_item(graph: ModelGraph, item: ItemLengths) -> ItemLengths:
    """Return an item's lengths in every encoder that it passes through, and the tokens that finally enter the LLM.

    item: its lengths in the first encoder, or in a generator. Raises DataError if encoders whose features are joined side by side
    give different numbers of tokens.
    """
    names = graph.item_units(item.unit)
    if len(names) == 1:
        return item
    passes: dict[str, ItemLengths] = {}
    for unit in map(graph.unit, names):
        num_tokens = _num_tokens(graph, unit, item, passes)
        passes[unit.name] = ItemLengths(unit.name, num_tokens, unit.num_outputs(num_tokens))
    return item._replace(num_output_tokens=passes[names[-1]].num_output_tokens, passes=tuple(passes.values()))


def count_llm_tokens(graph: ModelGraph, unit: Unit, grid: Grid) -> int:
    """Return the number of LLM tokens of an item with this grid; unit: the first encoder that takes it."""
    assert unit.item_input is not None, f"unit '{unit.name}' takes no items"
    alone = ItemLengths(unit.name, unit.item_input.num_tokens(grid), unit.num_output_tokens(grid))
    return pass_item(graph, alone).num_output_tokens


def first_joined_token(graph: ModelGraph, unit: str, item: ItemLengths, *, source: str) -> int:
    """Return the index of the first of an item's tokens inside a unit that comes from the encoder `source`."""
    if graph.unit(unit).join == "features":
        return 0
    names = graph.upstream(unit)
    return sum(item.inside(name).num_output_tokens for name in names[: names.index(source)])


def _num_tokens(graph: ModelGraph, unit: Unit, item: ItemLengths, passes: dict[str, ItemLengths]) -> int:
    given = [passes[name].num_output_tokens for name in graph.upstream(unit.name)]
    if not given:  # class tokens are the only tokens that an encoder adds to those of an item
        return item.num_tokens + _num_class_tokens(unit) - _num_class_tokens(graph.unit(item.unit))
    if unit.join == "features" and len(set(given)) > 1:
        raise DataError(
            f"unit '{unit.name}' lays features side by side, but {', '.join(graph.upstream(unit.name))} give {given} tokens of "
            "an item; use join: sequence, or encoders that give equally many"
        )
    return given[0] if unit.join == "features" else sum(given)


def _num_class_tokens(unit: Unit) -> int:
    return 0 if unit.image is None else unit.image.num_class_tokens


@dataclass(frozen=True, eq=False)
class LengthArrays:
    """Lengths of samples, and of the items of all of them, sample after sample in document order.

    An item that passes through several encoders is there once for each.
    """

    sample_ids: Integers
    """[num_samples]"""
    num_text_tokens: Integers
    num_target_tokens: Integers
    item_starts: Integers
    """[num_samples + 1] into the items."""
    unit_of_item: Integers
    """[num_items] into `units`."""
    num_item_tokens: Integers
    num_output_tokens: Integers
    num_llm_tokens: Integers
    """[num_items] those that enter the LLM."""
    index_of_item: Integers
    """[num_items] the index of each item within its sample."""
    units: tuple[str, ...]
    """The units that any item is for."""

    @classmethod
    def of(cls, samples: Sequence[SampleLengths]) -> "LengthArrays":
        """Read samples; raises TypeError or OverflowError where a length is no whole number of 64 bits. O(items)."""
        of_samples = [sample.items for sample in samples]
        items: list[ItemLengths] = list(chain.from_iterable(of_samples))
        llm_tokens = list(map(itemgetter(2), items))
        indices = list(chain.from_iterable(map(range, map(len, of_samples))))
        counts = list(map(len, of_samples))
        if any(map(itemgetter(3), items)):
            counts = [sum(max(1, len(item.passes)) for item in each) for each in of_samples]
            last = [(number, place) for number, item in enumerate(items) for place in range(max(1, len(item.passes)))[::-1]]
            llm_tokens = [0 if place else llm_tokens[number] for number, place in last]
            indices = [indices[number] for number, _ in last]
            items = [each for item in items for each in (item.passes or (item,))]
        names = list(map(itemgetter(0), items))
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return cls(
            sample_ids=_column([sample.sample_id for sample in samples]),
            num_text_tokens=_column([sample.num_text_tokens for sample in samples]),
            num_target_tokens=_column([sample.num_target_tokens for sample in samples]),
            item_starts=row_starts(counts),
            unit_of_item=np.fromiter(map(numbers.__getitem__, names), np.int64, len(names)),
            num_item_tokens=_column(list(map(itemgetter(1), items))),
            num_output_tokens=_column(list(map(itemgetter(2), items))),
            num_llm_tokens=_column(llm_tokens),
            index_of_item=np.array(indices, np.int64),
            units=tuple(numbers),
        )

    def __len__(self) -> int:
        return len(self.sample_ids)

    @cached_property
    def num_tokens(self) -> Integers:
        """[num_samples] tokens of each sample inside the LLM."""
        return self.num_text_tokens + row_sums(self.item_starts, self.num_llm_tokens)

    @cached_property
    def sample_of_item(self) -> Integers:
        """[num_items]."""
        return row_numbers(self.item_starts)

    def items_of(self, unit: str) -> Integers:
        """Return the numbers of a unit's items. O(items)."""
        return np.flatnonzero(self.unit_of_item == (self.units.index(unit) if unit in self.units else -1))

    def take(self, samples: Integers) -> "LengthArrays":
        """Select samples, in any order."""
        starts, items = take_rows(self.item_starts, np.arange(len(self.unit_of_item)), samples)
        of_samples = ("sample_ids", "num_text_tokens", "num_target_tokens")
        of_items = ("unit_of_item", "num_item_tokens", "num_output_tokens", "num_llm_tokens", "index_of_item")
        taken = {name: getattr(self, name)[samples] for name in of_samples}
        return replace(self, item_starts=starts, **taken, **{name: getattr(self, name)[items] for name in of_items})


class LengthBatch(tuple[SampleLengths, ...]):
    """The lengths of a global batch, which are read into arrays only once."""

    @classmethod
    def of(cls, lengths: Sequence[SampleLengths]) -> "LengthBatch":
        """Return the lengths as a batch; a batch is returned as it is."""
        return lengths if isinstance(lengths, cls) else cls(lengths)

    @cached_property
    def arrays(self) -> LengthArrays:
        """The samples as arrays, in the order of the batch; raises as `LengthArrays.of`."""
        return LengthArrays.of(self)

    @cached_property
    def by_id(self) -> LengthArrays:
        """The samples as arrays, in the order of their ids."""
        arrays = self.arrays
        is_ascending = bool((arrays.sample_ids[1:] > arrays.sample_ids[:-1]).all())
        return arrays if is_ascending else arrays.take(np.argsort(arrays.sample_ids, kind="stable"))


def _column(values: list[int]) -> Integers:
    if not all(issubclass(kind, int) for kind in set(map(type, values))):
        raise TypeError("lengths are whole numbers")
    return np.array(values, np.int64)
