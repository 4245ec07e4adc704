"""Runs a schedule under the strictest rules, on a clock of unit costs: a schedule that stops here might stop a real run.

Unlike in the simulator, a lane waits in a collective for all others and runs fillers where they stand, so a schedule that
finishes here also finishes with any other durations. Passes measure and order actions by this clock.
"""

from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import cast

import numpy as np

from multimodal.cost.step_costs import ActionCosts, ComputeCost
from multimodal.schedule.align_replicas import computed_together
from multimodal.schedule.inside_slots import InsideSlots, time_carriers
from multimodal.schedule.simulate_events import NodeKind, run_without_messages
from multimodal.values.action import Action, ActionKind, Resource, SegmentRange
from multimodal.values.arrays.rows import Bools, Floats, Integers, row_starts, take_rows
from multimodal.values.schedule import Schedule, SlotMode
from multimodal.values.shape import StepShape
from multimodal.values.timeline import TimelineEvent
from multimodal.values.work.step_work import BACKWARD, COMPUTE, KINDS, RESOURCE_NUMBERS, StepWork, step_work


def unit_cost(action: Action, shape: StepShape) -> int:
    """Return an action's duration in clock ticks: forward 1, backward 2 (1 for each half), messages 0, reduction 1.

    A range of segments takes 1, like a whole forward: no computation is shorter.

    A backward has two products per weight matrix, one for the input's gradient and one for the weight's. A stage that only passes
    a gradient on, or trains only adapters, computes one of them; a stage that trains little more than its projector computes
    hardly any, and counts as 1, the minimum.
    """
    if action.kind.resource in (Resource.SEND, Resource.RECEIVE):
        return 0
    if action.kind is not ActionKind.BACKWARD or isinstance(action.covers, SegmentRange):
        return 1
    layers = shape.plan.virtual_stage(*action[1:4]).layers
    unit = shape.graph.unit(action.unit)
    sends = shape.backward_need(*action[1:4]).sends_gradient
    num_passing = len(layers) if sends else len(layers) - 1 - [unit.is_trainable(layer) for layer in layers].index(True)
    num_weight_gradients = sum(unit.trains_weights(layer) for layer in layers)
    return max(1, round((num_passing + num_weight_gradients) / len(layers)))


@lru_cache(maxsize=32)
def unit_costs(shape: StepShape) -> Integers:
    """Return the `unit_cost` of every computation and collective, [num_computed]."""
    work = step_work(shape)
    costs = np.ones((len(work.stages), len(KINDS)), np.int64)
    known: dict[tuple[str, int, range], int] = {}
    for unit, pieces in work.pieces.units.items():
        for stage, replica in np.argwhere(pieces.has_backward).tolist():
            like = unit, stage, shape.plan.virtual_stage(unit, replica, stage).layers
            if like not in known:
                known[like] = unit_cost(Action(ActionKind.BACKWARD, unit, replica, stage, 0), shape)
            costs[pieces.first_stage + stage * pieces.has_backward.shape[1] + replica, BACKWARD] = known[like]
    of_pieces: Integers = costs[work.computed_stages, work.kinds]
    of_pieces[work.pieces.is_range] = 1
    return of_pieces


@dataclass(frozen=True)
class UnitCosts(ActionCosts):
    """`StepCosts` in which every action takes its `unit_cost` in seconds; sizes are 0, and messages take no time."""

    shape: StepShape

    def compute(self, action: Action) -> ComputeCost:
        """Return the cost of a computation."""
        return ComputeCost(unit_cost(action, self.shape))

    def collective_seconds(self, action: Action) -> float:
        """Return the seconds of a collective."""
        return unit_cost(action, self.shape)


_EXECUTION = "execution"
_NODE_KINDS = {
    Resource.COMPUTE: NodeKind.COMPUTE,
    Resource.SEND: NodeKind.GATE,
    Resource.RECEIVE: NodeKind.SEND,
    Resource.COLLECTIVE: NodeKind.COMPUTE,
}
"""Collectives hold up their lanes, sends wait for what they send, receives are done when posted and sent."""
_KIND_OF_RESOURCE = np.array([_NODE_KINDS[resource] for resource in RESOURCE_NUMBERS], np.uint8)


