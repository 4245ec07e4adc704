"""Runs a schedule under the strictest rules, on a clock of unit costs: a schedule that stops here might stop a real run.

Unlike in the simulator, a lane waits in a collective for all others and runs fillers where they stand, so a schedule that
finishes here also finishes with any other durations. Passes measure and order actions by this clock.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from multimodal.kernels import kernels
from multimodal.schedule.execute_lanes_reference import execute_lanes_reference
from multimodal.schedule.inside_slots import InsideSlots, time_carriers
from multimodal.schedule.unit_cost import unit_costs
from multimodal.values.action import Action, Resource
from multimodal.values.arrays.rows import row_starts
from multimodal.values.schedule import Schedule, SlotMode
from multimodal.values.timeline import TimelineEvent
from multimodal.values.work.step_work import RESOURCE_NUMBERS, Integers

Floats = NDArray[np.float64]
_EXECUTION = "execution"


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
    is_done: NDArray[np.bool_]
    """[num_pieces of the schedule's dialect] True for pieces that are complete."""

    @cached_property
    def events(self) -> tuple[TimelineEvent, ...]:
        """Computations and collectives, by start; without those of zero length."""
        order = np.lexsort((self.end_seconds, self.event_lanes, self.start_seconds))
        columns = (self.event_lanes, self.start_seconds, self.end_seconds)
        actions = map(self.schedule.work.computed.__getitem__, self.event_pieces[order].tolist())
        return tuple(map(TimelineEvent, actions, *(column[order].tolist() for column in columns)))

    @cached_property
    def done(self) -> frozenset[Action]:
        """All complete actions."""
        return frozenset(map(self.schedule.work.actions.__getitem__, np.flatnonzero(self.is_done).tolist()))

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
    other replicas, and its lane for the reduction. A send never blocks; a receive is only posted, and completes with its send.
    Lanes that wait for each other in a circle stop: see `Execution.stuck`. Messages take no time. Work inside a computation
    prolongs it, completes with it, and its time is an event.

    seconds: of every computation and collective, [num_computed]; unit costs by default.
    Runs as a C++ kernel, with the same result, if the kernels are built; under unit costs once per schedule.
    O(actions + dependencies).
    """
    if seconds is None and _EXECUTION in schedule.made:
        return cast(Execution, schedule.made[_EXECUTION])
    run = execute_lanes_reference if kernels is None else kernels.execute_lanes
    arrays = lane_arrays(schedule, seconds=seconds)
    inside = InsideSlots.of(schedule) if schedule.has_inside else None
    if inside is not None:
        arrays = _join(arrays, inside)
    pieces, lanes, start, end, positions, is_done = run(**arrays)
    execution = Execution(schedule, pieces, lanes, start, end, np.asarray(positions), np.asarray(is_done, np.bool_))
    if inside is not None:
        execution = _with_inside(execution, inside)
    if seconds is None and not schedule.lowered:
        schedule.made[_EXECUTION] = execution
    return execution


def execute_unit(schedule: Schedule, unit: str, *, seconds: Floats) -> tuple[Floats, Floats]:
    """Run the computations of one unit in order; all others run as soon as they can, in no lane and without taking time.

    schedule: of the compute dialect; seconds: of every computation, [num_computed]. Returns when each computation of the unit
    starts and ends, [num_computed]; 0 for others.
    """
    work, arrays = schedule.work, lane_arrays(schedule, seconds=seconds)
    is_own = np.array([name == unit for name, _, _ in work.stages], bool)[work.computed_stages]
    kept = is_own[schedule.pieces] & (work.resources[schedule.pieces] == RESOURCE_NUMBERS[Resource.COMPUTE])
    others = np.flatnonzero(~is_own & (work.resources[: work.num_computed] == RESOURCE_NUMBERS[Resource.COMPUTE]))
    alone = np.arange(len(others))  # each has a stage and a lane of its own
    num_in_line = np.bincount(schedule.lane_of_slot[kept], minlength=schedule.num_lanes)
    arrays["lane_starts"] = row_starts(np.append(num_in_line, np.ones_like(alone)))
    arrays["lane_actions"] = np.append(schedule.pieces[kept], others)
    arrays["stages"], arrays["durations"] = arrays["stages"].copy(), np.where(is_own, seconds, 0.0)
    arrays["stages"][others] = len(arrays["stage_starts"]) - 1 + alone
    arrays["stage_starts"] = np.append(arrays["stage_starts"], arrays["stage_starts"][-1] + 1 + alone)
    arrays["stage_lanes"] = np.append(arrays["stage_lanes"], schedule.num_lanes + alone)
    run = execute_lanes_reference if kernels is None else kernels.execute_lanes
    pieces, _, starts, ends, *_ = run(**arrays)
    found = np.zeros((2, work.num_computed))
    found[:, pieces] = starts, ends
    found[:, ~is_own] = 0.0
    return found[0], found[1]


def _join(arrays: dict[str, NDArray[Any]], inside: InsideSlots) -> dict[str, NDArray[Any]]:
    """Return the kernel's arguments, with carriers in place of the work inside them."""
    in_line = np.ones(len(inside.schedule.pieces), bool)
    in_line[inside.slots] = False
    starts, needs = inside.joined_needs()
    durations, carries = arrays["durations"].copy(), np.zeros(len(arrays["durations"]), bool)
    carries[inside.carriers] = True
    carriers = np.flatnonzero(carries)
    no_waits = np.zeros(len(carriers) + 1, np.int64), np.zeros(0)
    durations[carriers] += time_carriers(
        inside,
        carriers=carriers,
        seconds=durations[carriers],
        waits=no_waits,
        durations=durations[inside.pieces],
        behind=np.zeros(len(inside.pieces)),
    ).added
    counts = np.bincount(inside.schedule.lane_of_slot[in_line], minlength=inside.schedule.num_lanes)
    return {
        **arrays,
        "lane_starts": row_starts(counts),
        "lane_actions": arrays["lane_actions"][in_line],
        "need_starts": starts,
        "needs": needs,
        "durations": durations,
    }


def _with_inside(execution: Execution, inside: InsideSlots) -> Execution:
    """Return the execution with the work inside computations as events, and positions among all slots."""
    schedule, num_lanes = execution.schedule, execution.schedule.num_lanes
    in_line = np.flatnonzero(schedule.modes != SlotMode.INSIDE)
    first = np.searchsorted(in_line, schedule.lane_starts)
    stopped_at = np.append(in_line, len(schedule.pieces))[first[:-1] + execution.positions]
    positions = np.minimum(stopped_at, schedule.lane_starts[1:]) - schedule.lane_starts[:-1]
    keys = execution.event_pieces * num_lanes + execution.event_lanes
    carrier_keys = inside.carriers * num_lanes + inside.lanes
    by_key = np.argsort(keys)
    keys, places = keys[by_key], np.searchsorted(keys[by_key], carrier_keys)
    ran = np.append(keys, -1)[places] == carrier_keys
    of_carriers = by_key[places[ran]]
    is_done = execution.is_done.copy()
    is_done[inside.pieces] = is_done[inside.carriers]
    return Execution(
        schedule,
        event_pieces=np.append(execution.event_pieces, inside.pieces[ran]),
        event_lanes=np.append(execution.event_lanes, inside.lanes[ran]),
        start_seconds=np.append(execution.start_seconds, execution.start_seconds[of_carriers]),
        end_seconds=np.append(execution.end_seconds, execution.end_seconds[of_carriers]),
        positions=positions,
        is_done=is_done,
    )


def lane_arrays(schedule: Schedule, *, seconds: Floats | None = None) -> dict[str, NDArray[Any]]:
    """Return the kernel's arguments, see csrc/execute_lanes.h."""
    work = schedule.work
    num_pieces = work.num_pieces(lowered=schedule.lowered)
    need_starts, needs = work.needs_in(lowered=schedule.lowered)
    stage_starts, stage_lanes = work.lane_rows
    collectives, member_starts, members = work.collective_rows
    durations = np.zeros(num_pieces)
    durations[: work.num_computed] = unit_costs(schedule.shape) if seconds is None else seconds
    return {
        "lane_starts": schedule.lane_starts,
        "lane_actions": schedule.pieces,
        "resources": work.resources[:num_pieces],
        "stages": work.stage_numbers[:num_pieces],
        "stage_starts": stage_starts,
        "stage_lanes": stage_lanes,
        "need_starts": need_starts,
        "needs": needs,
        "collectives": collectives[:num_pieces],
        "member_starts": member_starts,
        "members": members,
        "durations": durations,
    }
