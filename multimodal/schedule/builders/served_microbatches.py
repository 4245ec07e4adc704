"""Which of the LLM's microbatches a microbatch of another unit is for."""

from collections.abc import Mapping, Sequence

from multimodal.values.assignment import Assignment, MicrobatchPlace
from multimodal.values.model_graph import ModelGraph

Served = Mapping[MicrobatchPlace, tuple[int, int]]
"""The first and the last of the LLM's microbatches, of whichever replica, that a microbatch is linked to."""


def served_microbatches(graph: ModelGraph, assignment: Assignment) -> Served:
    """Follow the routes from every unit to the LLM, or back to it; what no route leads to counts as its own number. O(routes)."""
    routes, backbone = assignment.routes(graph), graph.unit_names.index(graph.backbone.name)
    served: dict[MicrobatchPlace, tuple[int, int]] = {}
    for unit in graph.unit_names[backbone::-1]:
        for place in _places(unit, assignment):
            linked = [route.target for route in routes.from_source.get(place, ())] if unit != graph.backbone.name else []
            served[place] = _span(place, [served[target] for target in linked if target in served])
    for unit in graph.unit_names[backbone + 1 :]:
        for place in _places(unit, assignment):
            linked = [route.source for route in routes.to_target.get(place, ())]
            served[place] = _span(place, [served[source] for source in linked if source in served])
    return served


def _places(unit: str, assignment: Assignment) -> list[MicrobatchPlace]:
    replicas = enumerate(assignment.units[unit])
    return [MicrobatchPlace(unit, replica, index) for replica, microbatches in replicas for index in range(len(microbatches))]


def _span(place: MicrobatchPlace, linked: Sequence[tuple[int, int]]) -> tuple[int, int]:
    firsts, lasts = [first for first, _ in linked], [last for _, last in linked]
    return min(firsts, default=place.microbatch), max(lasts, default=place.microbatch)
