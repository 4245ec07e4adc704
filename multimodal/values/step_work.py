"""The work of a step as numbered pieces, with their needs as arrays: `dependencies`, evaluated once for all callers."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain, repeat
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from multimodal.values.action import ACTION_TABLE, Action, ActionKind, Place, Resource
from multimodal.values.dependencies import computations, dependencies, message, needs_message
from multimodal.values.step_graph import Cuts, StageKey, StepGraph

Integers = NDArray[np.int64]
Bytes = NDArray[np.uint8]
KINDS = tuple(ActionKind)
"""The kind that a number in `StepWork.kinds` stands for."""
KIND_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}
RESOURCE_NUMBERS = {resource: number for number, resource in enumerate(Resource)}
"""The number of a resource in `StepWork.resources`, and in the C++ kernels."""
_RESOURCE_OF_KIND = np.array([RESOURCE_NUMBERS[ACTION_TABLE[kind].resource] for kind in KINDS], np.uint8)
_KIND, _UNIT, _REPLICA, _STAGE, _MICROBATCH = map(itemgetter, range(5))
_Block = tuple[ActionKind, str, int, int]
"""(kind, unit, replica, stage)."""


def step_work(step: StepGraph) -> "StepWork":
    """Return the numbered work of a step, made once. O(actions + dependencies)."""
    return step.once(StepWork)


class StepWork:
    """The pieces of one step: `num_computed` computations and collectives in the order of `computations`, then messages.

    Message m is sent by piece `num_computed + 2 m` and received by the one after it. Arrays called `starts` have one entry more
    than there are rows. Holds counts and routes of the assignment, but not the assignment.
    """

    def __init__(self, step: StepGraph) -> None:
        self.graph, self.plan, self.cuts = step.graph, step.plan, step.cuts
        computed = computations(step)
        self.computed: Sequence[Action] = computed
        self.num_computed = len(computed)
        self.computed_numbers = {action: number for number, action in enumerate(computed)}
        self._stages: dict[StageKey, int] = {}
        keys = zip(map(_UNIT, computed), map(_REPLICA, computed), map(_STAGE, computed), strict=True)
        stage_numbers = self._stages
        self.computed_stages = _integers([stage_numbers.setdefault(key, len(stage_numbers)) for key in keys])
        self.kinds = np.array([KIND_NUMBERS[kind] for kind in map(_KIND, computed)], np.uint8)
        """[num_computed] `KIND_NUMBERS` of each piece."""
        self.microbatches = _integers(list(map(_MICROBATCH, computed)))
        self.replicas = _integers(list(map(_REPLICA, computed)))
        self.need_starts, self.needs = _needs_by_stage(computed, self.computed_numbers, step)
        """[num_computed + 1] into the numbers of what each piece needs, in the order of `dependencies`."""

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
        """[num_computed] a number of each piece's place, the same for all that is done with one microbatch there."""
        return self.computed_stages * (2 + int(self.microbatches.max(initial=0))) + 1 + self.microbatches

    def lanes_of(self, numbers: Integers) -> tuple[Integers, Integers]:
        """Return the lanes of the stage of each piece: starts, lanes."""
        return take_rows(*self.lane_rows, self.stage_numbers[numbers])

    def needs_in(self, *, lowered: bool) -> tuple[Integers, Integers]:
        """Return what each piece of a dialect needs: starts, numbers."""
        return self._lowered_needs if lowered else (self.need_starts, self.needs)

    def num_pieces(self, *, lowered: bool) -> int:
        """Return the number of pieces of a dialect."""
        return self.num_computed + 2 * self.num_messages * lowered

    @cached_property
    def need_owners(self) -> Integers:
        """[num_needs] the piece that needs it."""
        return np.repeat(np.arange(self.num_computed), np.diff(self.need_starts))

    @cached_property
    def message_of_need(self) -> Integers:
        """[num_needs] the number of the message that carries it; -1: none."""
        producers, consumers = self.needs, self.need_owners
        blocks = self.blocks
        pairs = blocks[producers] * (int(blocks.max(initial=0)) + 1) + blocks[consumers]
        _, first, pair_of_need = np.unique(pairs, return_index=True, return_inverse=True)
        actions = self.computed
        ends = zip(producers[first].tolist(), consumers[first].tolist(), strict=True)
        travels = np.array([needs_message(actions[source], actions[target], self.plan) for source, target in ends], bool)
        is_carried = travels[pair_of_need.ravel()] if len(first) else np.zeros(0, bool)
        return np.where(is_carried, np.cumsum(is_carried) - 1, -1)

    @cached_property
    def blocks(self) -> Integers:
        """[num_computed] a number of each piece's kind and stage together."""
        return self.computed_stages * len(KINDS) + self.kinds

    @cached_property
    def message_ends(self) -> tuple[Integers, Integers]:
        """Per message the numbers of its producer and of its consumer."""
        carried = self.message_of_need >= 0
        return self.needs[carried], self.need_owners[carried]

    @property
    def num_messages(self) -> int:
        """Number of dependencies that travel between lanes."""
        return len(self.message_ends[0])

    @cached_property
    def actions(self) -> Sequence[Action]:
        """[num_pieces] the actions of both dialects."""
        ends = (map(self.computed.__getitem__, numbers.tolist()) for numbers in self.message_ends)
        return (*self.computed, *chain.from_iterable(map(message, *ends)))

    def numbers(self, *, lowered: bool) -> Mapping[Action, int]:
        """Return the number of every action of a dialect."""
        return self._lowered_numbers if lowered else self.computed_numbers

    @cached_property
    def _lowered_numbers(self) -> Mapping[Action, int]:
        messages = zip(self.actions[self.num_computed :], range(self.num_computed, len(self.actions)), strict=True)
        return self.computed_numbers | dict(messages)

    @cached_property
    def _lowered_needs(self) -> tuple[Integers, Integers]:
        num_messages, message_of_need = self.num_messages, self.message_of_need
        receives = self.num_computed + 2 * message_of_need + 1
        needs = np.where(message_of_need < 0, self.needs, receives)
        of_messages = np.column_stack((self.message_ends[0], self.num_computed + 2 * np.arange(num_messages))).ravel()
        starts = np.concatenate((self.need_starts, self.need_starts[-1] + 1 + np.arange(2 * num_messages)))
        return starts, np.concatenate((needs, of_messages))

    @cached_property
    def stage_numbers(self) -> Integers:
        """[num_pieces] the number of each piece's stage."""
        producers, consumers = (self.computed_stages[ends] for ends in self.message_ends)
        return np.concatenate((self.computed_stages, np.column_stack((producers, consumers)).ravel()))

    @cached_property
    def resources(self) -> Bytes:
        """[num_pieces] `RESOURCE_NUMBERS` of each piece."""
        messages = np.array([RESOURCE_NUMBERS[Resource.SEND], RESOURCE_NUMBERS[Resource.RECEIVE]], np.uint8)
        return np.concatenate((_RESOURCE_OF_KIND[self.kinds], np.tile(messages, self.num_messages)))

    @cached_property
    def collective_rows(self) -> tuple[Integers, Integers, Integers]:
        """Per piece its collective (-1: none); per collective the pieces that take part (starts, numbers), replica by replica."""
        rows: dict[tuple[object, ...], list[int]] = {}
        is_collective = _RESOURCE_OF_KIND[self.kinds] == RESOURCE_NUMBERS[Resource.COLLECTIVE]
        for number in np.flatnonzero(is_collective).tolist():
            action = self.computed[number]
            rows.setdefault((action.kind, action.unit, action.stage, action.covers), []).append(number)
        collective_of = np.full(self.num_computed + 2 * self.num_messages, -1)
        for index, members in enumerate(rows.values()):
            collective_of[members] = index
        return collective_of, _starts(list(map(len, rows.values()))), _integers(list(chain.from_iterable(rows.values())))


