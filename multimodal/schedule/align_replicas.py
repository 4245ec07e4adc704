"""Where replicas that share a unit's weights take part in each other's computations (ZeRO-3).

Whoever computes a layer needs the shares of all replicas, so these have to go through one sequence of computations together.
Replicas with as many microbatches in the same order do so anyhow. Where one has fewer, or orders them differently, it joins: it
gives its shares of the weights, and gradients of zero, and computes nothing.
"""

from collections.abc import Mapping
from typing import NamedTuple

from multimodal.schedule.dependencies import dependencies
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import ACTION_TABLE, REPEATED_KINDS, Action, ActionKind, Resource, Schedule
from multimodal.values.schedule_form import form_of


class Join(NamedTuple):
    """What a lane takes part in without a microbatch of its own."""

    kind: ActionKind
    """FORWARD, BACKWARD, INPUT_GRADIENT or WEIGHT_GRADIENT."""
    unit: str
    stage: int
    num_passes: int
    """Passes through the stage's layers: one, or as many as the sample subsets of a forward."""


Joins = tuple[Mapping[int, tuple[Join, ...]], ...]
"""Per lane: position in its actions -> what it joins before that action; the number of actions for what comes after the last."""


def align_replicas(schedule: Schedule, *, graph: ModelGraph, plan: Plan, assignment: Assignment) -> Joins:
    """Find one order in which the replicas of every unit compute together, and where lanes join others for that.

    The schedule is run in that order: a computation waits until all replicas of its unit have come to the same one. Where all
    lanes wait, one that could run does, and the other replicas join: preferably a forward of the lane that has most left to do.
    So every schedule that finishes without shared weights finishes with them, and all ranks of a group make the same calls in
    the same order.

    schedule: lowered and valid; its fillers count where they stand. Deterministic; O(actions x lanes) at worst.
    """
    alignment = _Alignment(schedule, graph, plan, assignment)
    alignment.run()
    return tuple({position: tuple(found) for position, found in lane.items()} for lane in alignment.joins)


class _Alignment:
    """The state of the run: where lanes stand, and what is done."""

    def __init__(self, schedule: Schedule, graph: ModelGraph, plan: Plan, assignment: Assignment) -> None:
        self.lanes = [lane.actions for lane in schedule.lanes]
        self.graph, self.plan, self.assignment, self.form = graph, plan, assignment, form_of(schedule)
        self.positions = [0] * len(self.lanes)
        self.passed: dict[Action, int] = {}
        self.done: set[Action] = set()
        self.joins: list[dict[int, list[Join]]] = [{} for _ in self.lanes]
        self._stages: dict[tuple[str, int, int], tuple[int, ...]] = {}

    def run(self) -> None:
        while self._sweep() or self._force():
            pass

    def _sweep(self) -> bool:
        """Move every lane as far as it comes; whether any moved."""
        moved = False
        for lane in range(len(self.lanes)):
            while self._advance(lane):
                moved = True
        return moved

    def _advance(self, lane: int) -> bool:
        action = self._head(lane)
        if action is None:
            return False
        if ACTION_TABLE[action.kind].resource is Resource.COMPUTE:
            return self._compute(action)
        if ACTION_TABLE[action.kind].resource is not Resource.RECEIVE and not self._is_met(action):
            return False
        self.positions[lane] += 1
        self.passed[action] = self.passed.get(action, 0) + 1
        if self.passed[action] == len(self._lanes_of(*action[1:4])):
            self.done.add(action)
        return True

    def _compute(self, action: Action) -> bool:
        if not self._is_ready(action):
            return False
        others = [self._matching(action, replica) for replica in self._replicas(action) if replica != action.replica]
        if any(other is None for other in others):
            return False
        self._fire(action)
        return True

    def _fire(self, action: Action) -> None:
        """Run a computation in all replicas that have come to it; the others join."""
        for replica in self._replicas(action):
            lanes = self._lanes_of(action.unit, replica, action.stage)
            own = action if replica == action.replica else self._matching(action, replica)
            for lane in lanes:
                if own is None:
                    self.joins[lane].setdefault(self.positions[lane], []).append(self._join(action))
                else:
                    self.positions[lane] += 1
            if own is not None:
                self.done.add(own)

    def _force(self) -> bool:
        """Run something without waiting for the other replicas; whether anything was left to run."""
        ready = [
            (self.positions[lane] - len(actions), _ORDER[_kind(action)], lane, action)
            for lane, actions in enumerate(self.lanes)
            if (action := self._head(lane)) is not None
            if ACTION_TABLE[action.kind].resource is Resource.COMPUTE and self._is_ready(action)
        ]
        if not ready:
            assert all(self._head(lane) is None for lane in range(len(self.lanes))), "a valid schedule does not stop"
            return False
        self._fire(min(ready)[-1])
        return True

    def _matching(self, action: Action, replica: int) -> Action | None:
        """The computation that another replica has come to and can run, if it is the same."""
        head = self._head(self._lanes_of(action.unit, replica, action.stage)[0])
        if head is None or ACTION_TABLE[head.kind].resource is not Resource.COMPUTE or head.replica != replica:
            return None
        return head if self._join(head) == self._join(action) and self._is_ready(head) else None

    def _is_ready(self, action: Action) -> bool:
        return all(self._head(lane) == action for lane in self._lanes_of(*action[1:4])) and self._is_met(action)

    def _is_met(self, action: Action) -> bool:
        needs = dependencies(action, self.graph, self.plan, self.assignment, lowered=True, form=self.form)
        return all(self._is_done(need) for need in needs)

    def _is_done(self, action: Action) -> bool:
        if ACTION_TABLE[action.kind].resource is not Resource.RECEIVE:
            return action in self.done
        return action in self.done and self._is_met(action)

    def _join(self, action: Action) -> Join:
        kind = _kind(action)
        parts = self.form.parts((action.unit, action.work.replica, action.work.microbatch))  # type: ignore[arg-type]
        num_passes = len(parts) if action.kind is ActionKind.FORWARD else 1
        return Join(kind, action.unit, action.stage, num_passes)

    def _replicas(self, action: Action) -> range:
        return range(self.plan.units[action.unit].data_parallel_size)

    def _head(self, lane: int) -> Action | None:
        actions = self.lanes[lane]
        return actions[self.positions[lane]] if self.positions[lane] < len(actions) else None

    def _lanes_of(self, *stage: str | int) -> tuple[int, ...]:
        if stage not in self._stages:
            self._stages[stage] = self.plan.lanes_of_stage(*stage)  # type: ignore[index, arg-type]
        return self._stages[stage]  # type: ignore[index]


def _kind(action: Action) -> ActionKind:
    return REPEATED_KINDS.get(action.kind, action.kind)


_ORDER = {
    ActionKind.FORWARD: 0,
    ActionKind.BACKWARD: 1,
    ActionKind.INPUT_GRADIENT: 2,
    ActionKind.WEIGHT_GRADIENT: 3,
}
