"""Every action of a step as a number, with what each needs as arrays: `dependencies` asked once for whoever wants to know."""

from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from operator import itemgetter

import numpy as np

from multimodal.schedule.dependencies import message, needs_message
from multimodal.schedule.event_arrays import Bytes, Integers
from multimodal.schedule.expected_actions import compute_actions
from multimodal.schedule.kept_by_identity import KeptByIdentity
from multimodal.schedule.needs_by_stage import needs_by_stage
from multimodal.schedule.unit_cost import unit_cost
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import ACTION_TABLE, Action, ActionKind, Resource, Schedule
from multimodal.values.schedule_form import PLAIN, ScheduleForm

StageKey = tuple[str, int, int]
"""(unit, replica, virtual stage)."""
KINDS = tuple(ActionKind)
"""What a number in `StepTable.kinds` stands for."""
KIND_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}
_RESOURCES = tuple(Resource)
_RESOURCE_OF_KIND = np.array([_RESOURCES.index(ACTION_TABLE[kind].resource) for kind in KINDS], np.uint8)
_KIND, _UNIT, _REPLICA, _STAGE, _MICROBATCH, _PEER, _PART = map(itemgetter, range(7))


def resource_number(resource: Resource) -> int:
    """What a resource is called in `StepTable.resources`."""
    return _RESOURCES.index(resource)


