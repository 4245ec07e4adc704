"""The microbatches of units: how many each replica has, and numbers for all of them; no samples."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from multimodal.values.arrays.rows import Integers, row_numbers, row_starts


class MicrobatchPlace(NamedTuple):
    """One microbatch of one replica of one unit."""

    unit: str
    replica: int
    microbatch: int


def in_subset_order(consumers: Iterable[MicrobatchPlace]) -> tuple[MicrobatchPlace, ...]:
    """Return the consumers of a microbatch in the order of its sample subsets: by microbatch, then replica.

    With one subset per consumer, a subset's gradient arrives in one piece, and samples that the LLM defers come last
    (Entrain 4.5.3).
    """
    return tuple(sorted(consumers, key=lambda each: (each.microbatch, each.replica, each.unit)))


class PickledAlone:
    """Base of dataclasses that pickle their fields alone: values derived from them are larger, and can be derived again."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, column.name) for column in fields(self))  # type: ignore[arg-type]


class CountedMicrobatches(PickledAlone):
    """Facts that follow from the number of microbatches of each replica."""

    microbatch_starts: Integers
    """[num_replicas + 1] into the microbatches of all replicas."""

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        return len(self.microbatch_starts) - 1

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches of all replicas."""
        return int(self.microbatch_starts[-1])

    @cached_property
    def counts(self) -> Integers:
        """[num_replicas] microbatches of each replica."""
        return np.diff(self.microbatch_starts)

    @cached_property
    def replica_of_microbatch(self) -> Integers:
        """[num_microbatches]."""
        return row_numbers(self.microbatch_starts)

    @cached_property
    def index_in_replica(self) -> Integers:
        """[num_microbatches] the number of each microbatch in its replica."""
        return np.arange(self.num_microbatches) - self.microbatch_starts[self.replica_of_microbatch]


@dataclass(frozen=True, eq=False)
class MicrobatchCounts(CountedMicrobatches):
    """The number of microbatches of each replica of a unit."""

    microbatch_starts: Integers


class NumberedMicrobatches:
    """The microbatches of all units, numbered by the names of their units, then by replica and index."""

    def __init__(self, counts: Mapping[str, CountedMicrobatches]) -> None:
        self.units = sorted(counts)
        self.counts = counts
        self.first = dict(zip(self.units, row_starts([counts[unit].num_microbatches for unit in self.units]), strict=False))

    def number(self, place: MicrobatchPlace) -> int:
        """Return the number of a microbatch; raises KeyError if there is no such microbatch."""
        unit, replica, microbatch = place
        counted = self.counts[unit]
        if not (0 <= replica < counted.num_replicas and 0 <= microbatch < counted.counts[replica]):
            raise KeyError(place)
        return int(self.first[unit] + counted.microbatch_starts[replica] + microbatch)

    def places(self, numbers: Integers) -> list[MicrobatchPlace]:
        """Return the microbatches of these numbers."""
        found: list[MicrobatchPlace] = []
        bounds = [*map(int, self.first.values()), np.iinfo(np.int64).max]
        units = np.searchsorted(bounds, numbers, side="right") - 1
        for unit, number in zip(units.tolist(), numbers.tolist(), strict=True):
            counted, own = self.counts[self.units[unit]], number - bounds[unit]
            replica, index = int(counted.replica_of_microbatch[own]), int(counted.index_in_replica[own])
            found.append(MicrobatchPlace(self.units[unit], replica, index))
        return found