@dataclass(frozen=True)
class Execution:
    """The events that ran, in no order, and the final position of every lane. Events are columns: most callers want only some."""

    schedule: Schedule
    event_pieces: Integers
    event_lanes: Integers
    start_seconds: Floats
    end_seconds: Floats
    positions: Integers
    """[num_lanes] the position of the first slot that could not run; the number of slots when all did."""
    is_done: Bools
    """[num_pieces of the schedule's dialect] True for pieces that are complete."""

    @cached_property
    def events(self) -> tuple[TimelineEvent, ...]:
        """Computations and collectives, by start; without those of zero length."""
        order = np.lexsort((self.end_seconds, self.event_lanes, self.start_seconds))
        columns = (self.event_lanes, self.start_seconds, self.end_seconds)
        actions = map(self.schedule.work.computed.__getitem__, self.event_pieces[order].tolist())
        return tuple(map(TimelineEvent, actions, *(column[order].tolist() for column in columns)))

    @property
    def duration_seconds(self) -> float:
        """Seconds from the start of the step to the end of the last event."""
        return float(self.end_seconds.max(initial=0.0))

    @property
    def stuck(self) -> dict[int, int]:
        """Position of every lane that did not reach its end; empty if the schedule finished."""
        lengths = np.diff(self.schedule.lane_starts)
        return {int(lane): int(self.positions[lane]) for lane in np.flatnonzero(self.positions < lengths)}


def execute_lanes(schedule: Schedule, *, seconds: Floats | None = None) -> Execution:
    """Run a schedule of either dialect, valid or not.

    A computation starts when all its lanes have reached it and its dependencies are complete. A reduction also waits for the
    other replicas, and all their lanes for the slowest of them. A send only waits for what it sends; a receive is only posted,
    and completes with its send. Lanes that wait for each other in a circle stop: see `Execution.stuck`. Messages take no time.
    Work inside a computation prolongs it, completes with it, and its time is an event.

    seconds: of every computation and collective, [num_computed], with which replicas that share experts compute together; unit
    costs by default, for which a schedule runs once. O((actions + dependencies) log lanes).
    """
    if seconds is None and _EXECUTION in schedule.made:
        return cast(Execution, schedule.made[_EXECUTION])
    work, num_pieces = schedule.work, schedule.work.num_pieces(lowered=schedule.lowered)
    collectives, member_starts, members = work.collective_rows if seconds is None else _joint_rows(work)
    collectives, never = collectives[:num_pieces], num_pieces + len(member_starts) - 1
    # Nodes: pieces, whole collectives, and one that needs itself, for work that is missing from one of its lanes.
    node_of_piece = np.where(collectives < 0, np.arange(num_pieces), num_pieces + collectives)
    durations = np.zeros(never + 1)
    durations[: work.num_computed] = unit_costs(schedule.shape) if seconds is None else seconds
    need_starts, needs = work.needs_in(lowered=schedule.lowered)
    if schedule.has_inside:
        inside = InsideSlots.of(schedule)
        need_starts, needs = inside.joined_needs()
        node_of_piece[inside.pieces] = node_of_piece[inside.carriers]
        carriers = np.unique(inside.carriers)
        alone, no_waits = durations[carriers], (np.zeros(len(carriers) + 1, np.int64), np.zeros(0))
        of_slots, nothing = durations[inside.pieces], np.zeros(len(inside.pieces))
        times = time_carriers(inside, carriers=carriers, seconds=alone, waits=no_waits, durations=of_slots, behind=nothing)
        durations[carriers] += times.added
    np.maximum.at(durations, node_of_piece[members], durations[members])
    joint_starts, joint_needs = take_rows(need_starts, needs, members)
    ends = need_starts[-1] + np.append(joint_starts[member_starts[1:]], len(joint_needs) + 1)
    needs = np.append(node_of_piece[np.append(needs, joint_needs)], never)
    slots = np.flatnonzero(schedule.modes != SlotMode.INSIDE)
    lane_starts, lane_nodes = np.searchsorted(slots, schedule.lane_starts), node_of_piece[schedule.pieces[slots]]
    num_wanted = np.diff(work.lane_rows[0])[work.stage_numbers[:num_pieces]]
    if num_wanted.sum() != len(schedule.pieces):
        is_missing = np.bincount(schedule.pieces, minlength=num_pieces) < num_wanted
        lane_nodes = np.where(np.isin(lane_nodes, node_of_piece[is_missing]), never, lane_nodes)
    kinds = np.full(never + 1, NodeKind.COMPUTE, np.uint8)
    kinds[:num_pieces] = _KIND_OF_RESOURCE[work.resources[:num_pieces]]
    start, end, positions = run_without_messages(lane_starts, lane_nodes, kinds, np.append(need_starts, ends), needs, durations)
    nodes, is_done = node_of_piece[schedule.pieces], ~np.isnan(end)[node_of_piece]
    ran = np.flatnonzero((end > start)[nodes] & (schedule.pieces < work.num_computed))
    stopped_at = np.append(slots, len(schedule.pieces))[lane_starts[:-1] + positions]
    positions = np.minimum(stopped_at, schedule.lane_starts[1:]) - schedule.lane_starts[:-1]
    execution = Execution(
        schedule=schedule,
        event_pieces=schedule.pieces[ran],
        event_lanes=schedule.lane_of_slot[ran],
        start_seconds=start[nodes[ran]],
        end_seconds=end[nodes[ran]],
        positions=positions,
        is_done=is_done,
    )
    if seconds is None and not schedule.lowered:
        schedule.made[_EXECUTION] = execution
    return execution


