"""Compiles a schedule to the flat arrays that the event kernel runs on."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import ArrayLike

from multimodal.cost.step_costs import PieceCosts, StepCosts
from multimodal.schedule.expert_groups import computed_together
from multimodal.schedule.inside_slots import CarrierTimes, InsideSlots, time_carriers
from multimodal.schedule.simulate_events import EventArrays, Floats, NodeKind
from multimodal.values.action import Action, ActionKind, Resource, action_to_text
from multimodal.values.errors import ConfigError, ScheduleError
from multimodal.values.schedule import Schedule, SlotMode
from multimodal.values.shape import StepShape
from multimodal.values.work.step_work import KIND_NUMBERS, RESOURCE_NUMBERS, Bytes, Integers, StepWork, take_rows

_COMPUTE, _RECEIVE = RESOURCE_NUMBERS[Resource.COMPUTE], RESOURCE_NUMBERS[Resource.RECEIVE]
_LACKING = -1


@dataclass(frozen=True)
class ComputedPieces:
    """Computations, each listed once, and the node that each of them is part of."""

    pieces: Integers
    nodes: Integers
    places: Integers
    """The number of each computation's place."""
    first_forwards: Integers
    """[num_places] the index of the place's forward (or first range of it) among these computations; -1: none."""


@dataclass(frozen=True)
class CompiledSchedule:
    """A schedule as arrays, with the maps from their numbers back to its actions.

    Nodes are computations and sends, pipeline by pipeline in the order of their lanes, then collectives.
    """

    schedule: Schedule
    arrays: EventArrays
    pieces: Integers
    """[num_nodes] the piece of work; for a collective, that of one of its replicas."""
    slots: Integers
    """[entries of `arrays.lane_nodes`] the position among the schedule's slots."""
    lane_of_entry: Integers
    """[entries of `arrays.lane_nodes`] the lane."""
    component_of_lane: Integers
    """Lanes with the same number belong to one pipeline (or several that routes connect)."""
    receive_slots: Integers
    """[num_nodes] the slot of a send's receive; -1 where there is none."""
    computed: "ComputedPieces"
    """The computations, those inside others included."""
    tensor_parallel_seconds: Floats
    """[num_nodes] seconds of waiting for collectives inside layers, filled or not; 0 for messages and collectives. A mean over
    replicas that compute together, each of which waits for the slowest."""
    together: Integers = field(default_factory=lambda: np.zeros(0, np.int64))
    """Computations that are part of another computation's node, because replicas that share experts run them together."""
    inside: InsideSlots | None = None
    """The work inside computations, which has no nodes of its own: it is part of its carrier's."""
    carrier_times: CarrierTimes | None = None
    """Times of the work inside computations, once there are costs."""

    @cached_property
    def filled_seconds(self) -> Floats:
        """[entries of `arrays.lane_nodes`] seconds of the work that runs inside the entry in its lane."""
        filled = np.zeros(len(self.slots))
        if self.inside is not None and self.carrier_times is not None:
            np.add.at(filled, np.searchsorted(self.slots, self.inside.carrier_slots), self.carrier_times.durations)
        return filled

    @cached_property
    def unfilled_seconds(self) -> Floats:
        """[entries of `arrays.lane_nodes`] seconds for which the lane waits for collectives inside the entry and runs nothing."""
        return self.tensor_parallel_seconds[self.arrays.lane_nodes] - self.filled_seconds

    @property
    def computed_seconds(self) -> Floats:
        """Seconds of each of `computed`; a carrier's are those without the work inside beyond its waits."""
        seconds = self.arrays.seconds[self.computed.nodes]
        if self.inside is not None and self.carrier_times is not None:
            entry_of_piece = np.zeros(self.schedule.work.num_computed, np.int64)
            entry_of_piece[self.computed.pieces] = np.arange(len(self.computed.pieces))
            seconds[entry_of_piece[self.carrier_times.carriers]] -= self.carrier_times.added
            seconds[entry_of_piece[self.inside.pieces]] = self.carrier_times.durations
        return seconds

    @property
    def actions(self) -> Sequence[Action]:
        """The action of each piece of work."""
        return self.schedule.work.actions

    def with_costs(self, costs: StepCosts) -> "CompiledSchedule":
        """Return the same schedule with these durations; raises ConfigError when one is negative or not finite. O(nodes)."""
        arrays, work = self.arrays, self.schedule.work
        is_collective = arrays.kinds == NodeKind.COLLECTIVE
        collective_of, starts, members = work.collective_rows
        starts, members = take_rows(starts, members, collective_of[self.pieces[is_collective]])
        asked = np.concatenate((self.pieces[~is_collective], members, self.together))
        found, num_alone = costs.of_pieces(work, asked), int((~is_collective).sum())
        for values in (*found[:3], found.seconds - found.tensor_parallel_seconds):
            _check_durations(values, asked, work)
        of_nodes = (values[: len(asked) - len(self.together)] for values in found[:3])
        seconds, tensor_parallel, latency = (_of_nodes(values, num_alone, starts) for values in of_nodes)
        if len(self.together):
            self._wait_together(seconds, tensor_parallel, found)
        links = np.append(found.links[:num_alone], np.full(arrays.num_nodes - num_alone, -1))
        unique_links, dense_links = np.unique(links[links >= 0], return_inverse=True)
        links[links >= 0] = dense_links
        timed = replace(arrays, seconds=seconds, latency_seconds=latency, links=links, num_links=len(unique_links))
        plain = replace(self, arrays=timed, tensor_parallel_seconds=tensor_parallel)
        return plain if self.inside is None else plain._with_inside(costs, self.inside)

    def _wait_together(self, seconds: Floats, tensor_parallel: Floats, found: PieceCosts) -> None:
        """Prolong, in place, nodes of several replicas to the slowest of them; found: ends with the values of `together`."""
        first = int((self.arrays.kinds == NodeKind.COMPUTE).sum())
        nodes, count = self.computed.nodes[first : first + len(self.together)], len(self.together)
        joint, computing = np.zeros(len(seconds), bool), seconds - tensor_parallel
        joint[nodes] = True
        np.maximum.at(seconds, nodes, found.seconds[-count:])
        np.add.at(computing, nodes, (found.seconds - found.tensor_parallel_seconds)[-count:])
        num_replicas = 1 + np.bincount(nodes, minlength=len(seconds))
        tensor_parallel[joint] = (seconds - computing / num_replicas)[joint]

    def _with_inside(self, costs: StepCosts, inside: InsideSlots) -> "CompiledSchedule":
        """Return the schedule with carriers prolonged by the work inside them."""
        carriers, first = np.unique(inside.carriers, return_index=True)
        nodes = self.arrays.lane_nodes[np.searchsorted(self.slots, inside.carrier_slots[first])]
        pieces, of_slot = np.unique(inside.pieces, return_inverse=True)
        found = costs.of_pieces(self.schedule.work, pieces)
        durations = found.seconds - found.tensor_parallel_seconds
        for values in (found.seconds, durations):
            _check_durations(values, pieces, self.schedule.work)
        times = time_carriers(
            inside,
            carriers=carriers,
            seconds=self.arrays.seconds[nodes],
            waits=costs.waits(self.schedule.work, carriers),
            durations=durations[of_slot.ravel()],
            behind=found.tensor_parallel_seconds[of_slot.ravel()],
        )
        added = np.zeros(self.arrays.num_nodes)
        np.maximum.at(added, nodes, times.added)
        arrays = replace(self.arrays, seconds=self.arrays.seconds + added)
        return replace(self, arrays=arrays, tensor_parallel_seconds=self.tensor_parallel_seconds + added, carrier_times=times)


