"""Compile a schedule to the flat arrays that the event kernel runs on."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import ArrayLike

from multimodal.cost.step_costs import StepCosts
from multimodal.schedule.event_arrays import Bytes, EventArrays, Floats, Integers, NodeKind
from multimodal.schedule.lane_components import connected_lanes
from multimodal.schedule.numbered_lanes import number_lanes
from multimodal.schedule.numbered_structure import number_structure
from multimodal.schedule.schedule_structure import CollectiveKey, ScheduleStructure, build_structure
from multimodal.schedule.text import action_to_text
from multimodal.values.assignment import Assignment
from multimodal.values.errors import ConfigError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Action, Lane, Schedule


@dataclass(frozen=True)
class CompiledSchedule:
    """A schedule as arrays, and what leads from their numbers back to its actions."""

    schedule: Schedule
    arrays: EventArrays
    actions: tuple[Action, ...]
    """[num_nodes]; of a collective, some replica's action."""
    lane_positions: Integers
    """Per entry of `arrays.lane_nodes` its position in the lane's actions."""
    component_of_lane: Integers
    """Lanes with the same number belong to one pipeline (or several that routes connect)."""
    tensor_parallel_seconds: Floats
    """[num_nodes] waited for collectives inside layers, 0 for messages and collectives."""
    receive_lanes: Integers
    receive_positions: Integers
    """[num_nodes] where a send's receive stands; -1 where there is none."""
    place_of_node: Integers
    """[num_nodes] number of a computation's place; -1 for others."""
    forward_of_place: Integers
    """[num_places] the node that is its forward; -1 where there is none."""

    @cached_property
    def lane_of_entry(self) -> Integers:
        """Per entry of `arrays.lane_nodes` its lane."""
        return np.repeat(np.arange(self.arrays.num_lanes), np.diff(self.arrays.lane_starts))


def compile_schedule(
    schedule: Schedule, *, graph: ModelGraph, plan: Plan, assignment: Assignment, costs: StepCosts, lowered: bool = True
) -> CompiledSchedule:
    """Turn a valid schedule into arrays.

    Durations are asked for every action. Raises ScheduleError when an action needs one that the schedule lacks, ConfigError when
    a duration is negative or not finite. O(actions + dependencies).
    """
    return compile_structure(schedule, graph=graph, plan=plan, assignment=assignment, lowered=lowered).with_costs(costs)


@dataclass(frozen=True)
class CompiledStructure:
    """A schedule without durations: the same for all assignments of one shape (`shape_of`)."""

    schedule: Schedule
    parts: "Sequence[_Part]"

    def with_costs(self, costs: StepCosts) -> CompiledSchedule:
        """Ask for every action's duration; raises ConfigError when one is negative or not finite. O(actions)."""
        return _Assembly(self.schedule, self.parts, costs).compiled()


def compile_structure(
    schedule: Schedule, *, graph: ModelGraph, plan: Plan, assignment: Assignment, lowered: bool = True
) -> CompiledStructure:
    """Find what waits for what, component by component (`connected_lanes`).

    Raises ScheduleError when an action needs one that the schedule lacks. O((actions + dependencies) log actions).
    """
    numbered = number_lanes(schedule, graph=graph, plan=plan, assignment=assignment, lowered=lowered)
    parts = []
    for lanes in connected_lanes(graph=graph, plan=plan, assignment=assignment):
        own = tuple(schedule.lanes[lane] for lane in lanes)
        structure = number_structure(numbered, lanes, own) if numbered is not None and numbered.is_regular else None
        if structure is None:
            structure = build_structure(own, graph=graph, plan=plan, assignment=assignment, lowered=lowered)
        parts.append(_Part(lanes, own, structure))
    return CompiledStructure(schedule, parts)


