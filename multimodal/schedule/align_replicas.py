"""Places at which replicas that share a unit's weights take part in each other's computations (ZeRO-3).

A rank that computes a layer needs the shares of all replicas, so all replicas run one sequence of computations together. Replicas
with equally many microbatches in the same order do this anyway. A replica with fewer microbatches, or another order, joins: it
contributes its shares of the weights and gradients of zero, and computes nothing.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from multimodal.cost.layers.registry import LAYER_KINDS
from multimodal.values.action import BACKWARDS, Action, ActionKind, Resource
from multimodal.values.arrays.rows import Integers
from multimodal.values.errors import ScheduleError
from multimodal.values.schedule import Schedule
from multimodal.values.work.step_work import BACKWARD, FORWARD, INPUT_GRADIENT, StepWork


class Join(NamedTuple):
    """A computation of another replica, in which a lane takes part without a microbatch of its own."""

    kind: ActionKind
    """FORWARD, BACKWARD, INPUT_GRADIENT or WEIGHT_GRADIENT."""
    unit: str
    stage: int
    num_passes: int
    """Passes through the stage's layers: one, or as many as the sample subsets of a forward."""


Joins = tuple[Mapping[int, tuple[Join, ...]], ...]
"""Per lane: position in its actions -> joins before that action; the number of actions for joins after the last."""


def align_replicas(schedule: Schedule, units: Collection[str] | None = None) -> Joins:
    """Find an order in which the replicas of every unit compute together, and the places where lanes join others for it.

    The schedule is run in that order: a computation waits until all replicas of its unit have reached the same one. If all lanes
    wait, one that could run is run, and the other replicas join it: preferably a forward of the lane with the most work left.
    So every schedule that finishes without shared weights finishes with them, and all ranks of a group call alike, in one order.

    schedule: lowered and valid; fillers count as work in line. units: those whose replicas compute together (except in weight
    gradients), because they share experts; None: all units. Deterministic; O(actions + dependencies + joins x lanes).
    """
    alignment = Alignment(schedule, units)
    alignment.run()
    return tuple(by_position(lane) for lane in alignment.joins)


def by_position(joins: Sequence[tuple[int, int, Join]]) -> Mapping[int, tuple[Join, ...]]:
    """Return the joins of a lane by position; joins: as in `Alignment.joins`."""
    found: dict[int, tuple[Join, ...]] = {}
    for position, _, join in joins:
        found[position] = (*found.get(position, ()), join)
    return found


EXCHANGES = {
    ActionKind.FORWARD: ActionKind.FORWARD,
    ActionKind.BACKWARD: ActionKind.BACKWARD,
    ActionKind.INPUT_GRADIENT: ActionKind.BACKWARD,
}
"""Actions in which replicas that share experts exchange tokens, and the kind under which they match: backwards are all alike."""


class Alignment:
    """The state of the run: positions of lanes, actions done, and lanes that wait for them."""

    def __init__(self, schedule: Schedule, units: Collection[str] | None) -> None:
        self.units = units
        self.lanes = [lane.actions for lane in schedule.lanes]
        self.shape, self.plan, self.work = schedule.shape, schedule.shape.plan, schedule.work
        self.joins: list[list[tuple[int, int, Join]]] = [[] for _ in self.lanes]
        """Per lane, in order: position, number of the computation that is joined, and what it is."""
        self.order: dict[Action, int] = {}
        """Computation or collective -> the number of the computation that runs with it or, for a collective, ran last."""
        self.num_fired = 0
        self.positions = [0] * len(self.lanes)
        self.num_passed: dict[Action, int] = {}
        self.done: set[Action] = set()
        self.waiters: dict[Action, dict[int, None]] = {}
        """Action -> lanes that continue when it is done, each once."""
        self.arrived: dict[Join, dict[int, Action]] = {}
        """Computation that can run -> replica -> its action, which waits for the other replicas."""
        self.queue = deque(range(len(self.lanes)))
        self._lanes_of = cache(self.plan.lanes_of_stage)

    def run(self) -> None:
        """Run all lanes to their ends."""
        while self.queue or self.arrived:
            if self.queue:
                self._advance(self.queue.popleft())
                continue
            most_left = [  # without waiting for the other replicas
                (self.positions[lane] - len(self.lanes[lane]), _KINDS.index(join.kind), lane, join.unit, join.stage, join)
                for join, replicas in self.arrived.items()
                for action in replicas.values()
                for lane in self._lanes_of(*action[1:4])
            ]
            self._fire(min(most_left)[-1])
        assert all(self._head(lane) is None for lane in range(len(self.lanes))), "a valid schedule does not stop"

    def _advance(self, lane: int) -> None:
        """Advance a lane past messages and reductions up to its next computation."""
        while (action := self._head(lane)) is not None:
            if action.kind.resource is Resource.COMPUTE:
                self._arrive(action)
                return
            if action.kind.resource is not Resource.RECEIVE and self._must_wait(action, lane):
                return
            self.positions[lane] += 1
            if action.kind.resource is Resource.COLLECTIVE:
                self.order[action] = self.num_fired
            self.num_passed[action] = self.num_passed.get(action, 0) + 1
            if self.num_passed[action] == len(self._lanes_of(*action[1:4])):
                self._complete(action)

    def _arrive(self, action: Action) -> None:
        """Note that one replica can run a computation; run it when all can."""
        lanes = self._lanes_of(*action[1:4])
        if any(self._head(lane) != action for lane in lanes) or self._must_wait(action, *lanes):
            return
        if self.units is not None and not (action.unit in self.units and action.kind in EXCHANGES):
            for lane in lanes:
                self.positions[lane] += 1
            self._complete(action)
            self.queue.extend(lanes)
            return
        num_passes = len(self.shape.cuts.subsets(action.microbatch_place)) if action.kind is ActionKind.FORWARD else 1
        kind = action.kind if self.units is None else EXCHANGES[action.kind]
        join = Join(kind, action.unit, action.stage, num_passes)
        replicas = self.arrived.setdefault(join, {})
        replicas[action.replica] = action
        if len(replicas) == self.plan.units[action.unit].data_parallel_size:
            self._fire(join)

    def _fire(self, join: Join) -> None:
        """Run a computation in all replicas that have reached it; the others join."""
        arrived = self.arrived.pop(join)
        self.num_fired += 1
        self.order |= dict.fromkeys(arrived.values(), self.num_fired)
        for replica in range(self.plan.units[join.unit].data_parallel_size):
            lanes = self._lanes_of(join.unit, replica, join.stage)
            for lane in lanes:
                if replica in arrived:
                    self.positions[lane] += 1
                else:
                    self.joins[lane].append((self.positions[lane], self.num_fired, join))
            if replica in arrived:
                self._complete(arrived[replica])
                self.queue.extend(lanes)

    def _complete(self, action: Action) -> None:
        self.done.add(action)
        self.queue.extend(self.waiters.pop(action, ()))

    def _must_wait(self, action: Action, *lanes: int) -> bool:
        """Return True if a dependency is not done; the lane is woken when it is."""
        for need in self.work.needs_of(action, lowered=True):
            missing = [need] if need not in self.done else []
            if not missing and need.kind.resource is Resource.RECEIVE:  # posted, but perhaps not sent yet
                missing = [send for send in self.work.needs_of(need, lowered=True) if send not in self.done]
            if missing:
                self.waiters.setdefault(missing[0], {}).update(dict.fromkeys(lanes))
                return True
        return False

    def _head(self, lane: int) -> Action | None:
        actions = self.lanes[lane]
        return actions[self.positions[lane]] if self.positions[lane] < len(actions) else None


