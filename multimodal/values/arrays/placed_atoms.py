"""The placed atoms of one unit as arrays, so that thousands of replicas need no object for each sample."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from multimodal.values.arrays.microbatches import CountedMicrobatches
from multimodal.values.arrays.rows import Integers, integers, row_numbers, row_starts, take_rows


class Atom(NamedTuple):
    """The smallest thing that is assigned: an item of a sample (encoders) or a whole sample (LLM, generators)."""

    sample_id: int
    item_index: int = -1
    """Index among all items of the sample; -1 for the whole sample."""


Microbatch = tuple[Atom, ...]
Replicas = tuple[tuple[Microbatch, ...], ...]
"""The microbatches of each replica of a unit, in their order."""


@dataclass(frozen=True, eq=False)
class PlacedAtoms(CountedMicrobatches):
    """The atoms of one unit, replica after replica, microbatch after microbatch, in packing order."""

    sample_ids: Integers
    """[num_atoms]"""
    item_indices: Integers
    """[num_atoms] as in `Atom`."""
    atom_starts: Integers
    """[num_microbatches + 1] into the atoms."""
    microbatch_starts: Integers
    """[num_replicas + 1] into the microbatches of all replicas."""

    @classmethod
    def of_replicas(cls, replicas: Sequence[Sequence[Sequence[Atom]]]) -> "PlacedAtoms":
        """Build from objects. O(atoms)."""
        microbatches = list(chain.from_iterable(replicas))
        columns = np.array(list(chain.from_iterable(microbatches)), np.int64).reshape(-1, 2)
        samples, items = np.ascontiguousarray(columns[:, 0]), np.ascontiguousarray(columns[:, 1])
        return cls(samples, items, row_starts(list(map(len, microbatches))), row_starts(list(map(len, replicas))))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PlacedAtoms):
            return NotImplemented
        return all(map(np.array_equal, self.__reduce__()[1], other.__reduce__()[1]))

    __hash__ = None  # type: ignore[assignment]

    def with_even_counts(self) -> "PlacedAtoms":
        """Return the same placement with equally many microbatches in every replica: replicas with fewer get empty ones."""
        counts = np.diff(self.microbatch_starts)
        places = np.arange(counts.max(initial=0))
        sizes = np.zeros((len(counts), len(places)), np.int64)
        sizes[places < counts[:, None]] = np.diff(self.atom_starts)
        starts = row_starts(np.full(len(counts), len(places)))
        return PlacedAtoms(self.sample_ids, self.item_indices, row_starts(sizes.ravel()), starts)

    @cached_property
    def microbatch_of_atom(self) -> Integers:
        """[num_atoms]."""
        return row_numbers(self.atom_starts)

    @cached_property
    def replicas(self) -> Replicas:
        """The same as objects. O(atoms)."""
        atoms = list(map(Atom._make, zip(self.sample_ids.tolist(), self.item_indices.tolist(), strict=True)))
        microbatches = [tuple(atoms[first:last]) for first, last in pairwise(self.atom_starts.tolist())]
        return tuple(tuple(microbatches[first:last]) for first, last in pairwise(self.microbatch_starts.tolist()))

    def atoms(self, replica: int, microbatch: int) -> Microbatch:
        """Return one microbatch. O(its atoms)."""
        number = int(self.microbatch_starts[replica]) + microbatch
        if not 0 <= microbatch < self.counts[replica]:
            raise IndexError(f"replica {replica} has {self.counts[replica]} microbatches; there is no microbatch {microbatch}")
        atoms = slice(int(self.atom_starts[number]), int(self.atom_starts[number + 1]))
        columns = self.sample_ids[atoms].tolist(), self.item_indices[atoms].tolist()
        return tuple(map(Atom._make, zip(*columns, strict=True)))

    def rearranged(self, order: Integers, microbatch_starts: Integers) -> "PlacedAtoms":
        """Return these microbatches, by number, in another order, and dealt to the replicas by it."""
        starts, atoms = take_rows(self.atom_starts, np.arange(len(self.sample_ids)), order)
        return PlacedAtoms(self.sample_ids[atoms], self.item_indices[atoms], starts, microbatch_starts)

    def with_samples(self, sample_ids: Integers) -> "PlacedAtoms":
        """Return the places of these samples alone; microbatches that end up empty are left out."""
        is_kept = np.isin(self.sample_ids, sample_ids)
        sizes = np.bincount(self.microbatch_of_atom[is_kept], minlength=self.num_microbatches)
        counts = np.bincount(self.replica_of_microbatch[sizes > 0], minlength=self.num_replicas)
        return PlacedAtoms(self.sample_ids[is_kept], self.item_indices[is_kept], row_starts(sizes[sizes > 0]), row_starts(counts))


NO_ATOMS = PlacedAtoms(integers(()), integers(()), integers((0,)), integers((0,)))
"""A unit without replicas."""
