"""Compiles a schedule to the flat arrays that the event kernel runs on."""

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from multimodal.cost.step_costs import PieceCosts, StepCosts
from multimodal.schedule.align_replicas import computed_together
from multimodal.schedule.inside_slots import CarrierTimes, InsideSlots, time_carriers
from multimodal.schedule.simulate_events import EventArrays, NodeKind
from multimodal.values.action import action_to_text
from multimodal.values.arrays.rows import Bools, Bytes, Floats, Integers, group_rows, linked_groups, row_starts, take_rows
from multimodal.values.errors import ConfigError, ScheduleError
from multimodal.values.schedule import Schedule, SlotMode
from multimodal.values.shape import StepShape
from multimodal.values.work.step_work import COMPUTE, FORWARD, GATHER, RECEIVE, StepWork

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
    def unfilled_seconds(self) -> Floats:
        """[entries of `arrays.lane_nodes`] seconds for which the lane waits for collectives inside the entry and runs nothing."""
        filled = np.zeros(len(self.slots))
        if self.inside is not None and self.carrier_times is not None:
            np.add.at(filled, np.searchsorted(self.slots, self.inside.carrier_slots), self.carrier_times.durations)
        return self.tensor_parallel_seconds[self.arrays.lane_nodes] - filled

    @cached_property
    def rank_shares(self) -> Floats:
        """[num_lanes] the share of all ranks that each lane has."""
        num_ranks = np.array(list(map(len, self.schedule.shape.plan.lanes)), np.float64)
        return num_ranks / num_ranks.sum()

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
        of_nodes = []
        for values in found[:3]:
            of_members = values[num_alone : len(asked) - len(self.together)]
            slowest = np.maximum.reduceat(of_members, starts[:-1]) if len(of_members) else of_members
            of_nodes.append(np.concatenate((values[:num_alone], slowest)))
        seconds, tensor_parallel, latency = of_nodes
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
        seconds, waits = self.arrays.seconds[nodes], costs.waits(self.schedule.work, carriers)
        durations, behind = durations[of_slot.ravel()], found.tensor_parallel_seconds[of_slot.ravel()]
        times = time_carriers(inside, carriers=carriers, seconds=seconds, waits=waits, durations=durations, behind=behind)
        added = np.zeros(self.arrays.num_nodes)
        np.maximum.at(added, nodes, times.added)
        arrays = replace(self.arrays, seconds=self.arrays.seconds + added)
        return replace(self, arrays=arrays, tensor_parallel_seconds=self.tensor_parallel_seconds + added, carrier_times=times)


def compile_schedule(schedule: Schedule) -> CompiledSchedule:
    """Turn a schedule of either dialect into arrays without durations, the same for all steps of one shape.

    Raises ScheduleError if an action needs one that the schedule lacks. O((actions + dependencies) log actions).
    """
    work, components = schedule.work, component_of_lane(schedule.shape)
    lane_order = np.argsort(components, kind="stable")
    inside = InsideSlots.of(schedule) if schedule.has_inside else None
    nodes = _number_nodes(schedule, lane_order, inside)
    receiver_starts, receivers, first_receives, unsent = _receives(schedule, nodes, lane_order)
    need_starts, needs = _needs_of_nodes(schedule, nodes, inside, unsent=unsent)
    entries = np.flatnonzero(_are_entries(schedule))
    lane_of_entry = schedule.lane_of_slot[entries]
    kinds = np.full(nodes.num_nodes, NodeKind.COLLECTIVE, np.uint8)
    kinds[: len(nodes.alone)] = np.where(work.resources[nodes.alone] == COMPUTE, NodeKind.COMPUTE, NodeKind.SEND)
    zeros = np.zeros(nodes.num_nodes)
    return CompiledSchedule(
        schedule=schedule,
        arrays=EventArrays(
            lane_starts=row_starts(np.bincount(lane_of_entry, minlength=schedule.num_lanes)),
            lane_nodes=nodes.of_piece[schedule.pieces[entries]],
            lane_fillers=_fillers(schedule, entries, nodes.of_piece),
            kinds=kinds,
            need_starts=need_starts,
            needs=needs,
            receiver_starts=receiver_starts,
            receivers=receivers,
            seconds=zeros,
            latency_seconds=zeros,
            links=np.full(nodes.num_nodes, -1),
            num_links=0,
        ),
        pieces=np.concatenate((nodes.alone, work.collective_rows[2][work.collective_rows[1][nodes.collectives]])),
        slots=entries,
        lane_of_entry=lane_of_entry,
        component_of_lane=components,
        receive_slots=first_receives,
        computed=_computed_pieces(schedule, nodes, inside),
        tensor_parallel_seconds=zeros,
        inside=inside,
        together=nodes.together,
    )


