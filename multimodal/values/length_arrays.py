"""The lengths of a global batch as arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import attrgetter, itemgetter

import numpy as np

from multimodal.values.arrays.rows import Integers, row_numbers, row_starts, take_rows
from multimodal.values.sample_lengths import ItemLengths, SampleLengths


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
            sample_ids=_column(list(map(attrgetter("sample_id"), samples))),
            num_text_tokens=_column(list(map(attrgetter("num_text_tokens"), samples))),
            num_target_tokens=_column(list(map(attrgetter("num_target_tokens"), samples))),
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
        before = row_starts(self.num_llm_tokens)
        return self.num_text_tokens + before[self.item_starts[1:]] - before[self.item_starts[:-1]]

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
        return LengthArrays(
            sample_ids=self.sample_ids[samples],
            num_text_tokens=self.num_text_tokens[samples],
            num_target_tokens=self.num_target_tokens[samples],
            item_starts=starts,
            unit_of_item=self.unit_of_item[items],
            num_item_tokens=self.num_item_tokens[items],
            num_output_tokens=self.num_output_tokens[items],
            num_llm_tokens=self.num_llm_tokens[items],
            index_of_item=self.index_of_item[items],
            units=self.units,
        )


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