@dataclass(frozen=True)
class _Part:
    """One component and the structure that it has."""

    lanes: tuple[int, ...]
    own: tuple[Lane, ...]
    """The lanes themselves."""
    structure: ScheduleStructure

    @property
    def num_nodes(self) -> int:
        return len(self.structure.kinds)

    def actions(self) -> tuple[Action, ...]:
        """Its nodes' actions."""
        counts = np.bincount(self.structure.first_lanes, minlength=len(self.lanes))
        rows = np.split(self.structure.first_positions, np.cumsum(counts)[:-1])
        lanes = zip(self.own, rows, strict=True)
        return tuple(chain.from_iterable(map(lane.actions.__getitem__, row.tolist()) for lane, row in lanes))

    def collective_actions(self) -> Iterable[tuple[CollectiveKey, Action]]:
        """Every replica's collectives."""
        for lane, codes, positions in zip(self.own, self.structure.lane_codes, self.structure.lane_positions, strict=True):
            for code, position in zip(codes[codes < 0].tolist(), positions[codes < 0].tolist(), strict=True):
                yield self.structure.collectives[-1 - code], lane.actions[position]


class _Assembly:
    """Puts the parts together: nodes part by part, then the collectives."""

    def __init__(self, schedule: Schedule, parts: Sequence[_Part], costs: StepCosts) -> None:
        self.schedule, self.parts, self.costs = schedule, parts, costs
        keys = dict.fromkeys(chain.from_iterable(part.structure.collectives for part in parts))
        self.offsets = np.cumsum([0, *(part.num_nodes for part in parts)])
        num_nodes = int(self.offsets[-1])
        self.collectives = {key: num_nodes + index for index, key in enumerate(keys)}
        self.collectives_of_part = [
            np.array([self.collectives[key] for key in part.structure.collectives], np.int64) for part in parts
        ]

    def compiled(self) -> CompiledSchedule:
        parts, num_collectives = self.parts, len(self.collectives)
        none, nowhere = np.zeros(num_collectives, np.int64), np.full(num_collectives, -1)
        kinds = _joined((*(part.structure.kinds for part in parts), np.full(num_collectives, NodeKind.COLLECTIVE)))
        num_collective_needs, collective_needs = self._collective_needs()
        num_needs = _joined((*(part.structure.num_needs for part in parts), num_collective_needs))
        needs = [self._nodes(index, part.structure.needs) for index, part in enumerate(parts)]
        lanes = [np.array(part.lanes) for part in parts]
        place_offsets = np.cumsum([0, *(len(part.structure.forward_of_place) for part in parts)])
        lane_nodes, lane_fillers, lane_positions = self._lane_entries()
        actions, seconds, tensor_parallel, latency, links = self._durations()
        unique_links, dense_links = np.unique(links[links >= 0], return_inverse=True)
        links[links >= 0] = dense_links
        component_of_lane = np.zeros(len(self.schedule.lanes), np.int64)
        for index, members in enumerate(lanes):
            component_of_lane[members] = index
        return CompiledSchedule(
            self.schedule,
            EventArrays(
                _starts([len(row) for row in lane_nodes]),
                _joined(lane_nodes),
                _joined(lane_fillers).astype(np.uint8),
                kinds.astype(np.uint8),
                _starts(num_needs),
                _joined((*needs, collective_needs)),
                _starts(_joined((*(part.structure.num_receivers for part in parts), none))),
                _joined([members[part.structure.receivers] for members, part in zip(lanes, parts, strict=True)]),
                seconds,
                latency,
                links,
                len(unique_links),
            ),
            actions,
            _joined(lane_positions),
            component_of_lane,
            tensor_parallel,
            _joined((*(_members(of, p.structure.receive_lanes) for of, p in zip(lanes, parts, strict=True)), nowhere)),
            _joined((*(part.structure.receive_positions for part in parts), nowhere)),
            _joined((*(_shifted(p.structure.place_of_node, o) for p, o in zip(parts, place_offsets, strict=False)), nowhere)),
            _joined([_shifted(p.structure.forward_of_place, o) for p, o in zip(parts, self.offsets, strict=False)]),
        )

    def _nodes(self, index: int, codes: Integers) -> Integers:
        """Turn the codes of a part into numbers of nodes."""
        nodes = codes + int(self.offsets[index])
        if len(is_collective := np.flatnonzero(codes < 0)):
            nodes[is_collective] = self.collectives_of_part[index][-1 - codes[is_collective]]
        return nodes

    def _collective_needs(self) -> tuple[Integers, Integers]:
        """Per collective how many nodes it needs, and all of them, collective by collective."""
        owners = _joined(
            np.repeat(of_part, part.structure.num_collective_needs)
            for of_part, part in zip(self.collectives_of_part, self.parts, strict=True)
        )
        needs = _joined(self._nodes(index, part.structure.collective_needs) for index, part in enumerate(self.parts))
        num_nodes = int(self.offsets[-1])
        return np.bincount(owners - num_nodes, minlength=len(self.collectives)), needs[np.argsort(owners, kind="stable")]

    def _lane_entries(self) -> tuple[list[Integers], list[Bytes], list[Integers]]:
        num_lanes = len(self.schedule.lanes)
        nodes = [np.zeros(0, np.int64)] * num_lanes
        fillers = [np.zeros(0, np.uint8)] * num_lanes
        positions = [np.zeros(0, np.int64)] * num_lanes
        for index, part in enumerate(self.parts):
            for local, lane in enumerate(part.lanes):
                nodes[lane] = self._nodes(index, part.structure.lane_codes[local])
                fillers[lane] = part.structure.lane_fillers[local]
                positions[lane] = part.structure.lane_positions[local]
        return nodes, fillers, positions

    def _durations(self) -> tuple[tuple[Action, ...], Floats, Floats, Floats, Integers]:
        """Per node: action, seconds, tensor parallel seconds, latency, link."""
        actions: list[Action] = list(chain.from_iterable(part.actions() for part in self.parts))
        computes = _joined(part.structure.kinds for part in self.parts) == NodeKind.COMPUTE
        num_nodes = len(actions) + len(self.collectives)
        seconds, tensor_parallel, latency = np.zeros(num_nodes), np.zeros(num_nodes), np.zeros(num_nodes)
        links = np.full(num_nodes, -1)
        compute_nodes, send_nodes = np.flatnonzero(computes), np.flatnonzero(~computes)
        computed = _table(map(self.costs.compute, map(actions.__getitem__, compute_nodes.tolist())), 2)
        seconds[compute_nodes], tensor_parallel[compute_nodes] = computed.T
        sent = _table(map(self.costs.transfer, map(actions.__getitem__, send_nodes.tolist())), 3)
        latency[send_nodes], seconds[send_nodes] = sent[:, 0], sent[:, 1]
        links[send_nodes] = sent[:, 2].astype(np.int64)
        of_collective: dict[CollectiveKey, Action] = {}
        for key, action in chain.from_iterable(part.collective_actions() for part in self.parts):
            node = self.collectives[key]
            of_collective.setdefault(key, action)
            seconds[node] = max(seconds[node], self.costs.collective_seconds(action))
        actions += [of_collective[key] for key in self.collectives]
        for values in (seconds, tensor_parallel, latency, seconds - tensor_parallel):
            _check_durations(values, actions)
        return tuple(actions), seconds, tensor_parallel, latency, links


def _check_durations(values: Floats, actions: Sequence[Action]) -> None:
    wrong = ~(np.isfinite(values) & (values >= 0))
    if wrong.any():
        node = int(np.argmax(wrong))
        raise ConfigError(
            f"costs of {action_to_text(actions[node])}: found {values[node]} seconds; every duration must be finite and not "
            "negative, and the tensor parallel share no longer than the computation"
        )


def _table(rows: Iterable[Iterable[float]], width: int) -> Floats:
    return np.fromiter(chain.from_iterable(rows), np.float64).reshape(-1, width)


def _joined(rows: Iterable[ArrayLike]) -> Integers:
    arrays = [np.asarray(row, np.int64) for row in rows]
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int64)


def _starts(lengths: Sequence[int] | Integers) -> Integers:
    return np.concatenate(([0], np.cumsum(np.asarray(lengths, np.int64))))


def _members(lanes: Integers, local: Integers) -> Integers:
    """Lanes by their local numbers, where there is one."""
    return np.where(local < 0, -1, lanes[local])


def _shifted(numbers: Integers, offset: int) -> Integers:
    return np.where(numbers < 0, -1, numbers + offset)