class _Nodes(NamedTuple):
    """The nodes of a schedule: pieces by themselves, then collectives."""

    alone: Integers
    """The pieces that are nodes, pipeline by pipeline in the order of their lanes."""
    collectives: Integers
    """The number of each collective."""
    members: Integers
    """The scheduled pieces that are part of collectives."""
    together: Integers
    """The computations that are part of another one's node, because replicas that share experts run them together."""
    of_piece: Integers
    """[num_pieces] the node of each piece; that of a receive is its send's, that of work inside its carrier's; -1: none."""

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return len(self.alone) + len(self.collectives)


def _are_entries(schedule: Schedule) -> Bools:
    """Return which slots take their turn in a lane: all but receives, which only post, and work inside others."""
    return (schedule.work.resources[schedule.pieces] != RECEIVE) & (schedule.modes != SlotMode.INSIDE)


def _number_nodes(schedule: Schedule, lane_order: Integers, inside: InsideSlots | None) -> _Nodes:
    """Number the nodes in the order in which lanes come to them; lane_order: the lanes, pipeline by pipeline."""
    work, pieces = schedule.work, schedule.pieces
    collective_of, collective_starts, _ = work.collective_rows
    _, by_component = take_rows(schedule.lane_starts, np.arange(len(pieces)), lane_order)  # slots, lane after lane
    is_node = _are_entries(schedule) & (collective_of[pieces] < 0)
    joined = computed_together(work)
    joint_pieces = pieces if joined is None else joined[pieces]
    alone = _first_seen(joint_pieces[by_component][is_node[by_component]])
    collectives = _first_seen(collective_of[pieces[by_component]])
    collectives = collectives[collectives >= 0]

    of_piece = np.full(work.num_pieces(lowered=schedule.lowered), _LACKING)
    of_piece[alone] = np.arange(len(alone))
    together = np.zeros(0, np.int64)
    if joined is not None:
        together = np.flatnonzero(joined[: work.num_computed] != np.arange(work.num_computed))
        together = together[np.isin(together, pieces)]
        of_piece[together] = of_piece[joined[together]]
    if inside is not None:
        of_piece[inside.pieces] = of_piece[inside.carriers]
    members = np.unique(pieces[collective_of[pieces] >= 0])
    of_collective = np.full(len(collective_starts), _LACKING)
    of_collective[collectives] = len(alone) + np.arange(len(collectives))
    of_piece[members] = of_collective[collective_of[members]]
    receives = pieces[work.resources[pieces] == RECEIVE]
    of_piece[receives] = of_piece[receives - 1]  # A piece that needs the receive waits for the send.
    return _Nodes(alone, collectives, members, together, of_piece)


def _receives(schedule: Schedule, nodes: _Nodes, lane_order: Integers) -> tuple[Integers, Integers, Integers, Integers]:
    """Return the lanes that receive what each node sends, in the order of `lane_order`, as rows (starts, lanes).

    Also the slot of each node's first receive, -1 without one, and the receives whose sends the schedule lacks.
    """
    slots = np.flatnonzero(schedule.work.resources[schedule.pieces] == RECEIVE)
    sends = nodes.of_piece[schedule.pieces[slots]]
    unsent = schedule.pieces[slots[sends == _LACKING]]
    slots, sends = slots[sends != _LACKING], sends[sends != _LACKING]
    order = np.lexsort((np.argsort(lane_order)[schedule.lane_of_slot[slots]], sends))
    first_slots = np.full(nodes.num_nodes, -1)
    first_slots[sends[order][::-1]] = slots[order][::-1]
    starts = row_starts(np.bincount(sends, minlength=nodes.num_nodes))
    return starts, schedule.lane_of_slot[slots][order], first_slots, unsent


