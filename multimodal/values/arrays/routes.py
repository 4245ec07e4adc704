"""Routes: the atoms that microbatches of one unit hand to those of the next; arrays, made into objects only on request."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np

from multimodal.values.arrays.microbatches import MicrobatchPlace, NumberedMicrobatches, PickledAlone
from multimodal.values.arrays.placed_atoms import NO_ATOMS, Atom, Microbatch, PlacedAtoms
from multimodal.values.arrays.rows import Integers, integers, order_by, row_starts, take_rows


class Route(NamedTuple):
    """The atoms that one upstream microbatch hands to one downstream microbatch."""

    source: MicrobatchPlace
    target: MicrobatchPlace
    atoms: Microbatch
    """Source atoms, in the order of the target's samples (and of the items inside each)."""


@dataclass(frozen=True, eq=False)
class RouteEnds(PickledAlone):
    """The microbatches that hand something to each other, ordered by source, then target; not what they hand over."""

    microbatches: NumberedMicrobatches
    sources: Integers
    """[num_routes] numbers of microbatches, ascending."""
    targets: Integers

    @cached_property
    def sources_of(self) -> Mapping[MicrobatchPlace, tuple[MicrobatchPlace, ...]]:
        """The microbatches that hand something to each microbatch, in order."""
        return _ByEnd(self.microbatches, self.targets, lambda numbers: self.microbatches.places(self.sources[numbers]))

    @cached_property
    def targets_of(self) -> Mapping[MicrobatchPlace, tuple[MicrobatchPlace, ...]]:
        """The microbatches that each microbatch hands something to, in order."""
        return _ByEnd(self.microbatches, self.sources, lambda numbers: self.microbatches.places(self.targets[numbers]))

    def of_edge(self, source: str, target: str) -> tuple[Integers, Integers]:
        """Return the ends of all routes between two units, as numbers among the microbatches of each, in order."""
        numbered = self.microbatches
        if source not in numbered.first or target not in numbered.first:
            return integers(()), integers(())
        sources, targets = self.sources - numbered.first[source], self.targets - numbered.first[target]
        counts = (numbered.counts[unit].num_microbatches for unit in (source, target))
        is_within = [(ends >= 0) & (ends < count) for ends, count in zip((sources, targets), counts, strict=True)]
        chosen = is_within[0] & is_within[1]
        return sources[chosen], targets[chosen]


@dataclass(frozen=True, eq=False)
class Routes(RouteEnds):
    """All routes of an assignment."""

    atom_starts: Integers
    """[num_routes + 1] into the atoms."""
    sample_ids: Integers
    item_indices: Integers

    @cached_property
    def from_source(self) -> Mapping[MicrobatchPlace, tuple[Route, ...]]:
        """Routes by the microbatch that they come from, in the order of their targets."""
        return _ByEnd(self.microbatches, self.sources, self.make)

    @cached_property
    def to_target(self) -> Mapping[MicrobatchPlace, tuple[Route, ...]]:
        """Routes by the microbatch that they lead to, in the order of their sources."""
        return _ByEnd(self.microbatches, self.targets, self.make)

    def make(self, numbers: Integers) -> tuple[Route, ...]:
        """Return routes as objects. O(their atoms)."""
        starts, atoms = take_rows(self.atom_starts, np.arange(len(self.sample_ids)), numbers)
        columns = self.sample_ids[atoms].tolist(), self.item_indices[atoms].tolist()
        made = list(map(Atom._make, zip(*columns, strict=True)))
        rows = [tuple(made[first:last]) for first, last in pairwise(starts.tolist())]
        ends = (self.microbatches.places(column[numbers]) for column in (self.sources, self.targets))
        return tuple(map(Route, *ends, rows))


Made = TypeVar("Made")


class _ByEnd(Mapping[MicrobatchPlace, tuple[Made, ...]]):
    """Routes by one of their ends; those of a replica are made together on first access, as its ranks read all of them."""

    def __init__(self, microbatches: NumberedMicrobatches, ends: Integers, make: Callable[[Integers], Sequence[Made]]) -> None:
        self._microbatches, self._make = microbatches, make
        self._order = np.argsort(ends, kind="stable")
        self._ends = ends[self._order]
        self._made: dict[MicrobatchPlace, tuple[Made, ...]] = {}
        self._made_replicas: set[tuple[str, int]] = set()

    def __getitem__(self, place: MicrobatchPlace) -> tuple[Made, ...]:
        unit, replica, microbatch = place
        if (unit, replica) not in self._made_replicas:
            first = self._microbatches.number(place) - microbatch
            count = int(self._microbatches.counts[unit].counts[replica])
            starts = np.searchsorted(self._ends, np.arange(first, first + count + 1)).tolist()
            made = self._make(self._order[starts[0] : starts[-1]])
            for index, (start, end) in enumerate(pairwise(starts)):
                if end > start:
                    self._made[MicrobatchPlace(unit, replica, index)] = tuple(made[start - starts[0] : end - starts[0]])
            self._made_replicas.add((unit, replica))
        return self._made[place]

    def __iter__(self) -> Iterator[MicrobatchPlace]:
        return iter(self._microbatches.places(np.unique(self._ends)))

    def __len__(self) -> int:
        return len(np.unique(self._ends))


def build_routes(edges: Mapping[tuple[str, str], bool], placed: Mapping[str, PlacedAtoms]) -> Routes:
    """Match encoder items and samples of the LLM with the downstream microbatch that holds their sample (or the item itself).

    edges: source and target -> True if the target's atoms are the same items. O(atoms log atoms).
    """
    units = {unit: placed.get(unit, NO_ATOMS) for edge in edges for unit in edge}
    numbered = NumberedMicrobatches(units)
    columns = [_match(units, numbered, *edge, by_item=by_item) for edge, by_item in edges.items()]
    sources, targets, sample_ids, item_indices = (
        np.concatenate(column) for column in (zip(*columns, strict=True) if columns else [[integers(())]] * 4)
    )
    order = order_by(sources, targets)
    sources, targets = sources[order], targets[order]
    is_first = np.ones(len(order), bool)
    is_first[1:] = (np.diff(sources) != 0) | (np.diff(targets) != 0)
    firsts = np.flatnonzero(is_first)
    starts = np.append(firsts, len(order)).astype(np.int64)
    return Routes(numbered, sources[firsts], targets[firsts], starts, sample_ids[order], item_indices[order])


def _match(
    units: Mapping[str, PlacedAtoms], numbered: NumberedMicrobatches, source: str, target: str, *, by_item: bool
) -> tuple[Integers, Integers, Integers, Integers]:
    """Return the microbatches at both ends of every handed-over atom, its sample and its index; in the order of the target.

    by_item: True if the target's atoms are the same items; False if they are the samples of the items.
    """
    given, taking = units[source], units[target]
    by_atom = np.lexsort((given.item_indices, given.sample_ids))
    stride = 1 + max(each.item_indices.max(initial=0) for each in (given, taking)) if by_item else 1
    keys, wanted = (each.sample_ids * stride + each.item_indices * by_item for each in (given, taking))
    keys = keys[by_atom]
    first, last = (np.searchsorted(keys, wanted, side=side) for side in ("left", "right"))
    counts = last - first
    atoms = by_atom[np.arange(counts.sum()) + np.repeat(first - row_starts(counts)[:-1], counts)]
    sources = given.microbatch_of_atom[atoms] + numbered.first[source]
    targets = np.repeat(taking.microbatch_of_atom, counts) + numbered.first[target]
    return sources, targets, given.sample_ids[atoms], given.item_indices[atoms]
