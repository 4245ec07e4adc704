"""Lowering in Python and message by message: what `insert_communication` is held against."""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from multimodal.schedule.dependencies import dependencies, message, needs_message
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Action, Lane, Schedule
from multimodal.values.schedule_form import form_of


class _Message(NamedTuple):
    """One dependency that travels. Messages sort by producer, then consumer, in the order of one execution."""

    producer_number: int
    consumer_number: int
    send: Action
    receive: Action
    source_lanes: tuple[int, ...]


def lower_lanes_reference(
    schedule: Schedule, numbers: Mapping[Action, int], *, graph: ModelGraph, plan: Plan, assignment: Assignment
) -> Schedule:
    """Put sends and receives into a schedule whose forwards and backwards have numbers in the order in which they start."""
    sends: dict[Action, list[_Message]] = defaultdict(list)
    receives: dict[Action, list[_Message]] = defaultdict(list)
    form = form_of(schedule)
    for consumer, consumer_number in numbers.items():
        for producer in dependencies(consumer, graph, plan, assignment, form=form):
            if needs_message(producer, consumer, plan):
                source_lanes = plan.lanes_of_stage(producer.unit, producer.replica, producer.stage)
                found = _Message(numbers[producer], consumer_number, *message(producer, consumer), source_lanes)
                sends[producer].append(found)
                receives[consumer].append(found)
    return Schedule(tuple(_lower_lane(lane, sends, receives) for lane in schedule.lanes))


def _lower_lane(lane: Lane, sends: dict[Action, list[_Message]], receives: dict[Action, list[_Message]]) -> Lane:
    pending = _PendingReceives(found for action in lane.actions for found in receives.get(action, ()))
    actions: list[Action] = []
    fillers: set[int] = set()
    for position, action in enumerate(lane.actions):
        actions += pending.take(receives.get(action, ()))
        if position in lane.fillers:
            fillers.add(len(actions))
        actions.append(action)
        actions += [found.send for found in sends.get(action, ())]
    return Lane(lane.ranks, tuple(actions), frozenset(fillers))


class _PendingReceives:
    """The receives that a lane has yet to post, as one queue per lane they come from."""

    def __init__(self, messages: Iterable[_Message]) -> None:
        self.queues: dict[int, list[_Message]] = defaultdict(list)
        for found in messages:
            for lane in found.source_lanes:
                self.queues[lane].append(found)
        for queue in self.queues.values():
            heapq.heapify(queue)
        self.posted: set[_Message] = set()

    def take(self, needed: Iterable[_Message]) -> list[Action]:
        """Post `needed` and, transitively, all that must be posted before; returns the receives in sending order."""
        taken: list[_Message] = []
        wanted = [found for found in needed if found not in self.posted]
        while wanted:
            last = wanted.pop()
            for lane in last.source_lanes:
                queue = self.queues[lane]
                while queue and queue[0] <= last:
                    found = heapq.heappop(queue)
                    if found not in self.posted:
                        self.posted.add(found)
                        taken.append(found)
                        wanted.append(found)
        return [found.receive for found in sorted(taken)]
