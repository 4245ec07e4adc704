"""The work of a step as numbered pieces, and what each of them needs before it may run, as arrays."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache, cached_property, lru_cache
from itertools import chain

import numpy as np

from multimodal.values.action import Action, ActionKind, LayerRange, MessageKey, Place, Resource, SegmentRange
from multimodal.values.arrays.rows import Bools, Bytes, Integers, group_rows, row_numbers, row_starts, take_rows
from multimodal.values.parts.cuts import StageKey
from multimodal.values.shape import StepShape
from multimodal.values.work.needs import piece_needs
from multimodal.values.work.pieces import (
    BACKWARD,
    FORWARD,
    GATHER,
    INPUT_GRADIENT,
    KIND_NUMBERS,
    KINDS,
    REDUCTION,
    WEIGHT_GRADIENT,
    Pieces,
)

__all__ = ["BACKWARD", "FORWARD", "GATHER", "INPUT_GRADIENT", "KINDS", "KIND_NUMBERS", "REDUCTION", "WEIGHT_GRADIENT", "StepWork"]

RESOURCE_NUMBERS = {resource: number for number, resource in enumerate(Resource)}
"""The number of a resource in `StepWork.resources`, and in the C++ kernels."""
COMPUTE, SEND, RECEIVE, COLLECTIVE = RESOURCE_NUMBERS.values()
_RESOURCE_OF_KIND = np.array([RESOURCE_NUMBERS[kind.resource] for kind in KINDS], np.uint8)
_GRADIENTS = (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)
SEND_OF = {ActionKind.FORWARD: ActionKind.SEND_FORWARD, **dict.fromkeys(_GRADIENTS, ActionKind.SEND_BACKWARD)}
_RECEIVE_OF = {ActionKind.FORWARD: ActionKind.RECEIVE_FORWARD, **dict.fromkeys(_GRADIENTS, ActionKind.RECEIVE_BACKWARD)}
_IS_SENT = np.isin(np.arange(len(KINDS)), [KIND_NUMBERS[kind] for kind in SEND_OF])
_new = tuple.__new__
"""Makes named tuples five times as fast as their constructors do: schedules have tens of thousands of actions."""


@lru_cache(maxsize=4)
def step_work(shape: StepShape) -> "StepWork":
    """Return the numbered work of a shape, made once for the shapes that one schedule passes through. O(actions + dependencies).

    A schedule keeps its own.
    """
    return StepWork(shape)


class StepWork:
    """The pieces of one shape: `num_computed` computations and collectives, then messages.

    Computations come by unit, stage, replica, then kind and microbatch. A stage has backwards where `StepShape.backward_need`
    says so, and reduces gradients where it trains something, even on a replica without microbatches (the reduction is
    collective). Where a backward is split, its two halves take its place; a stage that trains nothing has no weight gradient.
    Where a place is cut into segments, its ranges come in the order they run.

    Message m is sent by piece `num_computed + 2 m` and received by the one after it. Arrays called `starts` have one entry more
    than there are rows.
    """

    def __init__(self, shape: StepShape) -> None:
        self.graph, self.plan, self.cuts = shape.graph, shape.plan, shape.cuts
        self.pieces = Pieces(shape)
        self.num_computed = self.pieces.num_pieces
        self.computed_stages, self.kinds, self.microbatches = self.pieces.stages, self.pieces.kinds, self.pieces.microbatches
        """[num_computed] the stage, `KIND_NUMBERS` and microbatch of each piece."""
        self.replicas = self.pieces.replica_of_stage[self.computed_stages]
        self._routes = shape.routes

    @cached_property
    def _needs(self) -> tuple[Integers, Integers]:
        return piece_needs(self.pieces, self.graph, self._routes)

    @property
    def need_starts(self) -> Integers:
        """[num_computed + 1] into `needs`: the pieces that each piece needs (`piece_needs`)."""
        return self._needs[0]

    @property
    def needs(self) -> Integers:
        """[num_needs] numbers of pieces."""
        return self._needs[1]

    @property
    def stages(self) -> tuple[StageKey, ...]:
        """The stage of each stage number."""
        return self.pieces.stage_keys

    @cached_property
    def computed(self) -> Sequence[Action]:
        """[num_computed] the actions of the compute dialect. O(actions)."""
        return self.pieces.actions()

    @cached_property
    def computed_numbers(self) -> Mapping[Action, int]:
        """Action -> number. O(actions)."""
        return {action: number for number, action in enumerate(self.computed)}

    def action(self, number: int) -> Action:
        """Return the action of a number of either dialect; makes no other actions."""
        if number < self.num_computed:
            return self.pieces.action(number)
        index, is_receive = divmod(number - self.num_computed, 2)
        return message(*(self.pieces.action(int(ends[index])) for ends in self.message_ends))[is_receive]

    @cached_property
    def lane_rows(self) -> tuple[Integers, Integers]:
        """The lanes of each stage, as rows: starts, lanes."""
        tables = [self.plan.stage_tables[unit] for unit in self.pieces.units]
        counts = np.concatenate([np.diff(table.lane_starts) for table in tables])
        return row_starts(counts), np.concatenate([table.lanes for table in tables])

    @property
    def first_lanes(self) -> Integers:
        """[num_stages] the first lane of each stage; meaningless for stages that a replica does not have."""
        starts, lanes = self.lane_rows
        return np.append(lanes, 0)[starts[:-1]]

    @cached_property
    def is_in_one_lane(self) -> bool:
        """True if every stage belongs to one lane, and so does every piece."""
        return bool((np.diff(self.lane_rows[0]) == 1).all())

    def stage_lanes(self, stages: Integers, lanes: Integers) -> Integers:
        """Return a number for each pair of a stage and one of its lanes."""
        starts, of_stages = self.lane_rows
        if self.is_in_one_lane:
            return stages
        keys = row_numbers(starts) * (int(of_stages.max()) + 1) + of_stages
        by_key = np.argsort(keys)
        return by_key[np.searchsorted(keys[by_key], stages * (int(of_stages.max()) + 1) + lanes)]

    @cached_property
    def places(self) -> Integers:
        """[num_computed] a number for each piece's place: the same for all work on one microbatch in one stage."""
        return self.computed_stages * (2 + int(self.microbatches.max(initial=0))) + 1 + self.microbatches

    def lanes_of(self, numbers: Integers) -> tuple[Integers, Integers]:
        """Return the lanes of each piece's stage, as rows: starts, lanes."""
        is_computed = not len(numbers) or numbers.max() < self.num_computed
        stages = (self.computed_stages if is_computed else self.stage_numbers)[numbers]
        if self.is_in_one_lane:
            return np.arange(len(numbers) + 1), self.first_lanes[stages]
        return take_rows(*self.lane_rows, stages)

    def by_lane(self, numbers: Integers) -> tuple[Integers, Integers]:
        """Return the lane and the number of each piece in each of its lanes, lane after lane, in the given order."""
        starts, lanes = self.lanes_of(numbers)
        in_turn = np.argsort(lanes, kind="stable")
        return lanes[in_turn], numbers[row_numbers(starts)[in_turn]]

    def needs_in(self, *, lowered: bool) -> tuple[Integers, Integers]:
        """Return the pieces that each piece of a dialect needs, as rows: starts, numbers."""
        return self._lowered_needs if lowered else (self.need_starts, self.needs)

    def needs_of(self, action: Action, *, lowered: bool) -> Sequence[Action]:
        """Return the actions of a dialect that must be complete before `action` may run.

        In the lowered dialect a message carries a need between different rank groups: the producer's send, then the consumer's
        receive, then the consumer.
        """
        (starts, needs), number = self.needs_in(lowered=lowered), self.numbers(lowered=lowered)[action]
        actions = self.actions if lowered else self.computed
        return [actions[need] for need in needs[starts[number] : starts[number + 1]].tolist()]

    def num_pieces(self, *, lowered: bool) -> int:
        """Return the number of pieces of a dialect."""
        return self.num_computed + 2 * self.num_messages * lowered

    @cached_property
    def need_owners(self) -> Integers:
        """[num_needs] the piece that has the need."""
        return np.repeat(np.arange(self.num_computed), np.diff(self.need_starts))

    @cached_property
    def _hand_overs(self) -> Integers:
        """The needs between stages for what a computation hands over: activations and their gradients."""
        found = np.flatnonzero(self.computed_stages[self.needs] != self.computed_stages[self.need_owners])
        return found[_IS_SENT[self.kinds[self.needs[found]]] & _IS_SENT[self.kinds[self.need_owners[found]]]]

    def messages_of(self, pieces: Integers) -> list[tuple[tuple[MessageKey, ...], tuple[MessageKey, ...]]]:
        """Return the messages that each of these pieces takes and gives, by the other end. O(pieces + needs)."""
        is_here = np.zeros(self.num_pieces(lowered=True), bool)
        is_here[pieces] = True
        producers, consumers = self.needs[self._hand_overs], self.need_owners[self._hand_overs]
        found = np.flatnonzero(is_here[producers] | is_here[consumers])
        takes, gives = defaultdict[int, list[MessageKey]](list), defaultdict[int, list[MessageKey]](list)
        action = cache(self.pieces.action)
        key_between = cache(lambda producer, consumer: message_key(action(producer), action(consumer)))
        for producer, consumer in zip(producers[found].tolist(), consumers[found].tolist(), strict=True):
            gives[producer].append(key_between(producer, consumer))
            takes[consumer].append(key_between(producer, consumer))
        numbers = pieces.tolist()
        for number in (each for each in numbers if each >= self.num_computed):
            index, is_receive = divmod(number - self.num_computed, 2)
            (gives if is_receive else takes)[number].append(key_between(*(int(ends[index]) for ends in self.message_ends)))
        return [(tuple(takes[number]), tuple(gives[number])) for number in numbers]

    @cached_property
    def message_of_need(self) -> Integers:
        """[num_needs] the number of the message that carries the need; -1: none."""
        carried = self._hand_overs[self._needs_message(self.needs[self._hand_overs], self.need_owners[self._hand_overs])]
        numbers = np.full(len(self.needs), -1)
        numbers[carried] = np.arange(len(carried))
        return numbers

    def _needs_message(self, producers: Integers, consumers: Integers) -> Bools:
        """Return which hand-overs are no matter of one process: the ranks of their ends differ, or hold other tokens.

        They hold other tokens if one of two units on the same ranks spreads tokens over context parallel ranks.
        """
        tables = [self.plan.stage_tables[unit] for unit in self.pieces.units]
        ranks = np.concatenate([table.rank_groups for table in tables])
        unit_of_stage = self.pieces.unit_of_stage
        is_shared = np.array([self.plan.units[unit].context_parallel_size > 1 for unit in self.pieces.units], bool)
        source, target = self.computed_stages[producers], self.computed_stages[consumers]
        found: Bools = ranks[source] != ranks[target]
        if is_shared.any():
            units = unit_of_stage[source], unit_of_stage[target]
            found |= (units[0] != units[1]) & (is_shared[units[0]] | is_shared[units[1]])
        return found

    @cached_property
    def blocks(self) -> Integers:
        """[num_computed] a number for each pair of a kind and a stage."""
        return self.computed_stages * len(KINDS) + self.kinds

    @cached_property
    def message_ends(self) -> tuple[Integers, Integers]:
        """The numbers of each message's producer and consumer."""
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
        return {**self.computed_numbers, **dict(messages)}

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
        messages = np.array([SEND, RECEIVE], np.uint8)
        return np.concatenate((_RESOURCE_OF_KIND[self.kinds], np.tile(messages, self.num_messages)))

    @cached_property
    def collective_rows(self) -> tuple[Integers, Integers, Integers]:
        """The collective of each piece (-1: none), and the pieces of each collective (starts, numbers), replica by replica."""
        members = np.flatnonzero(_RESOURCE_OF_KIND[self.kinds] == COLLECTIVE)
        stages = self.computed_stages[members]
        parts = self.pieces.parts[members] + 1
        first_stages = stages - self.replicas[members]  # the numbers of a stage's replicas follow each other
        for unit in self.pieces.units.values():
            if self.plan.units[unit.unit].is_unlike:
                self._join_unlike(unit.first_stage, unit.sizes.size, members, first_stages, parts)
        keys = (first_stages * len(KINDS) + self.kinds[members]) * (1 + int(parts.max(initial=0))) + parts
        _, first, collectives = np.unique(keys, return_index=True, return_inverse=True)
        in_order = np.empty(len(first), np.int64)
        in_order[np.argsort(first)] = np.arange(len(first))
        collectives = in_order[collectives.ravel()]
        collective_of = np.full(self.num_computed + 2 * self.num_messages, -1)
        collective_of[members] = collectives
        return collective_of, *group_rows(collectives, members, len(first))

    def _join_unlike(self, first_stage: int, num_stages: int, members: Integers, stages: Integers, parts: Integers) -> None:
        """Join, in place, the reductions of a unit with unlike replicas: by their first layer instead of by stage and part.

        Parameter gathers have nothing to wait for: unlike replicas keep their optimizer state whole.
        """
        of_members = self.computed_stages[members]
        own = np.flatnonzero((of_members >= first_stage) & (of_members < first_stage + num_stages))
        for index, piece in zip(own.tolist(), members[own].tolist(), strict=True):
            action = self.pieces.action(piece)
            stages[index] = int(self.computed_stages[piece])
            if isinstance(action.covers, LayerRange):
                stages[index] = first_stage
                parts[index] = 1 + self.plan.virtual_stage(*action[1:4]).layers.start + action.covers.first


def message_key(producer: Action, consumer: Action) -> MessageKey:
    """Return the message by which a computation hands its result to another one."""
    kind, unit, replica, stage, microbatch, _, covers = producer
    _, other_unit, other_replica, other_stage, other_microbatch, _, _ = consumer
    # Between units a subset is named by the microbatch at the other end, so only stages of one unit need to say which. Of ranges
    # of segments, one alone sends.
    if unit != other_unit or isinstance(covers, SegmentRange):
        covers = None
    source = _new(Place, (unit, replica, stage, microbatch))
    target = _new(Place, (other_unit, other_replica, other_stage, other_microbatch))
    return _new(MessageKey, ("forward" if kind is ActionKind.FORWARD else "backward", source, target, covers))


def message(producer: Action, consumer: Action) -> tuple[Action, Action]:
    """Return the send at the producer's place and the receive at the consumer's place that carry this dependency."""
    _, source, target, covers = message_key(producer, consumer)
    return (
        _new(Action, (SEND_OF[producer.kind], *source, target, covers)),
        _new(Action, (_RECEIVE_OF[consumer.kind], *target, source, covers)),
    )