class StepTable:
    """The actions of one step in the order of `expected_actions`: `num_computed` of the compute dialect, then messages.

    Message m is sent by action `num_computed + 2 m` and received by the one after it. Arrays called `starts` have one entry more
    than there are rows. Immutable; holds no reference to the assignment.
    """

    def __init__(self, graph: ModelGraph, plan: Plan, assignment: Assignment, form: ScheduleForm) -> None:
        self.graph, self.plan, self.form = graph, plan, form
        computed = compute_actions(graph, plan, assignment, form=form)
        self.computed: Sequence[Action] = computed
        self.num_computed = len(computed)
        self.computed_numbers = {action: number for number, action in enumerate(computed)}
        self._stages: dict[StageKey, int] = {}
        keys = zip(map(_UNIT, computed), map(_REPLICA, computed), map(_STAGE, computed), strict=True)
        stage_numbers = self._stages
        self.computed_stages = _integers([stage_numbers.setdefault(key, len(stage_numbers)) for key in keys])
        self.computed_kinds = np.array([KIND_NUMBERS[kind] for kind in map(_KIND, computed)], np.uint8)
        self.microbatches = _integers(list(map(_MICROBATCH, computed)))
        self.replicas = _integers(list(map(_REPLICA, computed)))
        self.need_starts, self.needs = needs_by_stage(computed, self.computed_numbers, graph, plan, assignment, form)
        """[num_computed + 1] into the numbers of what each action needs, in the order of `dependencies`."""
        self.kept_lanes: KeptByIdentity[Schedule, tuple[bool, object]] = KeptByIdentity()
        """Schedules in these numbers (`number_lanes`), for both dialects."""

    @cached_property
    def stages(self) -> tuple[StageKey, ...]:
        """The stage that each stage number stands for."""
        return tuple(self._stages)

    @cached_property
    def lane_rows(self) -> tuple[Integers, Integers]:
        """Per stage its lanes: starts, lanes."""
        rows = [self.plan.lanes_of_stage(*stage) for stage in self._stages]
        return _starts(list(map(len, rows))), _integers(list(chain.from_iterable(rows)))

    @cached_property
    def places(self) -> Integers:
        """[num_computed] a number of each action's place, which is the same for all that is done with one microbatch there."""
        return self.computed_stages * (2 + int(self.microbatches.max(initial=0))) + 1 + self.microbatches

    def lanes_of_actions(self, numbers: Integers) -> tuple[Integers, Integers]:
        """Per action the lanes of its stage: starts, lanes."""
        return take_rows(*self.lane_rows, self.stage_numbers[numbers])

    @cached_property
    def need_owners(self) -> Integers:
        """Per entry of `needs` the action that needs it."""
        return np.repeat(np.arange(self.num_computed), np.diff(self.need_starts))

    @cached_property
    def message_of_need(self) -> Integers:
        """Per entry of `needs` the number of the message that carries it; -1: none."""
        producers, consumers = self.needs, self.need_owners
        blocks = self.computed_stages * len(KINDS) + self.computed_kinds
        pairs = blocks[producers] * (int(blocks.max(initial=0)) + 1) + blocks[consumers]
        _, first, pair_of_need = np.unique(pairs, return_index=True, return_inverse=True)
        actions = self.computed
        ends = zip(producers[first].tolist(), consumers[first].tolist(), strict=True)
        travels = np.array([needs_message(actions[source], actions[target], self.plan) for source, target in ends], bool)
        is_carried = travels[pair_of_need.ravel()] if len(first) else np.zeros(0, bool)
        return np.where(is_carried, np.cumsum(is_carried) - 1, -1)

    @cached_property
    def message_ends(self) -> tuple[Integers, Integers]:
        """Per message the numbers of its producer and of its consumer."""
        carried = self.message_of_need >= 0
        return self.needs[carried], self.need_owners[carried]

    @property
    def num_messages(self) -> int:
        """Dependencies that travel between lanes."""
        return len(self.message_ends[0])

    @cached_property
    def actions(self) -> Sequence[Action]:
        """[num_actions] of both dialects."""
        ends = (map(self.computed.__getitem__, numbers.tolist()) for numbers in self.message_ends)
        return (*self.computed, *chain.from_iterable(map(message, *ends)))

    @cached_property
    def numbers(self) -> dict[Action, int]:
        """Action of either dialect -> number."""
        messages = zip(self.actions[self.num_computed :], range(self.num_computed, len(self.actions)), strict=True)
        return self.computed_numbers | dict(messages)

    @cached_property
    def has_distinct_messages(self) -> bool:
        """Whether no two dependencies would be carried by one message."""
        producers, consumers = self.message_ends
        size = int(self.places.max(initial=0)) + 1
        is_forward = self.computed_kinds[producers] == KIND_NUMBERS[ActionKind.FORWARD]
        keys = (self.places[producers] * size + self.places[consumers]) * 2 + is_forward
        if not self.form.num_parts:
            return len(np.unique(keys)) == len(keys)
        return len(self.numbers) == len(self.actions)

    @cached_property
    def lowered_needs(self) -> tuple[Integers, Integers]:
        """Per action of the lowered dialect what it needs: starts, numbers."""
        num_messages, message_of_need = self.num_messages, self.message_of_need
        receives = self.num_computed + 2 * message_of_need + 1
        needs = np.where(message_of_need < 0, self.needs, receives)
        of_messages = np.column_stack((self.message_ends[0], self.num_computed + 2 * np.arange(num_messages))).ravel()
        starts = np.concatenate((self.need_starts, self.need_starts[-1] + 1 + np.arange(2 * num_messages)))
        return starts, np.concatenate((needs, of_messages))

    @cached_property
    def stage_numbers(self) -> Integers:
        """[num_actions] the number of each action's stage."""
        producers, consumers = (self.computed_stages[ends] for ends in self.message_ends)
        return np.concatenate((self.computed_stages, np.column_stack((producers, consumers)).ravel()))

    @cached_property
    def resources(self) -> Bytes:
        """[num_actions] `resource_number` of each action."""
        messages = np.array([resource_number(Resource.SEND), resource_number(Resource.RECEIVE)], np.uint8)
        return np.concatenate((_RESOURCE_OF_KIND[self.computed_kinds], np.tile(messages, self.num_messages)))

    @cached_property
    def unit_costs(self) -> Integers:
        """[num_computed] `unit_cost` of each action of the compute dialect."""
        blocks = self.computed_stages * len(KINDS) + self.computed_kinds
        _, first, block_of_action = np.unique(blocks, return_index=True, return_inverse=True)
        costs = _integers([unit_cost(self.computed[number], self.graph, self.plan) for number in first.tolist()])
        of_actions: Integers = costs[block_of_action.ravel()]
        return of_actions

    @cached_property
    def collective_rows(self) -> tuple[Integers, Integers, Integers]:
        """Per action its collective (-1: none); per collective the actions that take part, in the order of replicas."""
        collectives: dict[tuple[object, ...], list[int]] = {}
        found = np.flatnonzero(_RESOURCE_OF_KIND[self.computed_kinds] == resource_number(Resource.COLLECTIVE))
        for number in found.tolist():
            action = self.computed[number]
            collectives.setdefault((action.kind, action.unit, action.stage, action.part), []).append(number)
        collective_of = np.full(self.num_computed + 2 * self.num_messages, -1)
        for index, members in enumerate(collectives.values()):
            collective_of[members] = index
        rows = list(collectives.values())
        return collective_of, _starts(list(map(len, rows))), _integers(list(chain.from_iterable(rows)))


_TABLES: KeptByIdentity[Assignment, StepTable] = KeptByIdentity()
"""Those who build, lower, check and simulate one schedule share a table."""


def step_table(graph: ModelGraph, plan: Plan, assignment: Assignment, *, form: ScheduleForm = PLAIN) -> StepTable:
    """Return the table of a step; made once as long as the assignment lives. O(actions + dependencies)."""
    return _TABLES.find(
        assignment,
        like=lambda table: table.graph is graph and table.plan is plan and (table.form is form or table.form == form),
        make=lambda: StepTable(graph, plan, assignment, form),
    )


def _integers(values: Sequence[int]) -> Integers:
    return np.array(values, np.int64)


def _starts(lengths: Sequence[int]) -> Integers:
    return np.concatenate(([0], np.cumsum(_integers(lengths))))


def take_rows(starts: Integers, values: Integers, rows: Integers) -> tuple[Integers, Integers]:
    """Of rows of variable length take some, in any order: starts, values."""
    lengths = np.diff(starts)[rows]
    new_starts = np.concatenate(([0], np.cumsum(lengths)))
    offsets = np.repeat(starts[rows] - new_starts[:-1], lengths)
    return new_starts, values[np.arange(new_starts[-1]) + offsets]
