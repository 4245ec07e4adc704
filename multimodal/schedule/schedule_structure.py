"""The nodes and needs of one component of lanes, numbered from 0, without durations."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from multimodal.schedule.dependencies import dependencies
from multimodal.schedule.event_arrays import Bytes, Integers, NodeKind
from multimodal.schedule.text import action_to_text
from multimodal.values.assignment import Assignment
from multimodal.values.errors import ScheduleError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import ACTION_TABLE, Action, ActionKind, Lane, Resource, Schedule
from multimodal.values.schedule_form import ScheduleForm, form_of

CollectiveKey = tuple[ActionKind, str, int, int]
"""(kind, unit, virtual stage, part): what all replicas take part in together."""


@dataclass(frozen=True)
class ScheduleStructure:
    """One component of lanes; equal where these are alike but for their replica.

    A *code* is a node's number or, for collective k, -(k + 1).
    """

    collectives: tuple[CollectiveKey, ...]
    lane_codes: tuple[Integers, ...]
    """Per lane the codes of what it comes to, receives left out."""
    lane_fillers: tuple[Bytes, ...]
    """Per entry of `lane_codes`; none in a lane that runs computations together with others, as both must keep one order."""
    lane_positions: tuple[Integers, ...]
    """Per entry of `lane_codes` its position in the lane's actions."""
    kinds: Bytes
    first_lanes: Integers
    """Per node the lane where it stands first, in ascending order."""
    first_positions: Integers
    """Per node its position there."""
    num_needs: Integers
    needs: Integers
    """Codes, node by node."""
    num_collective_needs: Integers
    collective_needs: Integers
    num_receivers: Integers
    receivers: Integers
    """Local lanes that a send goes to, node by node."""
    receive_lanes: Integers
    receive_positions: Integers
    """Per node where a send's receive stands; -1 where there is none."""
    place_of_node: Integers
    """Number of the place that a computation is of; -1 for sends."""
    forward_of_place: Integers
    """The forward of every place; -1 where there is none."""


def build_structure(
    lanes: Sequence[Lane], *, graph: ModelGraph, plan: Plan, assignment: Assignment, lowered: bool
) -> ScheduleStructure:
    """Number the actions of a component's lanes and ask `dependencies` what each needs. O(actions + dependencies).

    Where the actions have numbers of the step, `number_structure` gives the same much faster.
    Raises ScheduleError when an action needs one that the schedule lacks.
    """
    return _Numbering(lanes, graph, plan, assignment, lowered).structure()


