"""The engine of the builders: a deterministic list scheduler on a discrete clock."""

import heapq
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from multimodal.schedule.dependencies import dependencies
from multimodal.schedule.expected_actions import compute_actions
from multimodal.schedule.unit_cost import unit_cost
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Action, ActionKind, Lane, Schedule

StageKey = tuple[str, int, int]
"""(unit, replica, virtual stage)."""


@dataclass(frozen=True)
class Policy:
    """What a builder wants beyond the dependencies."""

    forward_limits: Mapping[StageKey, int] = field(default_factory=dict)
    """Most microbatches in flight per stage; stages that are not named are unlimited."""
    forwards_first: bool = False
    """Whether a lane finishes all its forwards before its first backward."""


def list_schedule(
    graph: ModelGraph, plan: Plan, assignment: Assignment, *, policy: Policy, forward_only: bool = False
) -> Schedule:
    """Build a compute-dialect schedule by letting every lane always take its most urgent ready action.

    An action is ready when its dependencies are done; forwards of one stage go in microbatch order. Backwards are more urgent
    than forwards, then downstream units than upstream ones, then lower microbatches. An action of several lanes starts when it
    is the most urgent one in all of them: the order is the same everywhere, so the lanes never wait for each other in a circle.
    A microbatch is in flight in a stage from its forward to its backward or, where there is none, to its consumers' forwards.
    A forward beyond its stage's limit waits; when nothing else is left to do, the earliest such forward is admitted all the
    same, so every assignment finishes. Each lane ends with its gradient reductions.

    Complexity: O((actions + dependencies) log actions).
    """
    return _ListScheduler(graph, plan, assignment, policy, forward_only).run()