ASSUMES_PROGRESS: ContextVar[bool] = ContextVar("ASSUMES_PROGRESS", default=False)
"""True while `can_finish` says so unseen: whoever sets it executes the result, and where that is stuck, builds again without."""


def can_finish(schedule: Schedule) -> bool:
    """Return False if lanes would wait for each other in a circle."""
    return ASSUMES_PROGRESS.get() or not execute_lanes(schedule).stuck


def _joint_rows(work: StepWork) -> tuple[Integers, Integers, Integers]:
    """Return `work.collective_rows` in which what replicas with shared experts compute together counts as a collective."""
    collectives, starts, members = work.collective_rows
    if (joined := computed_together(work)) is None:
        return work.collective_rows
    joined = joined[: work.num_computed]
    firsts, sizes = np.unique(joined, return_counts=True)
    together = np.flatnonzero(np.isin(joined, firsts[sizes > 1]))
    together = together[np.argsort(joined[together], kind="stable")]
    collectives = collectives.copy()
    collectives[together] = len(starts) - 1 + np.unique(joined[together], return_inverse=True)[1]
    return collectives, np.append(starts, starts[-1] + np.cumsum(sizes[sizes > 1])), np.append(members, together)


def execute_unit(schedule: Schedule, unit: str, *, seconds: Floats) -> tuple[Floats, Floats]:
    """Run the computations of one unit in order; all others run as soon as they can, in no lane and without taking time.

    schedule: of the compute dialect; seconds: of every computation, [num_computed]. Returns when each computation of the unit
    starts and ends, [num_computed]; 0 for others.
    """
    work = schedule.work
    is_own = np.array([name == unit for name, _, _ in work.stages], bool)[work.computed_stages]
    computes = work.resources[: work.num_computed] == COMPUTE
    kept, others = (is_own & computes)[schedule.pieces], np.flatnonzero(~is_own & computes)
    num_in_line = np.bincount(schedule.lane_of_slot[kept], minlength=schedule.num_lanes)
    lane_starts = row_starts(np.append(num_in_line, np.ones_like(others)))  # each of the others has a lane of its own
    lane_nodes, kinds = np.append(schedule.pieces[kept], others), np.full(work.num_computed, NodeKind.COMPUTE, np.uint8)
    taken = np.where(is_own, seconds, 0.0)
    start, end, _ = run_without_messages(lane_starts, lane_nodes, kinds, work.need_starts, work.needs, taken)
    runs = is_own & ~np.isnan(end)
    return np.where(runs, start, 0.0), np.where(runs, end, 0.0)