def compile_schedule(schedule: Schedule) -> CompiledSchedule:
    """Turn a schedule of either dialect into arrays without durations, the same for all steps of one shape.

    Raises ScheduleError if an action needs one that the schedule lacks. O((actions + dependencies) log actions).
    """
    work, pieces, num_lanes = schedule.work, schedule.pieces, schedule.num_lanes
    component_of_lane = _components(schedule.shape)
    lane_order = np.argsort(component_of_lane, kind="stable")
    _, by_component = take_rows(schedule.lane_starts, np.arange(len(pieces)), lane_order)  # slots, lane after lane
    resources, collective_of = work.resources, work.collective_rows[0]
    inside = InsideSlots.of(schedule) if schedule.has_inside else None
    is_entry = (resources[pieces] != _RECEIVE) & (schedule.modes != SlotMode.INSIDE)
    is_node = is_entry & (collective_of[pieces] < 0)
    joined = computed_together(work)
    joint_pieces = pieces if joined is None else joined[pieces]
    nodes = _first_seen(joint_pieces[by_component][is_node[by_component]])
    collectives = _first_seen(collective_of[pieces[by_component]])
    collectives = collectives[collectives >= 0]
    num_nodes = len(nodes) + len(collectives)

    node_of_piece = np.full(work.num_pieces(lowered=schedule.lowered), _LACKING)
    node_of_piece[nodes] = np.arange(len(nodes))
    others = np.zeros(0, np.int64)
    if joined is not None:
        others = np.flatnonzero(joined[: work.num_computed] != np.arange(work.num_computed))
        others = others[np.isin(others, pieces)]
        node_of_piece[others] = node_of_piece[joined[others]]
    if inside is not None:
        node_of_piece[inside.pieces] = node_of_piece[inside.carriers]
    members = np.unique(pieces[collective_of[pieces] >= 0])
    node_of_collective = np.full(len(work.collective_rows[1]), _LACKING)
    node_of_collective[collectives] = len(nodes) + np.arange(len(collectives))
    node_of_piece[members] = node_of_collective[collective_of[members]]
    receive_slots = np.flatnonzero(resources[pieces] == _RECEIVE)
    receives = pieces[receive_slots]
    node_of_piece[receives] = node_of_piece[receives - 1]  # A piece that needs the receive waits for the send.
    sends = node_of_piece[receives]

    by_collective = members[np.lexsort((members, node_of_piece[members]))]
    owners = np.concatenate((nodes, by_collective))
    if inside is not None or len(others):
        owners = np.concatenate((owners, others, np.unique(inside.pieces) if inside is not None else others[:0]))
        owners = owners[np.argsort(node_of_piece[owners], kind="stable")]
    need_starts, needed = take_rows(*work.needs_in(lowered=schedule.lowered), owners)
    needs = node_of_piece[needed]
    _check_needs(schedule, owners, need_starts, needed, needs, receives[sends == _LACKING])
    owning = np.repeat(node_of_piece[owners], np.diff(need_starts))
    needs, owning = needs[needs != owning], owning[needs != owning]  # needs between pieces of one node are met by their order
    num_needs = np.bincount(owning, minlength=num_nodes)

    entries = np.flatnonzero(is_entry)
    lane_of_entry = schedule.lane_of_slot[entries]
    receiver_order = np.lexsort((np.argsort(lane_order)[schedule.lane_of_slot[receive_slots]], sends))
    kinds = np.full(num_nodes, NodeKind.COLLECTIVE, np.uint8)
    kinds[: len(nodes)] = np.where(resources[nodes] == _COMPUTE, NodeKind.COMPUTE, NodeKind.SEND)
    first_receive_slots = np.full(num_nodes, -1)
    first_receive_slots[sends[receiver_order][::-1]] = receive_slots[receiver_order][::-1]
    zeros = np.zeros(num_nodes)
    return CompiledSchedule(
        schedule=schedule,
        arrays=EventArrays(
            lane_starts=_starts(np.bincount(lane_of_entry, minlength=num_lanes)),
            lane_nodes=node_of_piece[pieces[entries]],
            lane_fillers=_fillers(schedule, entries, node_of_piece),
            kinds=kinds,
            need_starts=_starts(num_needs),
            needs=needs,
            receiver_starts=_starts(np.bincount(sends, minlength=num_nodes)),
            receivers=schedule.lane_of_slot[receive_slots][receiver_order],
            seconds=zeros,
            latency_seconds=zeros,
            links=np.full(num_nodes, -1),
            num_links=0,
        ),
        pieces=np.concatenate((nodes, work.collective_rows[2][work.collective_rows[1][collectives]])),
        slots=entries,
        lane_of_entry=lane_of_entry,
        component_of_lane=component_of_lane,
        receive_slots=first_receive_slots,
        computed=_computed_pieces(schedule, nodes, others, node_of_piece, inside),
        tensor_parallel_seconds=zeros,
        inside=inside,
        together=others,
    )


