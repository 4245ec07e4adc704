"""The load that an assignment puts on each unit, microbatch by microbatch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from multimodal.cost.unit_load import UnitLoad, add_loads, item_load, sample_load
from multimodal.values.action import Action
from multimodal.values.assignment import Atom, MicrobatchPlace
from multimodal.values.model_graph import Role
from multimodal.values.sample_lengths import SampleLengths, index_by_sample
from multimodal.values.step_graph import StepGraph


@dataclass(frozen=True)
class AssignedLoads:
    """Loads of microbatches, parts and routes of one global batch."""

    step: StepGraph
    lengths: Sequence[SampleLengths]

    def at(self, place: MicrobatchPlace) -> UnitLoad:
        """The load of one microbatch."""
        if place not in self._loads:
            self._loads[place] = self.of_atoms(place.unit, self.step.assignment.atoms(place))
        return self._loads[place]

    def of_action(self, action: Action) -> UnitLoad:
        """The load of a computation: its microbatch's, or that of a sample subset."""
        place = MicrobatchPlace(action.unit, action.replica, action.microbatch)
        return self.at(place) if action.subset < 0 else self.of_atoms(action.unit, self.step.consumers(place)[action.subset])

    def of_atoms(self, unit: str, atoms: Sequence[Atom]) -> UnitLoad:
        """The load of some atoms together."""
        return add_loads(self._of_atom(unit, atom) for atom in atoms)

    def largest(self, unit: str, replica: int) -> UnitLoad:
        """The load of a replica's microbatch with the most tokens."""
        places = (MicrobatchPlace(unit, replica, index) for index in range(len(self.step.assignment.units[unit][replica])))
        return max(map(self.at, places), key=lambda load: load.num_tokens, default=UnitLoad())

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

    def _of_atom(self, unit: str, atom: Atom) -> UnitLoad:
        sample = self._by_sample[atom.sample_id]
        if atom.item_index < 0:
            return sample_load(self.step.graph.unit(unit), sample)
        return item_load(sample.items[atom.item_index].num_tokens, sample.items[atom.item_index].num_output_tokens)

    @cached_property
    def _by_sample(self) -> Mapping[int, SampleLengths]:
        return index_by_sample(self.lengths)

    @cached_property
    def _loads(self) -> dict[MicrobatchPlace, UnitLoad]:
        return {}
