"""Groups of lanes that have nothing to do with each other but collectives, and which of them are alike."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter

from multimodal.values.assignment import Assignment, MicrobatchPlace, Route
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Action, Lane, Schedule


@dataclass(frozen=True)
class LaneComponent:
    """Lanes that routes and pipelines connect: with equal data parallel sizes, one replica of every unit."""

    lanes: tuple[int, ...]
    """In ascending order; a lane's position here is its local number."""
    local_replicas: Mapping[tuple[str, int], int]
    """(unit, replica) -> its number among the component's replicas of that unit."""
    shape: tuple[object, ...]
    """Stages and routes in local numbers; equal shapes and equal actions have equal dependencies."""
    schedule: Schedule
    """The component's lanes, by local number."""

    @cached_property
    def local_actions(self) -> list[object]:
        """What tells the actions of the lanes apart, in local numbers."""
        if set(self.local_replicas.values()) == {0}:  # Then the unit says which replica.
            return [column for lane in self.schedule.lanes for column in _columns(lane)]
        return [[_with_local_replicas(action, self.local_replicas) for action in lane.actions] for lane in self.schedule.lanes]

    def is_like(self, other: "LaneComponent") -> bool:
        """Whether the two differ only in which replicas and lanes they are of."""
        if self.shape != other.shape or self.schedule.lanes == () or len(self.lanes) != len(other.lanes):
            return False
        if [lane.fillers for lane in self.schedule.lanes] != [lane.fillers for lane in other.schedule.lanes]:
            return False
        return self.local_actions == other.local_actions


def lane_components(schedule: Schedule, *, graph: ModelGraph, plan: Plan, assignment: Assignment) -> tuple[LaneComponent, ...]:
    """Split a schedule's lanes into components, ordered by their first lane. O(stages x ranks + routes)."""
    connected = connected_lanes(graph=graph, plan=plan, assignment=assignment)
    component_of = {lane: index for index, lanes in enumerate(connected) for lane in lanes}
    replicas: list[list[tuple[str, int]]] = [[] for _ in connected]
    for replica, lanes in _lanes_of_replicas(graph, plan).items():
        replicas[component_of[lanes[0]]].append(replica)
    parts = zip(connected, replicas, strict=True)
    return tuple(_component(schedule, lanes, members, graph, plan, assignment) for lanes, members in parts)


def connected_lanes(*, graph: ModelGraph, plan: Plan, assignment: Assignment) -> tuple[tuple[int, ...], ...]:
    """Return the lanes of every component, ordered by their first lane. O(stages x ranks + routes)."""
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


def _component(
    schedule: Schedule,
    lanes: tuple[int, ...],
    replicas: Sequence[tuple[str, int]],
    graph: ModelGraph,
    plan: Plan,
    assignment: Assignment,
) -> LaneComponent:
    local: dict[tuple[str, int], int] = {}
    counts: dict[str, int] = {}
    for unit, replica in replicas:
        local[unit, replica] = counts.get(unit, 0)
        counts[unit] = local[unit, replica] + 1
    local_lane = {lane: index for index, lane in enumerate(lanes)}
    shape = tuple(
        (
            unit,
            tuple(
                (stage.layers, tuple(dict.fromkeys(local_lane[plan.lane_of_rank[rank]] for rank in stage.ranks)))
                for stage in plan.units[unit].replicas[replica].virtual_stages
            ),
            tuple(
                (_local_places([route.source for route in to], local), _local_places([route.target for route in of], local))
                for to, of in _routes_of(unit, replica, graph, assignment)
            ),
        )
        for unit, replica in replicas
    )
    return LaneComponent(lanes, local, shape, Schedule(tuple(schedule.lanes[lane] for lane in lanes)))


def _routes(graph: ModelGraph, assignment: Assignment) -> Iterator[Route]:
    for routes in assignment.routes(graph).from_source.values():
        yield from routes


def _routes_of(
    unit: str, replica: int, graph: ModelGraph, assignment: Assignment
) -> Iterator[tuple[tuple[Route, ...], tuple[Route, ...]]]:
    routes = assignment.routes(graph)
    for microbatch in range(assignment.num_microbatches(unit, replica)):
        place = MicrobatchPlace(unit, replica, microbatch)
        yield routes.to_target.get(place, ()), routes.from_source.get(place, ())


def _local_places(places: Sequence[MicrobatchPlace], local: Mapping[tuple[str, int], int]) -> tuple[tuple[str, int, int], ...]:
    return tuple((place.unit, local[place.unit, place.replica], place.microbatch) for place in places)


_FIELDS = itemgetter(0, 1, 3, 4, 6)
_COLUMNS = tuple(map(itemgetter, (0, 1, 3, 4, 6)))
_PEER = itemgetter(5)
_PEER_COLUMNS = tuple(map(itemgetter, (0, 2, 3)))


def _columns(lane: Lane) -> Iterator[tuple[object, ...]]:
    """Every field but the replicas, over all actions: a few long tuples are compared much faster than many short ones."""
    for column in _COLUMNS:
        yield tuple(map(column, lane.actions))
    peers = tuple(filter(None, map(_PEER, lane.actions)))
    for column in _PEER_COLUMNS:
        yield tuple(map(column, peers))


def _with_local_replicas(action: Action, local: Mapping[tuple[str, int], int]) -> tuple[object, ...]:
    peer = action.peer
    there = peer and (peer.unit, local.get((peer.unit, peer.replica)), peer.stage, peer.microbatch)
    return (*_FIELDS(action), local.get((action.unit, action.replica)), there)


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
