"""The nodes and needs of one component of lanes, numbered from 0, without durations."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from multimodal.schedule.dependencies import dependencies
from multimodal.schedule.event_arrays import Bytes, Integers, NodeKind
from multimodal.schedule.lane_components import LaneComponent
from multimodal.schedule.text import action_to_text
from multimodal.values.assignment import Assignment
from multimodal.values.errors import ScheduleError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import ACTION_TABLE, Action, ActionKind, Place, Resource
from multimodal.values.schedule_form import ScheduleForm, form_of

CollectiveKey = tuple[ActionKind, str, int]
"""(kind, unit, virtual stage): what all replicas take part in together."""


@dataclass(frozen=True)
class ScheduleStructure:
    """What components that are alike share. A *code* is a node's number or, for collective k, -(k + 1)."""

    collectives: tuple[CollectiveKey, ...]
    lane_codes: tuple[Integers, ...]
    """Per lane the codes of what it comes to, receives left out."""
    lane_fillers: tuple[Bytes, ...]
    lane_positions: tuple[Integers, ...]
    """Per entry of `lane_codes` its position in the lane's actions."""
    kinds: Bytes
    first_entries: tuple[tuple[int, int], ...]
    """Per node the (lane, position) where it stands first; nodes are numbered in this order."""
    num_needs: Integers
    needs: Integers
    """Codes, node by node."""
    num_collective_needs: Integers
    collective_needs: Integers
    num_receivers: Integers
    receivers: Integers
    """Local lanes that a send goes to, node by node."""
    receive_entries: tuple[tuple[int, int], ...]
    """Per node the (lane, position) of a send's receive, (-1, -1) where there is none."""
    place_of_node: Integers
    """Number of the place that a computation is of; -1 for sends."""
    forward_of_place: Integers
    """The forward of every place; -1 where there is none."""


def build_structure(
    component: LaneComponent, *, graph: ModelGraph, plan: Plan, assignment: Assignment, lowered: bool
) -> ScheduleStructure:
    """Number a component's actions and ask `dependencies` what each needs. O(actions + dependencies).

    Raises ScheduleError when an action needs one that the schedule lacks.
    """
    return _Numbering(component, graph, plan, assignment, lowered).structure()


class _Numbering:
    """Codes of actions, while they are given."""

    def __init__(self, component: LaneComponent, graph: ModelGraph, plan: Plan, assignment: Assignment, lowered: bool) -> None:
        self.graph, self.plan, self.assignment, self.lowered = graph, plan, assignment, lowered
        self.form: ScheduleForm = form_of(component.schedule)
        self.lanes = component.schedule.lanes
        self.codes: dict[Action, int] = {}
        self.collectives: dict[CollectiveKey, list[Action]] = {}
        self.entries: list[tuple[int, int]] = []
        self.receives: dict[Action, list[tuple[int, int]]] = {}
        self.lane_codes: list[list[int]] = [[] for _ in self.lanes]
        self.lane_positions: list[list[int]] = [[] for _ in self.lanes]
        for lane, each in enumerate(self.lanes):
            for position, action in enumerate(each.actions):
                self._number(action, lane, position)

    def _number(self, action: Action, lane: int, position: int) -> None:
        resource = ACTION_TABLE[action.kind].resource
        if resource is Resource.RECEIVE:
            self.receives.setdefault(action, []).append((lane, position))
            return
        if action not in self.codes:
            if resource is Resource.COLLECTIVE:
                key = action.kind, action.unit, action.stage
                self.collectives.setdefault(key, []).append(action)
                self.codes[action] = -1 - list(self.collectives).index(key)
            else:
                self.codes[action] = len(self.entries)
                self.entries.append((lane, position))
        self.lane_codes[lane].append(self.codes[action])
        self.lane_positions[lane].append(position)

    def structure(self) -> ScheduleStructure:
        nodes = [self.lanes[lane].actions[position] for lane, position in self.entries]
        needs = [self._needs(action) for action in nodes]
        collective_needs = [[need for action in row for need in self._needs(action)] for row in self.collectives.values()]
        receives: dict[int, list[tuple[int, int]]] = {}
        for receive, entries in self.receives.items():
            receives[self._send_of(receive)] = entries
        receivers = [[lane for lane, _ in receives.get(node, ())] for node in range(len(nodes))]
        places, forwards = self._places(nodes)
        return ScheduleStructure(
            tuple(self.collectives),
            tuple(map(_integers, self.lane_codes)),
            tuple(
                np.array([position in lane.fillers for position in positions], dtype=np.uint8)
                for lane, positions in zip(self.lanes, self.lane_positions, strict=True)
            ),
            tuple(map(_integers, self.lane_positions)),
            np.array([_node_kind(action) for action in nodes], dtype=np.uint8),
            tuple(self.entries),
            _integers([len(row) for row in needs]),
            _integers([need for row in needs for need in row]),
            _integers([len(row) for row in collective_needs]),
            _integers([need for row in collective_needs for need in row]),
            _integers([len(row) for row in receivers]),
            _integers([lane for row in receivers for lane in row]),
            tuple(receives.get(node, ((-1, -1),))[0] for node in range(len(nodes))),
            places,
            forwards,
        )

    def _needs(self, action: Action) -> list[int]:
        needed = dependencies(action, self.graph, self.plan, self.assignment, lowered=self.lowered, form=self.form)
        return [self._send_of(need) if need in self.receives else self._code(need, action) for need in needed]

    def _send_of(self, receive: Action) -> int:
        (send,) = dependencies(receive, self.graph, self.plan, self.assignment, lowered=self.lowered, form=self.form)
        return self._code(send, receive)

    def _code(self, need: Action, action: Action) -> int:
        if need not in self.codes:
            raise ScheduleError(
                f"{action_to_text(action)} needs {action_to_text(need)}, which the schedule lacks; validate it first"
            )
        return self.codes[need]

    def _places(self, nodes: Sequence[Action]) -> tuple[Integers, Integers]:
        numbers: dict[Place, int] = {}
        forwards: dict[int, int] = {}
        place_of_node = [-1] * len(nodes)
        for node, action in enumerate(nodes):
            if ACTION_TABLE[action.kind].resource is Resource.COMPUTE:
                place_of_node[node] = numbers.setdefault(action.place, len(numbers))
                if action.kind is ActionKind.FORWARD:
                    forwards[place_of_node[node]] = node
        return _integers(place_of_node), _integers([forwards.get(place, -1) for place in range(len(numbers))])


def _node_kind(action: Action) -> NodeKind:
    return NodeKind.COMPUTE if ACTION_TABLE[action.kind].resource is Resource.COMPUTE else NodeKind.SEND


def _integers(values: Sequence[int]) -> Integers:
    return np.array(values, dtype=np.int64)
