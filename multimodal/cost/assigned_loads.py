"""The load that an assignment puts on each unit, microbatch by microbatch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from multimodal.cost.memoize import memoized
from multimodal.cost.token_shares import ItemDealer, RankLoad
from multimodal.cost.unit_load import ComputedLoad, CutLoad, UnitLoad, add_loads, atom_loads, atom_numbers, of_all_ranks
from multimodal.values.arrays.rows import Integers, row_starts, row_sums
from multimodal.values.assignment import Assignment, Microbatch, PlacedAtoms, Routes
from multimodal.values.model_graph import Role
from multimodal.values.sample_lengths import ItemLengths, LengthArrays, LengthBatch, SampleLengths
from multimodal.values.shape import StepShape
from multimodal.values.work.step_work import FORWARD, StepWork


@dataclass(frozen=True)
class AssignedLoads:
    """Loads of microbatches, parts and routes of one global batch."""

    shape: StepShape
    assignment: Assignment
    lengths: Sequence[SampleLengths]
    item_block_size: int | None = None

    @memoized
    def of_microbatches(self, unit: str) -> UnitLoad:
        """The loads of all microbatches of a unit, replica after replica: one load whose numbers are arrays."""
        return self._sums(unit, self.assignment.placed[unit])

    def of_routes(self, unit: str) -> UnitLoad:
        """The loads of a unit's outputs, route by route, in the order of `UnitRoutes`."""
        return self._sums(unit, self.routes_from(unit))

    def of_subsets(self, unit: str) -> UnitLoad:
        """The loads of the sample subsets of all microbatches, in the order of `StepShape.consumers`."""
        routes = self.routes_from(unit)
        columns: list[Any] = [np.asarray(column)[routes.by_consumer] for column in self.of_routes(unit)]
        return UnitLoad(*columns)

    @memoized
    def routes_from(self, unit: str) -> "UnitRoutes":
        """The routes along which a unit hands on its results."""
        routes, count = self.assignment.routes(self.shape.graph), self.assignment.placed[unit].num_microbatches
        return UnitRoutes.of(routes, count, unit)

    def num_conditions(self, unit: str, generator: str) -> Integers:
        """Rows that the LLM hands to a generator on each of its routes: equally many for each image that the generator makes."""
        lengths, routes = self._lengths, self.routes_from(unit)
        images = np.bincount(lengths.sample_of_item[lengths.items_of(generator)], minlength=len(lengths))
        num_images = row_sums(routes.atom_starts, images[np.searchsorted(lengths.sample_ids, routes.sample_ids)])
        return num_images * self.shape.graph.unit(generator).num_conditions

    def num_elements(self, work: StepWork, producers: Integers, consumers: Integers) -> Integers:
        """Return the elements of the activations that travel between pieces; their gradients have as many."""
        is_forward = work.kinds[producers] == FORWARD
        sources, targets = np.where(is_forward, (producers, consumers), (consumers, producers))
        found, units = np.zeros(len(producers), np.int64), tuple(work.pieces.units)
        ends = (work.pieces.unit_of_stage[work.computed_stages[each]] for each in (sources, targets))
        edges = np.ravel_multi_index(tuple(ends), (len(units), len(units)))
        for edge in np.flatnonzero(np.bincount(edges)).tolist():
            (source, target), chosen = divmod(edge, len(units)), np.flatnonzero(edges == edge)
            if source == target:
                found[chosen] = self._inside(work, units[source], sources[chosen])
            else:
                numbers = (work.pieces.numbers_in_unit[each[chosen]] for each in (sources, targets))
                found[chosen] = self._between(units[source], units[target], *numbers)
        return found

    def _inside(self, work: StepWork, unit: str, sources: Integers) -> Integers:
        replicas, graph = self.shape.plan.units[unit].replicas, self.shape.graph
        ends, numbers = np.unique(work.computed_stages[sources], return_inverse=True)
        places = zip(work.pieces.replica_of_stage[ends].tolist(), work.pieces.index_of_stage[ends].tolist(), strict=True)
        layers = (replicas[replica].virtual_stages[index].layers for replica, index in places)
        hidden: Integers = np.array([graph.width_behind(unit, each.stop - 1) for each in layers], np.int64)[numbers]
        rows, parts, kept = work.pieces.numbers_in_unit[sources], work.pieces.parts[sources], self.kept(unit)
        num_tokens = np.asarray(kept.whole.num_tokens + kept.cut.num_tokens)[rows]
        is_subset = (parts >= 0) & ~work.pieces.is_range[sources]
        if is_subset.any():
            subsets = self.routes_from(unit).subset_starts[rows] + parts
            of_subsets = np.append(self.of_subsets(unit).num_tokens, 0)
            num_tokens = np.where(is_subset, of_subsets[np.where(is_subset, subsets, -1)], num_tokens)
        return num_tokens * hidden

    def _between(self, source: str, target: str, sources: Integers, targets: Integers) -> Integers:
        graph, routes = self.shape.graph, self.routes_from(source).find(sources, targets, unit=target)
        if graph.unit(source).role is Role.ENCODER:
            num_rows = np.asarray(self.of_routes(source).num_outputs)
            return num_rows[routes] * graph.width_behind(source, len(graph.unit(source).layers) - 1)
        return self.num_conditions(source, target)[routes] * graph.unit(source).transformer.hidden_size

    def computed(self, unit: str, *, of_subsets: bool = False) -> Sequence[ComputedLoad]:
        """The loads that determine the seconds of microbatches, or of sample subsets."""
        if unit not in self._dealers:
            return list(map(ComputedLoad, _rows(self.of_subsets(unit) if of_subsets else self.of_microbatches(unit))))
        places = (place for place in self.shape.microbatches if place.unit == unit)
        if of_subsets:
            return [self._busiest(unit, atoms) for place in places for atoms in self.assignment.subsets(self.shape.graph, place)]
        return [self._busiest(unit, self.assignment.atoms(place)) for place in places]

    @memoized
    def kept(self, unit: str) -> RankLoad:
        """Return each microbatch's load on the context parallel rank with the most tokens, times their number, as arrays."""
        if unit in self._dealers and self.assignment.placed[unit].num_microbatches:
            places = (place for place in self.shape.microbatches if place.unit == unit)
            shared = (self._rank_loads(unit, self.assignment.atoms(place)) for place in places)
            fullest = [max(parts, key=lambda part: part.whole.num_tokens + part.cut.num_tokens) for parts in shared]
            of_all = ([of_all_ranks(load, self._dealers[unit].num_ranks) for load in part] for part in fullest)
            columns: list[Any] = [np.array(part, np.int64).reshape(-1, 4).T for part in zip(*of_all, strict=True)]
            return RankLoad(*(UnitLoad(*part) for part in columns))
        loads = self.of_microbatches(unit)
        nothing = UnitLoad(*(np.zeros_like(column) for column in loads))  # type: ignore[arg-type]
        is_spread = self.shape.plan.units[unit].context_parallel_size > 1
        return RankLoad(nothing, loads) if is_spread else RankLoad(loads, nothing)

    def num_gathered(self, unit: str, replica: int) -> int:
        """Most tokens of a microbatch whose keys and values are gathered over context parallel ranks."""
        if unit not in self._dealers:
            return self.fullest(unit)[replica].cut.num_tokens
        cut = [[part.cut for part in self._rank_loads(unit, atoms)] for atoms in self.assignment.placed[unit].replicas[replica]]
        return max((add_loads(parts).num_tokens for parts in cut), default=0)

    def _busiest(self, unit: str, atoms: Microbatch) -> ComputedLoad:
        dealer, parts = self._dealers[unit], self._rank_loads(unit, atoms)
        busiest = max(parts, key=dealer.work)
        num_gathered = dealer.num_ranks * max(part.cut.num_tokens for part in parts)
        cut = CutLoad(of_all_ranks(busiest.cut, dealer.num_ranks), num_gathered)
        return ComputedLoad(of_all_ranks(add_loads(busiest), dealer.num_ranks), cut)

    @memoized
    def _rank_loads(self, unit: str, atoms: Microbatch) -> tuple[RankLoad, ...]:
        dealer, items = self._dealers[unit], list[ItemLengths]()
        for sample_id, index in atoms:
            of_sample = self._by_sample[sample_id].items
            items += [each for each in of_sample if each.unit == unit] if index < 0 else [of_sample[index].inside(unit)]
        return dealer.rank_loads(items)

    @memoized
    def fullest(self, unit: str) -> Sequence[RankLoad]:
        """Return each replica's kept load of the microbatch with the most tokens on one rank; empty where it has none."""
        placed, kept = self.assignment.placed[unit], self.kept(unit)
        num_tokens = np.asarray(kept.whole.num_tokens + kept.cut.num_tokens)
        order = np.lexsort((-num_tokens, placed.replica_of_microbatch))
        has_any = np.flatnonzero(placed.counts)
        chosen = order[placed.microbatch_starts[has_any]]
        found = [RankLoad(UnitLoad(), UnitLoad())] * placed.num_replicas
        for replica, whole, cut in zip(has_any.tolist(), *(_rows(load, chosen) for load in kept), strict=True):
            found[replica] = RankLoad(whole, cut)
        return found

    @memoized
    def means(self, unit: str) -> Sequence[UnitLoad]:
        """The mean load of each replica's microbatches, rounded up; the empty load where it has none."""
        starts = self.assignment.placed[unit].microbatch_starts
        totals = (row_sums(starts, np.asarray(column).astype(np.int64)) for column in self.of_microbatches(unit))
        columns: Any = [-(-total // np.maximum(1, np.diff(starts))) for total in totals]
        return _rows(UnitLoad(*columns))

    def num_received_rows(self, unit: str) -> Integers:
        """Rows that encoders hand to each microbatch of a unit, each counted as often as it is used."""
        placed, lengths, described = self.assignment.placed[unit], self._lengths, self.shape.graph.unit(unit)
        if described.join is not None:
            num_tokens = np.asarray(self.of_microbatches(unit).num_tokens, np.int64)
            return num_tokens * (len(self.shape.graph.upstream(unit)) if described.join == "features" else 1)
        if described.role is not Role.BACKBONE:
            loads = self.of_microbatches(unit)
            return np.asarray(loads.num_tokens - loads.num_outputs, np.int64) * self.shape.graph.takes_tokens(unit)
        rows = row_sums(lengths.item_starts, lengths.num_llm_tokens)
        return row_sums(placed.atom_starts, rows[np.searchsorted(lengths.sample_ids, placed.sample_ids)])

    def _sums(self, unit: str, rows: "PlacedAtoms | UnitRoutes") -> UnitLoad:
        """Add up the loads of atoms row by row."""
        described, starts, columns = self.shape.graph.unit(unit), rows.atom_starts, list[Any]()
        atoms = atom_numbers(described, self._lengths, rows.sample_ids, rows.item_indices)
        for column in atom_loads(described, self._lengths)[1:]:
            before = np.add.accumulate(np.append(0, column[atoms]))
            columns.append(before[starts[1:]] - before[starts[:-1]])
        return UnitLoad(*columns)

    @cached_property
    def _dealers(self) -> Mapping[str, ItemDealer]:
        """Return the dealers of the units whose context parallel ranks compute whole items."""
        if self.item_block_size is None:
            return {}
        graph, units = self.shape.graph, self.shape.plan.units.items()
        sizes = ((name, unit.context_parallel_size) for name, unit in units if not graph.unit(name).is_causal)
        return {name: ItemDealer(graph, name, size, self.item_block_size) for name, size in sizes if size > 1}

    @cached_property
    def _lengths(self) -> LengthArrays:
        return LengthBatch.of(self.lengths).by_id

    @cached_property
    def _by_sample(self) -> Mapping[int, SampleLengths]:
        return {sample.sample_id: sample for sample in self.lengths}


@dataclass(frozen=True, eq=False)
class UnitRoutes:
    """The routes that lead from one unit, ordered by source, then target; as in `Routes`."""

    keys: Integers
    """[num_routes] ascending: the microbatch that a route comes from, then the one it leads to."""
    num_targets: int
    first_target: Mapping[str, int]
    """Target unit -> number that its first microbatch has in `keys`."""
    by_consumer: Integers
    """[num_routes] the routes in the order of `StepShape.consumers`."""
    subset_starts: Integers
    """[num_microbatches + 1] into `by_consumer`."""
    atom_starts: Integers
    sample_ids: Integers
    item_indices: Integers

    @classmethod
    def of(cls, routes: Routes, num_microbatches: int, unit: str) -> "UnitRoutes":
        """Find the routes of a unit with so many microbatches. O(routes log routes)."""
        numbered = routes.microbatches
        first = int(numbered.first.get(unit, 0))
        is_source = unit in numbered.first
        chosen = slice(*np.searchsorted(routes.sources, (first, first + num_microbatches * is_source)).tolist())
        sources, targets = routes.sources[chosen] - first, routes.targets[chosen]
        index, replica = (
            np.concatenate([getattr(numbered.counts[name], column) for name in numbered.units] or [targets])[targets]
            for column in ("index_in_replica", "replica_of_microbatch")
        )
        num_targets = int(targets.max(initial=0)) + 1
        atoms = slice(int(routes.atom_starts[chosen.start]), int(routes.atom_starts[chosen.stop]))
        return cls(
            keys=sources * num_targets + targets,
            num_targets=num_targets,
            first_target={name: int(start) for name, start in numbered.first.items()},
            by_consumer=np.lexsort((targets, replica, index, sources)),
            subset_starts=row_starts(np.bincount(sources, minlength=num_microbatches)),
            atom_starts=routes.atom_starts[chosen.start : chosen.stop + 1] - atoms.start,
            sample_ids=routes.sample_ids[atoms],
            item_indices=routes.item_indices[atoms],
        )

    def find(self, sources: Integers, targets: Integers, *, unit: str) -> Integers:
        """Return the routes between these microbatches, numbered in their units."""
        return np.searchsorted(self.keys, sources * self.num_targets + self.first_target[unit] + targets)


def _rows(load: UnitLoad, chosen: slice | Integers = slice(None)) -> list[UnitLoad]:
    """Return a load whose numbers are arrays as a list of loads, one for each entry."""
    columns: Any = load
    return list(map(UnitLoad._make, zip(*(column[chosen].astype(np.int64).tolist() for column in columns), strict=True)))