class _ListScheduler:
    """The state of one run. Actions are numbered by urgency, so that a lane's heap of numbers has the most urgent on top."""

    def __init__(self, graph: ModelGraph, plan: Plan, assignment: Assignment, policy: Policy, forward_only: bool) -> None:
        self.plan = plan
        position = {unit: index for index, unit in enumerate(graph.unit_names)}
        everything = compute_actions(graph, plan, assignment, forward_only=forward_only)
        self.reductions = [action for action in everything if action.kind is ActionKind.REDUCE_GRADIENTS]
        self.actions = sorted(
            (action for action in everything if action.kind is not ActionKind.REDUCE_GRADIENTS),
            key=lambda a: (a.kind is ActionKind.FORWARD, -position[a.unit], a.microbatch, -a.stage, a.replica),
        )
        stages: dict[StageKey, tuple[int, ...]] = {}
        costs: dict[tuple[ActionKind, StageKey], int] = {}
        for action in everything:
            if _stage(action) not in stages:
                stages[_stage(action)] = plan.lanes_of_stage(*_stage(action))
            if (action.kind, _stage(action)) not in costs:
                costs[action.kind, _stage(action)] = unit_cost(action, graph, plan)
        self.lanes_of_stage = stages
        self.lanes = [stages[_stage(action)] for action in self.actions]
        self.costs = [costs[action.kind, _stage(action)] for action in self.actions]
        self.policy = policy
        self.num_unmet = [0] * len(self.actions)
        self.followers: list[list[int]] = [[] for _ in self.actions]
        self.releases: list[list[int]] = [[] for _ in self.actions]
        self.num_holds = [0] * len(self.actions)
        self._link(graph, assignment)
        self.forwards_left = [0] * len(plan.lanes)
        self.backwards_of_lane: list[list[int]] = [[] for _ in plan.lanes]
        if policy.forwards_first:
            self._hold_backwards()
        self.now = 0
        self.running: list[tuple[int, int]] = []
        self.ready: list[list[int]] = [[] for _ in plan.lanes]
        self.is_free = [True] * len(plan.lanes)
        self.touched: set[int] = set()
        self.in_flight: dict[StageKey, int] = defaultdict(int)
        self.parked: dict[StageKey, int] = {}
        self.order: list[list[Action]] = [[] for _ in plan.lanes]

    def _link(self, graph: ModelGraph, assignment: Assignment) -> None:
        """Count what every action waits for, and what every forward's activation is kept for."""
        number = {action: index for index, action in enumerate(self.actions)}
        for index, action in enumerate(self.actions):
            for needed in dependencies(action, graph, self.plan, assignment):
                self._follow(number[needed], index)
                has_backward = needed._replace(kind=ActionKind.BACKWARD) in number
                if needed.kind is ActionKind.FORWARD and (action.kind is ActionKind.BACKWARD or not has_backward):
                    self.releases[index].append(number[needed])
                    self.num_holds[number[needed]] += 1
            if action.kind is ActionKind.FORWARD and action.microbatch > 0:
                self._follow(number[action._replace(microbatch=action.microbatch - 1)], index)

    def _follow(self, first: int, then: int) -> None:
        self.followers[first].append(then)
        self.num_unmet[then] += 1

    def _hold_backwards(self) -> None:
        """Make every backward wait, once per lane of its, for that lane's last forward."""
        for index, action in enumerate(self.actions):
            for lane in self.lanes[index]:
                self.forwards_left[lane] += action.kind is ActionKind.FORWARD
        for index, action in enumerate(self.actions):
            for lane in self.lanes[index]:
                if action.kind is ActionKind.BACKWARD and self.forwards_left[lane]:
                    self.backwards_of_lane[lane].append(index)
                    self.num_unmet[index] += 1

    def run(self) -> Schedule:
        for index, num_unmet in enumerate(self.num_unmet):
            if num_unmet == 0:
                self._make_ready(index)
        while True:
            self._start_ready()
            if self.running:
                self._finish_next()
            elif self.parked:
                self._admit(min(self.parked, key=lambda stage: self._admission_order(self.parked[stage])))
            else:
                return self._schedule()

    def _admission_order(self, index: int) -> tuple[int, int]:
        return self.actions[index].microbatch, index

    def _schedule(self) -> Schedule:
        for action in self.reductions:
            for lane in self.lanes_of_stage[_stage(action)]:
                self.order[lane].append(action)
        return Schedule(tuple(Lane(ranks, tuple(order)) for ranks, order in zip(self.plan.lanes, self.order, strict=True)))

    def _make_ready(self, index: int) -> None:
        action = self.actions[index]
        limit = self.policy.forward_limits.get(_stage(action))
        if action.kind is ActionKind.FORWARD and limit is not None and self.in_flight[_stage(action)] >= limit:
            self.parked[_stage(action)] = index
        else:
            self._enqueue(index)

    def _admit(self, stage: StageKey) -> None:
        self._enqueue(self.parked.pop(stage))

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
        action = self.actions[index]
        for lane in self.lanes[index]:
            heapq.heappop(self.ready[lane])
            self.is_free[lane] = False
            self.order[lane].append(action)
        if action.kind is ActionKind.FORWARD:
            self.in_flight[_stage(action)] += 1
        heapq.heappush(self.running, (self.now + self.costs[index], index))

    def _finish_next(self) -> None:
        """Advance the clock to the next completion and finish everything that completes then."""
        self.now = self.running[0][0]
        while self.running and self.running[0][0] == self.now:
            self._finish(heapq.heappop(self.running)[1])

    def _finish(self, index: int) -> None:
        for lane in self.lanes[index]:
            self.is_free[lane] = True
            self.touched.add(lane)
        if self.num_holds[index] == 0 and self.actions[index].kind is ActionKind.FORWARD:
            self._release(index)
        for forward in self.releases[index]:
            self.num_holds[forward] -= 1
            if self.num_holds[forward] == 0:
                self._release(forward)
        for follower in self.followers[index]:
            self._meet(follower)
        if self.policy.forwards_first and self.actions[index].kind is ActionKind.FORWARD:
            self._count_forward(index)

    def _release(self, forward: int) -> None:
        """End a microbatch's flight, which may admit the stage's next forward."""
        stage = _stage(self.actions[forward])
        self.in_flight[stage] -= 1
        if stage in self.parked and self.in_flight[stage] < self.policy.forward_limits[stage]:
            self._admit(stage)

    def _count_forward(self, index: int) -> None:
        for lane in self.lanes[index]:
            self.forwards_left[lane] -= 1
            if self.forwards_left[lane] == 0:
                for backward in self.backwards_of_lane[lane]:
                    self._meet(backward)

    def _meet(self, index: int) -> None:
        self.num_unmet[index] -= 1
        if self.num_unmet[index] == 0:
            self._make_ready(index)


def _stage(action: Action) -> StageKey:
    return action.unit, action.replica, action.stage