_KINDS = (ActionKind.FORWARD, *BACKWARDS)


def check_expert_groups(schedule: Schedule) -> None:
    """Raise ScheduleError if replicas that share experts would wait for each other forever.

    In every layer with experts they exchange tokens, so the i-th computation of a stage must be of one kind and microbatch in all
    replicas, and some order of the whole step must bring all of them there together. O(actions + dependencies).
    """
    units = schedule.shape.plan.units_with_shared_experts
    for unit in units:
        plan = schedule.shape.plan.units[unit]
        for stage in range(plan.num_virtual_stages):
            orders = []
            for replica in range(plan.data_parallel_size):
                actions = schedule.lanes[schedule.shape.plan.lanes_of_stage(unit, replica, stage)[0]].actions
                own = (each for each in actions if each[1:4] == (unit, replica, stage) and each.kind in EXCHANGES)
                orders.append([(EXCHANGES[each.kind], each[4:]) for each in own])
                if orders[replica] != orders[0]:
                    raise ScheduleError(_problem(unit, f"stage {stage} of replicas 0 and {replica} computes in different orders"))
    if units and any(align_replicas(schedule, units)):
        raise ScheduleError(_problem(units[0], "other units keep its replicas from computing together"))


def computed_together(work: StepWork) -> Integers | None:
    """Return, for every piece, the first replica's piece that it is computed together with; None if no experts are shared.

    Computed together are forwards or backwards of the same number in stages with shared experts. O(pieces log).
    """
    if not work.plan.units_with_shared_experts:
        return None
    joined = np.arange(work.num_pieces(lowered=True))
    stages, pieces = work.computed_stages, work.pieces
    has_experts = []
    for unit, replica, index in work.stages:
        layers = work.plan.virtual_stage(unit, replica, index).layers
        names = work.graph.unit(unit).layers[layers.start : layers.stop]
        has_experts.append(any(name in LAYER_KINDS and LAYER_KINDS[name].exchanges_tokens for name in names))
    sizes = np.array([work.plan.units[name].expert_parallel_size for name in pieces.units])[pieces.unit_of_stage[stages]]
    does_exchange = np.isin(work.kinds, [FORWARD, BACKWARD, INPUT_GRADIENT])
    chosen = np.flatnonzero(np.array(has_experts)[stages] & (sizes > 1) & does_exchange)
    kinds = np.where(work.kinds == INPUT_GRADIENT, BACKWARD, work.kinds).astype(np.int64)
    groups = work.replicas // sizes
    first_stages = stages - work.replicas  # the numbers of a stage's replicas are consecutive
    columns = (first_stages, groups, kinds, work.microbatches, pieces.parts)
    keys = np.stack([np.asarray(column, np.int64)[chosen] for column in columns])
    _, first, group = np.unique(keys, axis=1, return_index=True, return_inverse=True)
    joined[chosen] = chosen[first[group.ravel()]]
    return joined


def _problem(unit: str, found: str) -> str:
    return (
        f"unit '{unit}': {found}, and replicas that share experts exchange tokens in every layer; use --schedule 1f1b with "
        "--balance whole-sample (and, before a generator, something to make in every sample), or --expert-model-parallel-size 1"
    )
