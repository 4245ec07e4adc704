"""The load that an assignment puts on each unit, microbatch by microbatch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from multimodal.cost.item_shares import ItemDealer, RankLoad
from multimodal.cost.unit_load import (
    ComputedLoad,
    CutLoad,
    UnitLoad,
    add_loads,
    atom_loads,
    atom_numbers,
    item_load,
    of_all_ranks,
    sample_load,
)
from multimodal.values.action import Action
from multimodal.values.arrays.length_arrays import LengthBatch
from multimodal.values.assignment import Atom, Microbatch, MicrobatchPlace
from multimodal.values.model_graph import Role
from multimodal.values.sample_lengths import ItemLengths, SampleLengths, index_by_sample
from multimodal.values.step_graph import StepGraph


@dataclass(frozen=True)
class AssignedLoads:
    """Loads of microbatches, parts and routes of one global batch."""

    step: StepGraph
    lengths: Sequence[SampleLengths]
    item_block_size: int | None = None
    """As in `RunOptions`."""

    def at(self, place: MicrobatchPlace) -> UnitLoad:
        """The load of one microbatch."""
        if place not in self._loads:
            self._loads[place] = self.of_atoms(place.unit, self.step.assignment.atoms(place))
        return self._loads[place]

    def of_microbatches(self, unit: str) -> UnitLoad:
        """The loads of all microbatches of a unit, replica after replica: a load whose numbers are arrays."""
        described, placed = self.step.graph.unit(unit), self.step.assignment.placed[unit]
        lengths = LengthBatch.of(self.lengths).by_id
        atoms, starts = atom_numbers(described, lengths, placed), placed.atom_starts
        columns: list[Any] = []
        for column in atom_loads(described, lengths)[1:]:
            before = np.add.accumulate(np.append(0, column[atoms]))
            columns.append(before[starts[1:]] - before[starts[:-1]])
        return UnitLoad(*columns)

    def of_action(self, action: Action) -> UnitLoad:
        """The load of a computation: its microbatch's, or that of a sample subset."""
        place = MicrobatchPlace(action.unit, action.replica, action.microbatch)
        return self.at(place) if action.subset < 0 else self.of_atoms(action.unit, self.step.consumers(place)[action.subset])

    def of_atoms(self, unit: str, atoms: Sequence[Atom]) -> UnitLoad:
        """The load of some atoms together."""
        return add_loads(self._of_atom(unit, atom) for atom in atoms)

    def computed_at(self, place: MicrobatchPlace) -> ComputedLoad:
        """Return the load that the computations of one microbatch take their time for."""
        if place not in self._computed:
            is_dealt = place.unit in self._dealers
            atoms = self.step.assignment.atoms(place)
            self._computed[place] = self._busiest(place.unit, atoms) if is_dealt else ComputedLoad(self.at(place))
        return self._computed[place]

    def computed_by(self, action: Action) -> ComputedLoad:
        """The same of one computation, which may be of a sample subset."""
        place = MicrobatchPlace(action.unit, action.replica, action.microbatch)
        if action.subset < 0:
            return self.computed_at(place)
        if action.unit not in self._dealers:
            return ComputedLoad(self.of_action(action))
        return self._busiest(action.unit, self.step.consumers(place)[action.subset])

    def kept_at(self, place: MicrobatchPlace) -> RankLoad:
        """The part of one microbatch that the context parallel rank with the most tokens has, times their number."""
        if place not in self._kept:
            self._kept[place] = self._fullest(place)
        return self._kept[place]

    def num_gathered(self, unit: str, replica: int) -> int:
        """Tokens of whose keys and values context parallel ranks hold all at a time; of the microbatch with the most."""
        if unit not in self._dealers:
            return self.fullest(unit, replica).cut.num_tokens
        cut = [[part.cut for part in self._rank_loads(unit, atoms)] for atoms in self.step.assignment.units[unit][replica]]
        return max((add_loads(parts).num_tokens for parts in cut), default=0)

    def _busiest(self, unit: str, atoms: Microbatch) -> ComputedLoad:
        dealer, parts = self._dealers[unit], self._rank_loads(unit, atoms)
        busiest = max(parts, key=dealer.work)
        num_gathered = dealer.num_ranks * max(part.cut.num_tokens for part in parts)
        return ComputedLoad(
            of_all_ranks(add_loads(busiest), dealer.num_ranks),
            CutLoad(of_all_ranks(busiest.cut, dealer.num_ranks), num_gathered),
        )

    def _fullest(self, place: MicrobatchPlace) -> RankLoad:
        if place.unit in self._dealers:
            num_ranks = self._dealers[place.unit].num_ranks
            parts = self._rank_loads(place.unit, self.step.assignment.atoms(place))
            fullest = max(parts, key=lambda part: part.whole.num_tokens + part.cut.num_tokens)
            return RankLoad(*(of_all_ranks(load, num_ranks) for load in fullest))
        is_spread = self.step.plan.units[place.unit].context_parallel_size > 1
        return RankLoad(UnitLoad(), self.at(place)) if is_spread else RankLoad(self.at(place), UnitLoad())

    def _rank_loads(self, unit: str, atoms: Microbatch) -> tuple[RankLoad, ...]:
        if (unit, atoms) not in self._dealt:
            dealer = self._dealers[unit]
            self._dealt[unit, atoms] = dealer.rank_loads(
                dealer.loads_of(item for atom in atoms for item in self._items(unit, atom))
            )
        return self._dealt[unit, atoms]

    def fullest(self, unit: str, replica: int) -> RankLoad:
        """Return what is kept of the replica's microbatch of which a rank has the most tokens."""
        places = (MicrobatchPlace(unit, replica, index) for index in range(len(self.step.assignment.units[unit][replica])))
        nothing = RankLoad(UnitLoad(), UnitLoad())
        return max(map(self.kept_at, places), key=lambda kept: add_loads(kept).num_tokens, default=nothing)

    def num_conditions(self, generator: str, atoms: Sequence[Atom]) -> int:
        """Rows that the LLM hands to a generator for some samples: one for each image that it makes of them."""
        return sum(item.unit == generator for atom in atoms for item in self._by_sample[atom.sample_id].items)

    def mean(self, unit: str, replica: int) -> UnitLoad:
        """The mean load of a replica's microbatches, rounded up; the empty load where it has none."""
        places = [MicrobatchPlace(unit, replica, index) for index in range(len(self.step.assignment.units[unit][replica]))]
        return UnitLoad(*(-(-total // max(1, len(places))) for total in add_loads(map(self.at, places))))

    def num_received_rows(self, place: MicrobatchPlace) -> int:
        """Rows that encoders hand to a microbatch of the LLM; 0 for other units."""
        if self.step.graph.unit(place.unit).role is not Role.BACKBONE:
            return 0
        samples = (self._by_sample[atom.sample_id] for atom in self.step.assignment.atoms(place))
        return sum(item.num_output_tokens for sample in samples for item in sample.items)

    def _items(self, unit: str, atom: Atom) -> Sequence[ItemLengths]:
        items = self._by_sample[atom.sample_id].items
        return (
            [item for item in items if item.unit == unit] if atom.item_index < 0 else items[atom.item_index : atom.item_index + 1]
        )

    @cached_property
    def _dealers(self) -> Mapping[str, ItemDealer]:
        """Return the dealers of the units whose context parallel ranks have whole items."""
        if self.item_block_size is None:
            return {}
        sizes = {name: unit.context_parallel_size for name, unit in self.step.plan.units.items()}
        return {
            name: ItemDealer(self.step.graph, name, size, self.item_block_size)
            for name, size in sizes.items()
            if size > 1 and not self.step.graph.unit(name).is_causal
        }

    def _of_atom(self, unit: str, atom: Atom) -> UnitLoad:
        sample = self._by_sample[atom.sample_id]
        if atom.item_index < 0:
            return sample_load(self.step.graph.unit(unit), sample)
        return item_load(sample.items[atom.item_index].num_tokens, sample.items[atom.item_index].num_output_tokens)

    @cached_property
    def _by_sample(self) -> Mapping[int, SampleLengths]:
        return index_by_sample(self.lengths)

    @cached_property
    def _computed(self) -> dict[MicrobatchPlace, ComputedLoad]:
        return {}

    @cached_property
    def _kept(self) -> dict[MicrobatchPlace, RankLoad]:
        return {}

    @cached_property
    def _dealt(self) -> dict[tuple[str, Microbatch], tuple[RankLoad, ...]]:
        return {}

    @cached_property
    def _loads(self) -> dict[MicrobatchPlace, UnitLoad]:
        return {}