class _Numbering:
    """Codes of actions, while they are given.

    Flat lists throughout: small containers by the ten thousand would cost more in garbage collection than all the rest.
    """

    def __init__(self, lanes: Sequence[Lane], graph: ModelGraph, plan: Plan, assignment: Assignment, lowered: bool) -> None:
        self.graph, self.plan, self.assignment, self.lowered = graph, plan, assignment, lowered
        self.form: ScheduleForm = form_of(Schedule(tuple(lanes)))
        self.lanes = lanes
        self.codes: dict[Action, int] = {}
        self.collectives: dict[CollectiveKey, list[Action]] = {}
        self.nodes: list[Action] = []
        self.first_lanes: list[int] = []
        self.first_positions: list[int] = []
        self.receives: list[Action] = []
        self.receive_lanes: list[int] = []
        self.receive_positions: list[int] = []
        self.lane_codes: list[list[int]] = [[] for _ in self.lanes]
        self.lane_positions: list[list[int]] = [[] for _ in self.lanes]
        for lane, each in enumerate(self.lanes):
            for position, action in enumerate(each.actions):
                self._number(action, lane, position)

    def _number(self, action: Action, lane: int, position: int) -> None:
        resource = ACTION_TABLE[action.kind].resource
        if resource is Resource.RECEIVE:
            self.receives.append(action)
            self.receive_lanes.append(lane)
            self.receive_positions.append(position)
            return
        if action not in self.codes:
            if resource is Resource.COLLECTIVE:
                key = action.kind, action.unit, action.stage, action.part
                self.collectives.setdefault(key, []).append(action)
                self.codes[action] = -1 - list(self.collectives).index(key)
            else:
                self.codes[action] = len(self.nodes)
                self.nodes.append(action)
                self.first_lanes.append(lane)
                self.first_positions.append(position)
        self.lane_codes[lane].append(self.codes[action])
        self.lane_positions[lane].append(position)

    def structure(self) -> ScheduleStructure:
        num_nodes = len(self.nodes)
        for receive in self.receives:
            (send,) = self._dependencies(receive)
            self.codes[receive] = self._code(send, receive)  # Whoever needs the receive waits for what is sent.
        num_needs, needs = self._all_needs([action] for action in self.nodes)
        num_collective_needs, collective_needs = self._all_needs(self.collectives.values())
        sends = _integers([self.codes[receive] for receive in self.receives])
        receive_lanes, receive_positions = _integers(self.receive_lanes), _integers(self.receive_positions)
        in_order = np.argsort(sends, kind="stable")
        received, first = np.unique(sends, return_index=True)
        places, forwards = self._places()
        return ScheduleStructure(
            collectives=tuple(self.collectives),
            lane_codes=tuple(map(_integers, self.lane_codes)),
            lane_fillers=self._fillers(),
            lane_positions=tuple(map(_integers, self.lane_positions)),
            kinds=np.array([_node_kind(action) for action in self.nodes], dtype=np.uint8),
            first_lanes=_integers(self.first_lanes),
            first_positions=_integers(self.first_positions),
            num_needs=num_needs,
            needs=needs,
            num_collective_needs=num_collective_needs,
            collective_needs=collective_needs,
            num_receivers=np.bincount(sends, minlength=num_nodes),
            receivers=receive_lanes[in_order],
            receive_lanes=_scattered(received, receive_lanes[first], num_nodes),
            receive_positions=_scattered(received, receive_positions[first], num_nodes),
            place_of_node=places,
            forward_of_place=forwards,
        )

    def _fillers(self) -> tuple[Bytes, ...]:
        codes = [_integers(row) for row in self.lane_codes]
        num_lanes = np.bincount(np.concatenate([row[row >= 0] for row in codes]), minlength=len(self.nodes))
        is_alone = [not (num_lanes[row[row >= 0]] > 1).any() for row in codes]
        return tuple(
            np.array([alone and position in lane.fillers for position in positions], dtype=np.uint8)
            for lane, positions, alone in zip(self.lanes, self.lane_positions, is_alone, strict=True)
        )

    def _all_needs(self, rows: Iterable[Iterable[Action]]) -> tuple[Integers, Integers]:
        """Per row of actions how many nodes they need, and the codes of all of these."""
        lengths: list[int] = []
        codes: list[int] = []
        for row in rows:
            before = len(codes)
            for action in row:
                codes += [self._code(need, action) for need in self._dependencies(action)]
            lengths.append(len(codes) - before)
        return _integers(lengths), _integers(codes)

    def _dependencies(self, action: Action) -> tuple[Action, ...]:
        return dependencies(action, self.graph, self.plan, self.assignment, lowered=self.lowered, form=self.form)

    def _code(self, need: Action, action: Action) -> int:
        if need not in self.codes:
            raise ScheduleError(
                f"{action_to_text(action)} needs {action_to_text(need)}, which the schedule lacks; validate it first"
            )
        return self.codes[need]

    def _places(self) -> tuple[Integers, Integers]:
        numbers: dict[tuple[object, ...], int] = {}
        forwards: dict[int, int] = {}
        place_of_node = [-1] * len(self.nodes)
        for node, action in enumerate(self.nodes):
            if ACTION_TABLE[action.kind].resource is Resource.COMPUTE:
                place = action[1:5]
                place_of_node[node] = numbers.setdefault(place, len(numbers))
                if action.kind is ActionKind.FORWARD:
                    forwards[place_of_node[node]] = node
        return _integers(place_of_node), _integers([forwards.get(place, -1) for place in range(len(numbers))])


def _node_kind(action: Action) -> NodeKind:
    return NodeKind.COMPUTE if ACTION_TABLE[action.kind].resource is Resource.COMPUTE else NodeKind.SEND


def _integers(values: Sequence[int]) -> Integers:
    return np.array(values, dtype=np.int64)


def _scattered(places: Integers, values: Integers, size: int) -> Integers:
    """An array of -1 but for these values at these places."""
    array = np.full(size, -1)
    array[places] = values
    return array
