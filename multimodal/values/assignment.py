"""Assignments, the places of samples: unit -> replica -> ordered microbatches -> atoms."""

from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from functools import cached_property

from multimodal.values.arrays.microbatches import MicrobatchCounts, MicrobatchPlace, NumberedMicrobatches, in_subset_order
from multimodal.values.arrays.placed_atoms import Atom, Microbatch, PlacedAtoms, Replicas
from multimodal.values.arrays.routes import Route, RouteEnds, Routes, build_routes
from multimodal.values.arrays.rows import integers
from multimodal.values.model_graph import ModelGraph, Role
from multimodal.values.plan import Plan
from multimodal.values.shape import StepShape

__all__ = ["Assignment", "Atom", "Microbatch", "MicrobatchPlace", "PlacedAtoms", "Route", "Routes"]


@dataclass(frozen=True)
class Assignment:
    """The placement of one global batch; units may group the same data differently."""

    placement: InitVar[Mapping[str, PlacedAtoms | Replicas]]
    """It as arrays, or as objects: unit -> replica -> ordered microbatches -> atoms."""
    placed: Mapping[str, PlacedAtoms] = field(init=False)
    """The placement as arrays, by unit."""

    def __post_init__(self, placement: Mapping[str, PlacedAtoms | Replicas]) -> None:
        arrays = {
            unit: each if isinstance(each, PlacedAtoms) else PlacedAtoms.of_replicas(each) for unit, each in placement.items()
        }
        object.__setattr__(self, "placed", arrays)

    @property
    def units(self) -> Mapping[str, Replicas]:
        """The placement as objects: unit -> replica -> ordered microbatches -> atoms. O(atoms)."""
        return {unit: placed.replicas for unit, placed in self.placed.items()}

    def num_microbatches(self, unit: str, replica: int) -> int:
        """Microbatches that this replica processes."""
        return int(self.placed[unit].counts[replica])

    def atoms(self, place: MicrobatchPlace) -> Microbatch:
        """The atoms of one microbatch, in packing order."""
        return self.placed[place.unit].atoms(place.replica, place.microbatch)

    @cached_property
    def _routes_by_edges(self) -> dict[tuple[tuple[str, str], ...], Routes]:
        return {}

    def routes(self, graph: ModelGraph) -> Routes:
        """All routes along the graph's edges, built once per assignment."""
        if graph.edges not in self._routes_by_edges:
            by_item = {edge: graph.unit(edge[1]).role is Role.ENCODER for edge in graph.edges}
            self._routes_by_edges[graph.edges] = build_routes(by_item, self.placed)
        return self._routes_by_edges[graph.edges]

    def shape(self, graph: ModelGraph, plan: Plan, *, forward_only: bool = False) -> StepShape:
        """Return the shape of the uncut step that has its samples here. O(microbatches + routes)."""
        routes = self.routes(graph)
        counts = {unit: MicrobatchCounts(placed.microbatch_starts) for unit, placed in self.placed.items()}
        nothing = MicrobatchCounts(integers((0,)))
        numbered = NumberedMicrobatches({unit: counts.get(unit, nothing) for unit in routes.microbatches.units})
        return StepShape(graph, plan, counts, RouteEnds(numbered, routes.sources, routes.targets), forward_only=forward_only)

    def subsets(self, graph: ModelGraph, place: MicrobatchPlace) -> tuple[Microbatch, ...]:
        """Return the sample subsets of an encoder's microbatch: its atoms in packing order, grouped by `StepShape.consumers`."""
        routes = {route.target: route for route in self.routes(graph).from_source.get(place, ())}
        position = {atom: index for index, atom in enumerate(self.atoms(place))}
        return tuple(tuple(sorted(routes[each].atoms, key=position.__getitem__)) for each in in_subset_order(routes))
