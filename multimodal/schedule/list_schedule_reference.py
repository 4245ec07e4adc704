"""The list scheduler in Python: what `list_schedule` is held against."""

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable

from multimodal.schedule.dependencies import dependencies
from multimodal.schedule.expected_actions import compute_actions
from multimodal.schedule.policy import Policy, StageKey
from multimodal.schedule.split_form import split_form
from multimodal.schedule.unit_cost import unit_cost
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Action, ActionKind
from multimodal.values.schedule_form import PLAIN


def list_schedule_reference(
    graph: ModelGraph, plan: Plan, assignment: Assignment, *, policy: Policy, forward_only: bool = False
) -> list[list[Action]]:
    """Return what every lane does, in order, without reductions."""
    return _ListScheduler(graph, plan, assignment, policy, forward_only).run()


class _ListScheduler:
    """The state of one run. Actions are numbered by urgency, so that a lane's heap of numbers has the most urgent on top."""

    def __init__(self, graph: ModelGraph, plan: Plan, assignment: Assignment, policy: Policy, forward_only: bool) -> None:
        self.plan = plan
        self.policy = policy
        self.form = split_form(graph, plan, assignment) if policy.splits_backwards else PLAIN
        position = {unit: index for index, unit in enumerate(graph.unit_names)}
        rank = policy.rank or (lambda action: ())
        everything = compute_actions(graph, plan, assignment, forward_only=forward_only, form=self.form)
        self.actions = sorted(
            (action for action in everything if action.kind is not ActionKind.REDUCE_GRADIENTS),
            key=lambda a: (self._urgency(a), rank(a), -position[a.unit], a.microbatch, -a.stage, a.replica),
        )
        stages: dict[StageKey, tuple[int, ...]] = {}
        costs: dict[tuple[ActionKind, StageKey], int] = {}
        for action in self.actions:
            if _stage(action) not in stages:
                stages[_stage(action)] = plan.lanes_of_stage(*_stage(action))
            if (action.kind, _stage(action)) not in costs:
                costs[action.kind, _stage(action)] = unit_cost(action, graph, plan)
        self.lanes = [stages[_stage(action)] for action in self.actions]
        self.costs = [costs[action.kind, _stage(action)] for action in self.actions]
        self.groups = [policy.group_of.get(_stage(action), _stage(action)) for action in self.actions]
        self.with_gradient = {action.place for action in self.actions if action.kind in _GRADIENTS}
        self.num_unmet = [0] * len(self.actions)
        self.followers: list[list[int]] = [[] for _ in self.actions]
        self.releases: list[list[int]] = [[] for _ in self.actions]
        self.num_holds = [0] * len(self.actions)
        self.num_left: list[dict[int, int]] = [defaultdict(int) for _ in plan.lanes]
        self.held: list[dict[int, list[int]]] = [defaultdict(list) for _ in plan.lanes]
        self._link(graph, assignment)
        self.now = 0
        self.num_done = 0
        self.running: list[tuple[int, int]] = []
        self.ready: list[list[int]] = [[] for _ in plan.lanes]
        self.is_free = [True] * len(plan.lanes)
        self.touched: set[int] = set()
        self.in_flight: dict[StageKey, int] = defaultdict(int)
        self.stored: dict[StageKey, int] = defaultdict(int)
        self.parked: dict[StageKey, set[int]] = defaultdict(set)
        self.begun: dict[StageKey, int] = defaultdict(int)
        self.to_begin: dict[StageKey, int] = defaultdict(int)
        for index in range(len(self.actions)):
            self.to_begin[self.groups[index]] += self._gives_back(index)
        self.early: dict[StageKey, set[int]] = defaultdict(set)
        self.order: list[list[Action]] = [[] for _ in plan.lanes]

    def _link(self, graph: ModelGraph, assignment: Assignment) -> None:
        """Count what every action waits for, and what every forward's activation is kept for."""
        number = {action: index for index, action in enumerate(self.actions)}
        for index, action in enumerate(self.actions):
            for needed in dependencies(action, graph, self.plan, assignment, form=self.form):
                self._follow(number[needed], index)
                if needed.kind is ActionKind.FORWARD and (action.kind in _GRADIENTS or needed.place not in self.with_gradient):
                    self.releases[index].append(number[needed])
                    self.num_holds[number[needed]] += 1
            if action.kind is ActionKind.FORWARD and action.microbatch > 0:
                self._follow(number[action._replace(microbatch=action.microbatch - 1)], index)
        for order in self.policy.orders:
            for first, then in itertools.pairwise(order):
                self._follow(number[first], number[then])
        self.with_weights = {action.place for action in self.actions if action.kind is ActionKind.WEIGHT_GRADIENT}
        if self.policy.phase is not None:
            self._hold_phases(self.policy.phase)

    def _urgency(self, action: Action) -> int:
        """The class of an action; lower is more urgent."""
        if action in self.policy.urgent:
            return 0
        if action.kind is ActionKind.FORWARD:
            return 1 if self.policy.forwards_go_first else 3
        return 4 if action.kind is ActionKind.WEIGHT_GRADIENT else 2

    def _follow(self, first: int, then: int) -> None:
        self.followers[first].append(then)
        self.num_unmet[then] += 1

    def _hold_phases(self, phase: Callable[[Action], int]) -> None:
        """Make every action wait, once per lane of its, for that lane's earlier phases."""
        self.phases = [phase(action) for action in self.actions]
        for index, lanes in enumerate(self.lanes):
            for lane in lanes:
                self.num_left[lane][self.phases[index]] += 1
        for index, lanes in enumerate(self.lanes):
            for lane in lanes:
                if self.phases[index] > min(self.num_left[lane]):
                    self.held[lane][self.phases[index]].append(index)
                    self.num_unmet[index] += 1

    def run(self) -> list[list[Action]]:
        """Return the actions of every lane in order."""
        for index, num_unmet in enumerate(self.num_unmet):
            if num_unmet == 0:
                self._make_ready(index)
        while True:
            self._start_ready()
            if self.running:
                self._finish_next()
            elif any(self.early.values()):
                self._let_back(min((each for group in self.early.values() for each in group), key=self._admission_order))
            elif any(self.parked.values()):
                self._admit(min((each for group in self.parked.values() for each in group), key=self._admission_order))
            else:
                assert self.num_done == len(self.actions), "the policy's orders contradict the dependencies"
                return self.order

    def _admission_order(self, index: int) -> tuple[int, int]:
        return self.actions[index].microbatch, index

    def _make_ready(self, index: int) -> None:
        if self.actions[index].kind is ActionKind.FORWARD:
            if self._is_full(self.groups[index]):
                self.parked[self.groups[index]].add(index)
                return
            self._take_off(self.groups[index])
        elif self.actions[index].kind in _GRADIENTS:
            self.early[self.groups[index]].add(index)
            self._let_back_on_time(self.groups[index])
            return
        self._enqueue(index)

    def _gives_back(self, index: int) -> bool:
        """Whether this is a forward that a backward follows."""
        return self.actions[index].kind is ActionKind.FORWARD and self.actions[index].place in self.with_gradient

    def _let_back_on_time(self, group: StageKey) -> None:
        """Release the backwards for which enough microbatches are in flight, or no forward is left to wait for."""
        floor = self.policy.forward_floors.get(group, 0)
        while self.early[group] and (self.begun[group] >= floor or self.to_begin[group] == 0):
            self._let_back(min(self.early[group]))

    def _let_back(self, index: int) -> None:
        self.early[self.groups[index]].remove(index)
        self.begun[self.groups[index]] -= 1
        self._enqueue(index)

    def _is_full(self, group: StageKey) -> bool:
        limit, storage = self.policy.forward_limits.get(group), self.policy.storage_limits.get(group)
        return (limit is not None and self.in_flight[group] >= limit) or (storage is not None and self.stored[group] >= storage)

    def _take_off(self, group: StageKey) -> None:
        self.in_flight[group] += 1
        self.stored[group] += 1

    def _admit(self, index: int) -> None:
        self.parked[self.groups[index]].remove(index)
        self._take_off(self.groups[index])
        self._enqueue(index)

    def _enqueue(self, index: int) -> None:
        for lane in self.lanes[index]:
            heapq.heappush(self.ready[lane], index)
            self.touched.add(lane)

    def _start_ready(self) -> None:
        for lane in sorted(self.touched):
            if not self.is_free[lane] or not self.ready[lane]:
                continue
            index = self.ready[lane][0]
            if all(self.is_free[other] and self.ready[other][0] == index for other in self.lanes[index]):
                self._start(index)
        self.touched.clear()

    def _start(self, index: int) -> None:
        for lane in self.lanes[index]:
            heapq.heappop(self.ready[lane])
            self.is_free[lane] = False
            self.order[lane].append(self.actions[index])
        if self._gives_back(index):
            self.begun[self.groups[index]] += 1
            self.to_begin[self.groups[index]] -= 1
            self._let_back_on_time(self.groups[index])
        heapq.heappush(self.running, (self.now + self.costs[index], index))

    def _finish_next(self) -> None:
        """Advance the clock to the next completion and finish everything that completes then."""
        self.now = self.running[0][0]
        while self.running and self.running[0][0] == self.now:
            self._finish(heapq.heappop(self.running)[1])

    def _finish(self, index: int) -> None:
        self.num_done += 1
        for lane in self.lanes[index]:
            self.is_free[lane] = True
            self.touched.add(lane)
        self._end_flights(index)
        for follower in self.followers[index]:
            self._meet(follower)
        if self.policy.phase is not None:
            self._end_phases(index)

    def _end_flights(self, index: int) -> None:
        """Take note of what is no longer in flight or stored after an action, which may admit forwards."""
        kind = self.actions[index].kind
        landed = [index] if kind is ActionKind.FORWARD and self.num_holds[index] == 0 else []
        for forward in self.releases[index]:
            self.num_holds[forward] -= 1
            if self.num_holds[forward] == 0:
                landed.append(forward)
        for forward in landed:
            self.in_flight[self.groups[forward]] -= 1
            if self.actions[forward].place not in self.with_weights:
                self.stored[self.groups[forward]] -= 1
        if kind is ActionKind.WEIGHT_GRADIENT:
            self.stored[self.groups[index]] -= 1
        for group in dict.fromkeys([*(self.groups[forward] for forward in landed), self.groups[index]]):
            while self.parked[group] and not self._is_full(group):
                self._admit(min(self.parked[group]))

    def _end_phases(self, index: int) -> None:
        for lane in self.lanes[index]:
            num_left = self.num_left[lane]
            num_left[self.phases[index]] -= 1
            if num_left[self.phases[index]] == 0:
                del num_left[self.phases[index]]
                for held in self.held[lane].pop(min(num_left), ()) if num_left else ():
                    self._meet(held)

    def _meet(self, index: int) -> None:
        self.num_unmet[index] -= 1
        if self.num_unmet[index] == 0:
            self._make_ready(index)


_GRADIENTS = (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)


def _stage(action: Action) -> StageKey:
    return action.unit, action.replica, action.stage
