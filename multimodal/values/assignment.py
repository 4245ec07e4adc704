"""Assignments, the places of samples: unit -> replica -> ordered microbatches -> atoms."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from multimodal.values.model_graph import ModelGraph


class Atom(NamedTuple):
    """The smallest thing that is assigned: an item of a sample (encoders) or a whole sample (LLM, generators)."""

    sample_id: int
    item_index: int = -1
    """Index among all items of the sample; -1 for the whole sample."""


class MicrobatchPlace(NamedTuple):
    """One microbatch of one replica of one unit."""

    unit: str
    replica: int
    microbatch: int


Microbatch = tuple[Atom, ...]


@dataclass(frozen=True)
class Assignment:
    """The placement of one global batch; units may group the same data differently."""

    units: Mapping[str, tuple[tuple[Microbatch, ...], ...]] = field(default_factory=dict)

    def num_microbatches(self, unit: str, replica: int) -> int:
        """Microbatches that this replica processes."""
        return len(self.units[unit][replica])

    def num_own_microbatches(self, unit: str, replica: int) -> int:
        """Number of microbatches whose results are used, the first ones; all, unless copies of an encoder repeat others' work."""
        return self.num_microbatches(unit, replica)

    def atoms(self, place: MicrobatchPlace) -> Microbatch:
        """The atoms of one microbatch, in packing order."""
        return self.units[place.unit][place.replica][place.microbatch]

    @cached_property
    def place_of_atom(self) -> Mapping[str, Mapping[Atom, tuple[int, int]]]:
        """unit -> atom -> (replica, microbatch)."""
        return {
            unit: {
                atom: (replica_index, microbatch_index)
                for replica_index, replica in enumerate(replicas)
                for microbatch_index, microbatch in enumerate(replica)
                for atom in microbatch
            }
            for unit, replicas in self.units.items()
        }

    @cached_property
    def _routes_by_edges(self) -> dict[tuple[tuple[str, str], ...], "Routes"]:
        return {}

    def routes(self, graph: ModelGraph) -> "Routes":
        """All routes along the graph's edges, built once per assignment."""
        if graph.edges not in self._routes_by_edges:
            self._routes_by_edges[graph.edges] = build_routes(graph, self)
        return self._routes_by_edges[graph.edges]

    def to_dict(self) -> dict[str, Any]:
        """Plain form, read back by `from_dict`."""
        return {
            unit: [[[list(atom) for atom in microbatch] for microbatch in replica] for replica in replicas]
            for unit, replicas in self.units.items()
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "Assignment":
        """Build from the plain form."""
        return cls(
            {
                unit: tuple(tuple(tuple(Atom(*atom) for atom in microbatch) for microbatch in replica) for replica in replicas)
                for unit, replicas in value.items()
            }
        )


class Route(NamedTuple):
    """The atoms that one upstream microbatch hands to one downstream microbatch."""

    source: MicrobatchPlace
    target: MicrobatchPlace
    atoms: Microbatch
    """Source atoms, in the order of the target's samples (and of the items inside each)."""


@dataclass(frozen=True)
class Routes:
    """All routes of an assignment, by either end."""

    from_source: Mapping[MicrobatchPlace, tuple[Route, ...]]
    to_target: Mapping[MicrobatchPlace, tuple[Route, ...]]


def build_routes(graph: ModelGraph, assignment: Assignment) -> Routes:
    """Match every encoder item, and every sample of the LLM, with the downstream microbatch that holds its sample; O(items)."""
    atoms_between: dict[tuple[MicrobatchPlace, MicrobatchPlace], list[Atom]] = {}
    for source, target in graph.edges:
        items: dict[int, list[Atom]] = {}
        for atom in sorted(assignment.place_of_atom[source]):
            items.setdefault(atom.sample_id, []).append(atom)
        for replica_index, replica in enumerate(assignment.units[target]):
            for microbatch_index, microbatch in enumerate(replica):
                target_place = MicrobatchPlace(target, replica_index, microbatch_index)
                for sample in microbatch:
                    for atom in items.get(sample.sample_id, ()):
                        source_place = MicrobatchPlace(source, *assignment.place_of_atom[source][atom])
                        atoms_between.setdefault((source_place, target_place), []).append(atom)
    from_source: dict[MicrobatchPlace, list[Route]] = {}
    to_target: dict[MicrobatchPlace, list[Route]] = {}
    for (source_place, target_place), atoms in sorted(atoms_between.items()):
        route = Route(source_place, target_place, tuple(atoms))
        from_source.setdefault(source_place, []).append(route)
        to_target.setdefault(target_place, []).append(route)
    return Routes({k: tuple(v) for k, v in from_source.items()}, {k: tuple(v) for k, v in to_target.items()})