@lru_cache(maxsize=32)
def connected_lanes(shape: StepShape) -> tuple[tuple[int, ...], ...]:
    """Return the lanes that routes and pipelines connect, component by component, ordered by their first lane.

    With equal data parallel sizes, a component is one replica of every unit. O(stages x ranks + routes).
    """
    plan = shape.plan
    lanes_of = {
        (name, index): sorted({plan.lane_of_rank[rank] for rank in replica.ranks})
        for name in shape.graph.unit_names
        for index, replica in enumerate(plan.units[name].replicas)
    }
    root = list(range(len(plan.lanes)))
    for lanes in lanes_of.values():
        _unite(root, lanes)
    for source, target in shape.graph.edges:
        for ends in shape.replica_routes(source, target):
            _unite(root, [lanes_of[end][0] for end in zip((source, target), ends, strict=True)])
    members: dict[int, list[int]] = {}
    for lane in range(len(root)):
        members.setdefault(_find(root, lane), []).append(lane)
    return tuple(map(tuple, members.values()))


def _components(shape: StepShape) -> Integers:
    """Return each lane's component, [num_lanes]."""
    component_of_lane = np.zeros(len(shape.plan.lanes), np.int64)
    for index, lanes in enumerate(connected_lanes(shape)):
        component_of_lane[list(lanes)] = index
    return component_of_lane