def _needs_of_nodes(
    schedule: Schedule, nodes: _Nodes, inside: InsideSlots | None, *, unsent: Integers
) -> tuple[Integers, Integers]:
    """Return the nodes that each node needs, as rows; raises ScheduleError if an action needs one that the schedule lacks."""
    work, of_piece = schedule.work, nodes.of_piece
    owners = np.concatenate((nodes.alone, nodes.members[np.lexsort((nodes.members, of_piece[nodes.members]))]))
    if inside is not None or len(nodes.together):
        of_inside = np.unique(inside.pieces) if inside is not None else owners[:0]
        owners = np.concatenate((owners, nodes.together, of_inside))
        owners = owners[np.argsort(of_piece[owners], kind="stable")]
    starts, needed = take_rows(*work.needs_in(lowered=schedule.lowered), owners)
    needs, owning = of_piece[needed], np.repeat(owners, np.diff(starts))
    if (needs == _LACKING).any():
        first = int(np.argmax(needs == _LACKING))
        raise _lacks(schedule, owning[first], needed[first])
    if len(unsent):
        raise _lacks(schedule, unsent[0], unsent[0] - 1)
    owning = of_piece[owning]
    is_other = needs != owning  # needs between pieces of one node are met by their order
    # A lane's gathers go in turn: all ranks begin them in this order at once.
    slots = np.flatnonzero(np.isin(schedule.pieces, np.flatnonzero(work.kinds == GATHER)))
    gathers, follows = of_piece[schedule.pieces[slots]], np.diff(schedule.lane_of_slot[slots]) == 0
    gathered, next_gathered = np.unique(np.stack((gathers[:-1][follows], gathers[1:][follows])), axis=1)
    owning, needs = np.append(owning[is_other], next_gathered), np.append(needs[is_other], gathered)
    return group_rows(owning, needs, nodes.num_nodes)


def _lacks(schedule: Schedule, owner: int, need: int) -> ScheduleError:
    action, missing = (action_to_text(schedule.work.action(int(piece))) for piece in (owner, need))
    return ScheduleError(f"{action} needs {missing}, which the schedule lacks; validate it first")


@lru_cache(maxsize=32)
def component_of_lane(shape: StepShape) -> Integers:
    """[num_lanes] Return a number for the lanes that routes and pipelines connect; numbers rise with the first lanes.

    With equal data parallel sizes, a component is one replica of every unit. O(stages x ranks + routes).
    """
    plan = shape.plan
    lanes_of = {
        (name, index): [plan.lane_of_rank[rank] for rank in replica.ranks]
        for name in shape.graph.unit_names
        for index, replica in enumerate(plan.units[name].replicas)
    }
    pairs = [(lanes[0], lane) for lanes in lanes_of.values() for lane in lanes]
    pairs += [(lanes_of[source][0], lanes_of[target][0]) for source, target in shape.linked_replicas]
    firsts, others = zip(*pairs, strict=True)
    return linked_groups((firsts, others), len(plan.lanes))


def connected_lanes(shape: StepShape) -> list[Integers]:
    """Return the lanes of each of `component_of_lane`."""
    components = component_of_lane(shape)
    return np.split(np.argsort(components, kind="stable"), np.cumsum(np.bincount(components))[:-1])


def _first_seen(values: Integers) -> Integers:
    """Return the distinct values in the order in which they first occur."""
    different, first = np.unique(values, return_index=True)
    return different[np.argsort(first)]


def _fillers(schedule: Schedule, entries: Integers, node_of_piece: Integers) -> Bytes:
    """Return which entries are fillers: none in a lane that computes together with others, since all must keep one order."""
    if not schedule.has_fillers:
        return np.zeros(len(entries), np.uint8)
    pieces, lanes = schedule.pieces[entries], schedule.lane_of_slot[entries]
    is_own = schedule.work.collective_rows[0][pieces] < 0
    num_lanes = np.bincount(node_of_piece[pieces[is_own]], minlength=len(node_of_piece))
    shares = np.zeros(schedule.num_lanes, bool)
    shares[lanes[is_own & (num_lanes[node_of_piece[pieces]] > 1)]] = True
    return ((schedule.modes[entries] == SlotMode.FILLS_WAIT) & ~shares[lanes]).astype(np.uint8)


def _computed_pieces(schedule: Schedule, nodes: _Nodes, inside: InsideSlots | None) -> ComputedPieces:
    work = schedule.work
    pieces = np.append(nodes.alone[work.resources[nodes.alone] == COMPUTE], nodes.together)
    if inside is not None:
        pieces = np.append(pieces, np.unique(inside.pieces))
    _, places = np.unique(work.places[pieces], return_inverse=True)
    places = places.ravel()
    first_forwards = np.full(int(places.max(initial=-1)) + 1, -1)
    is_first = (work.kinds[pieces] == FORWARD) & (work.pieces.parts[pieces] <= 0)
    first_forwards[places[is_first]] = np.flatnonzero(is_first)
    return ComputedPieces(pieces, nodes.of_piece[pieces], places, first_forwards)


def _check_durations(values: Floats, pieces: Integers, work: StepWork) -> None:
    wrong = ~(np.isfinite(values) & (values >= 0))
    if wrong.any():
        index = int(np.argmax(wrong))
        raise ConfigError(
            f"costs of {action_to_text(work.action(int(pieces[index])))}: found {values[index]} seconds; every duration must be "
            "finite and not negative, and the tensor parallel share no longer than the computation"
        )
