"""Groups of lanes that have nothing to do with each other but collectives."""

from collections.abc import Iterator, Sequence

from multimodal.values.assignment import Assignment, Route
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan


def connected_lanes(*, graph: ModelGraph, plan: Plan, assignment: Assignment) -> tuple[tuple[int, ...], ...]:
    """Return the lanes that routes and pipelines connect, component by component, ordered by their first lane.

    With equal data parallel sizes, a component is one replica of every unit. O(stages x ranks + routes).
    """
    lanes_of = _lanes_of_replicas(graph, plan)
    root = list(range(len(plan.lanes)))
    for lanes in lanes_of.values():
        _unite(root, lanes)
    for source, target in {(route.source[:2], route.target[:2]) for route in _routes(graph, assignment)}:
        _unite(root, (lanes_of[source][0], lanes_of[target][0]))
    members: dict[int, list[int]] = {}
    for lane in range(len(root)):
        members.setdefault(_find(root, lane), []).append(lane)
    return tuple(map(tuple, members.values()))


def _lanes_of_replicas(graph: ModelGraph, plan: Plan) -> dict[tuple[str, int], tuple[int, ...]]:
    return {
        (name, index): tuple(sorted({plan.lane_of_rank[rank] for rank in replica.ranks}))
        for name in graph.unit_names
        for index, replica in enumerate(plan.units[name].replicas)
    }


def _routes(graph: ModelGraph, assignment: Assignment) -> Iterator[Route]:
    for routes in assignment.routes(graph).from_source.values():
        yield from routes


def _find(root: list[int], lane: int) -> int:
    while root[lane] != lane:
        root[lane] = root[root[lane]]
        lane = root[lane]
    return lane


def _unite(root: list[int], lanes: Sequence[int]) -> None:
    """Make the lowest lane the root of all, so that components come in the order of their first lanes."""
    roots = sorted({_find(root, lane) for lane in lanes})
    for lane in roots[1:]:
        root[lane] = roots[0]