def _find(root: list[int], lane: int) -> int:
    while root[lane] != lane:
        root[lane] = root[root[lane]]
        lane = root[lane]
    return lane


def _unite(root: list[int], lanes: Sequence[int]) -> None:
    """Make the lowest lane the root of all, so that components are ordered by their first lanes."""
    roots = sorted({_find(root, lane) for lane in lanes})
    for lane in roots[1:]:
        root[lane] = roots[0]


def _first_seen(values: Integers) -> Integers:
    """Return the distinct values in the order in which they first occur."""
    different, first = np.unique(values, return_index=True)
    in_order: Integers = different[np.argsort(first)]
    return in_order


def _check_needs(
    schedule: Schedule, owners: Integers, starts: Integers, needed: Integers, needs: Integers, unsent: Integers
) -> None:
    """Raise ScheduleError if an action needs one that the schedule lacks."""
    lacking = np.flatnonzero(needs == _LACKING)
    if not len(lacking) and not len(unsent):
        return
    if len(lacking):
        owner, need = owners[np.searchsorted(starts, lacking[0], side="right") - 1], needed[lacking[0]]
    else:
        owner, need = unsent[0], unsent[0] - 1
    action, missing = (action_to_text(schedule.work.actions[int(piece)]) for piece in (owner, need))
    raise ScheduleError(f"{action} needs {missing}, which the schedule lacks; validate it first")


def _fillers(schedule: Schedule, entries: Integers, node_of_piece: Integers) -> Bytes:
    """Return which entries are fillers: none in a lane that computes together with others, since all must keep one order."""
    if not schedule.has_fillers:
        return np.zeros(len(entries), np.uint8)
    pieces, lanes = schedule.pieces[entries], schedule.lane_of_slot[entries]
    is_own = schedule.work.collective_rows[0][pieces] < 0
    num_lanes = np.bincount(node_of_piece[pieces[is_own]], minlength=len(node_of_piece))
    shares = np.zeros(schedule.num_lanes, bool)
    shares[lanes[is_own & (num_lanes[node_of_piece[pieces]] > 1)]] = True
    fills: Bytes = ((schedule.modes[entries] == SlotMode.FILLS_WAIT) & ~shares[lanes]).astype(np.uint8)
    return fills


def _computed_pieces(
    schedule: Schedule, nodes: Integers, together: Integers, node_of_piece: Integers, inside: InsideSlots | None
) -> ComputedPieces:
    work = schedule.work
    pieces = np.append(nodes[work.resources[nodes] == _COMPUTE], together)
    if inside is not None:
        pieces = np.append(pieces, np.unique(inside.pieces))
    _, places = np.unique(work.places[pieces], return_inverse=True)
    places = places.ravel()
    first_forwards = np.full(int(places.max(initial=-1)) + 1, -1)
    is_first = (work.kinds[pieces] == KIND_NUMBERS[ActionKind.FORWARD]) & (work.pieces.parts[pieces] <= 0)
    first_forwards[places[is_first]] = np.flatnonzero(is_first)
    return ComputedPieces(pieces, node_of_piece[pieces], places, first_forwards)


def _of_nodes(values: Floats, num_alone: int, collective_starts: Integers) -> Floats:
    """Return the values of all nodes; values: of computations and sends, then of the members of collectives."""
    alone, members = values[:num_alone], values[num_alone:]
    return np.concatenate((alone, np.maximum.reduceat(members, collective_starts[:-1]) if len(members) else members))


def _check_durations(values: Floats, pieces: Integers, work: StepWork) -> None:
    wrong = ~(np.isfinite(values) & (values >= 0))
    if wrong.any():
        index = int(np.argmax(wrong))
        raise ConfigError(
            f"costs of {action_to_text(work.action(int(pieces[index])))}: found {values[index]} seconds; every duration must be "
            "finite and not negative, and the tensor parallel share no longer than the computation"
        )


def _starts(lengths: ArrayLike) -> Integers:
    return np.concatenate(([0], np.cumsum(np.asarray(lengths, np.int64))))
