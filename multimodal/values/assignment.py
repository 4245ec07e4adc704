"""Which sample goes where: unit -> replica -> ordered microbatches -> atoms."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from multimodal.values.errors import AssignmentError
from multimodal.values.model_graph import ModelGraph, Role
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import SampleLengths


class Atom(NamedTuple):
    """What an assignment places: an item of a sample (encoders) or a whole sample (LLM, generators)."""

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
        """Those whose results are used: the first so many; all, unless copies of an encoder repeat others' work."""
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
    found: dict[tuple[MicrobatchPlace, MicrobatchPlace], list[Atom]] = {}
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
                        found.setdefault((source_place, target_place), []).append(atom)
    from_source: dict[MicrobatchPlace, list[Route]] = {}
    to_target: dict[MicrobatchPlace, list[Route]] = {}
    for (source_place, target_place), atoms in sorted(found.items()):
        route = Route(source_place, target_place, tuple(atoms))
        from_source.setdefault(source_place, []).append(route)
        to_target.setdefault(target_place, []).append(route)
    return Routes({k: tuple(v) for k, v in from_source.items()}, {k: tuple(v) for k, v in to_target.items()})


def validate_assignment(assignment: Assignment, *, graph: ModelGraph, plan: Plan, lengths: Sequence[SampleLengths]) -> None:
    """Check that every atom is placed exactly once, in a replica that exists, and that no microbatch is empty.

    A generator need not be given the samples that have nothing for it to make.
    """
    for name in graph.unit_names:
        unit = graph.unit(name)
        if name not in assignment.units:
            raise AssignmentError(f"the assignment says nothing of unit '{name}'")
        replicas = assignment.units[name]
        if len(replicas) != plan.units[name].data_parallel_size:
            raise AssignmentError(
                f"unit '{name}': the assignment has {len(replicas)} replicas, the plan {plan.units[name].data_parallel_size}"
            )
        placed = [atom for replica in replicas for microbatch in replica for atom in microbatch]
        if any(not microbatch for replica in replicas for microbatch in replica):
            raise AssignmentError(f"unit '{name}': a microbatch is empty; leave it out")
        expected = {
            Atom(sample.sample_id, index)
            for sample in lengths
            for index in ([i for i, item in enumerate(sample.items) if item.unit == name] if unit.role is Role.ENCODER else [-1])
        }
        if repeated := sorted({atom for atom in placed if placed.count(atom) > 1} if len(set(placed)) != len(placed) else ()):
            raise AssignmentError(
                f"unit '{name}': {_describe(repeated[0])} is placed {placed.count(repeated[0])} times; place it once"
            )
        idle = {
            Atom(sample.sample_id)
            for sample in lengths
            if unit.role is Role.GENERATOR and all(item.unit != name for item in sample.items)
        }
        if missing := sorted(expected - idle - set(placed)):
            raise AssignmentError(f"unit '{name}': {_describe(missing[0])} is placed nowhere ({len(missing)} such)")
        if unknown := sorted(set(placed) - expected):
            raise AssignmentError(f"unit '{name}': {_describe(unknown[0])} is not in the global batch or not for this unit")


def _describe(atom: Atom) -> str:
    return f"sample {atom.sample_id}" if atom.item_index < 0 else f"item {atom.item_index} of sample {atom.sample_id}"