def take_rows(starts: Integers, values: Integers, rows: Integers) -> tuple[Integers, Integers]:
    """Select rows of variable length, in any order: starts, values."""
    lengths = np.diff(starts)[rows]
    new_starts = np.concatenate(([0], np.cumsum(lengths)))
    offsets = np.repeat(starts[rows] - new_starts[:-1], lengths)
    return new_starts, values[np.arange(new_starts[-1]) + offsets]


def _needs_by_stage(computed: Sequence[Action], numbers: Mapping[Action, int], step: StepGraph) -> tuple[Integers, Integers]:
    """Return what every piece needs: starts, numbers, in `dependencies`' order. O(actions + dependencies).

    Between stages of one unit, microbatch k needs microbatch k, whichever it is; so one microbatch is asked for there, and a
    reduction needs all of its stage. Where routes lead elsewhere, and where backwards of some microbatches only are cut,
    `dependencies` is asked for every action.
    """
    rows: dict[_Block, list[int]] = {}
    for number, action in enumerate(computed):
        rows.setdefault(action[:4], []).append(number)
    is_even = _is_even(step.cuts, rows)
    owners: list[int] = []
    needs: list[int] = []
    for block, members in rows.items():
        if is_even and _stays_in_unit(block, step):
            # Flat lists: blocks are many and short, so arrays would cost more.
            columns = [_column(need, rows, len(members)) for need in dependencies(computed[members[0]], step)]
            owners += chain.from_iterable(repeat(number, len(columns)) for number in members)
            needs += chain.from_iterable(zip(*columns, strict=True))
        elif is_even and block[0] is ActionKind.REDUCE_GRADIENTS and (block[1], block[3]) not in step.cuts.reduced_by_layer:
            backwards = rows.get((step.cuts.last_kind(Place(*block[1:], 0)), *block[1:]), [])
            owners += chain.from_iterable(repeat(number, len(backwards)) for number in members)
            needs += backwards * len(members)
        else:
            for number in members:
                needed = dependencies(computed[number], step)
                owners += repeat(number, len(needed))
                needs += map(numbers.__getitem__, needed)
    owner, need = np.array(owners, np.int64), np.array(needs, np.int64)
    starts = np.concatenate(([0], np.cumsum(np.bincount(owner, minlength=len(computed)))))
    return starts, need[np.argsort(owner, kind="stable")]


def _column(need: Action, rows: Mapping[_Block, list[int]], num_members: int) -> list[int]:
    """Return the numbers of one need of every microbatch."""
    needed = rows[need[:4]]
    assert len(needed) in (1, num_members), f"not all microbatches need {need}"
    return needed if len(needed) == num_members else needed * num_members


def _is_even(cuts: Cuts, blocks: Mapping[_Block, list[int]]) -> bool:
    """Return True if the backwards of a stage are all whole or all split, and a microbatch has but one per stage."""
    if cuts.num_subsets:
        return False
    return not cuts.split or not any(kind is ActionKind.BACKWARD for kind, *_ in blocks)


def _stays_in_unit(block: _Block, step: StepGraph) -> bool:
    """Return True if a computation needs other stages of its unit, or its own, and nothing else."""
    kind, unit, _, stage = block
    if kind is ActionKind.FORWARD:
        return stage > 0
    if kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT):
        return stage < step.plan.units[unit].num_virtual_stages - 1
    return kind is ActionKind.WEIGHT_GRADIENT


def _integers(values: Sequence[int]) -> Integers:
    return np.array(values, np.int64)


def _starts(lengths: Sequence[int]) -> Integers:
    return np.concatenate(([0], np.cumsum(_integers(lengths))))
