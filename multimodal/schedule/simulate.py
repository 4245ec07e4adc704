"""Simulates a step: the duration of a lowered schedule at given costs, the kinds of its idle time, and their report."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from multimodal.cost.step_costs import StepCosts
from multimodal.schedule.align_replicas import check_expert_groups
from multimodal.schedule.compile_schedule import CompiledSchedule, compile_schedule
from multimodal.schedule.execute_lanes import UnitCosts
from multimodal.schedule.inside_slots import InsideSlots
from multimodal.schedule.simulate_events import EventTimes, NodeKind, simulate_events
from multimodal.values.action import Place
from multimodal.values.arrays.rows import Integers, row_numbers
from multimodal.values.errors import ScheduleError
from multimodal.values.schedule import Schedule, show_slots
from multimodal.values.timeline import Timeline, TimelineEvent
from multimodal.values.work.step_work import REDUCTION, StepWork


@dataclass(frozen=True)
class Simulation:
    """The result of `simulate_schedule`. `timeline` and `stage_seconds` are made on first access."""

    iteration_seconds: float
    """Seconds from the step's start until all work has ended, messages and collectives included."""
    ideal_seconds: float
    """Seconds of computations of an average rank: no schedule of these computations is shorter."""
    mfu: float
    """The model's FLOPs over those that all ranks could do in this time at their peak; 0 if either is unknown."""
    bubble: Mapping[str, float]
    """Kind (`BUBBLE_KINDS`) -> fraction of the ranks' time; with `busy_fraction` they sum to 1."""
    busy_seconds: tuple[float, ...]
    """Per lane the time in which it computes; waits for tensor parallel collectives inside a layer are not counted."""
    peak_activation_bytes: tuple[int, ...]
    """[num_lanes] for each rank of the lane: the most bytes that its places keep at one time."""
    peak_total_bytes: tuple[int, ...]
    """[num_lanes] for each rank of the lane: the peak of activations, plus weights, gradients and optimizer state."""
    num_microbatches: int
    """Microbatches, over all replicas, of the unit that has most."""
    compiled: CompiledSchedule
    """The schedule as arrays."""
    times: EventTimes
    """Start and end of every node of `compiled`."""

    @property
    def num_lanes(self) -> int:
        """Number of lanes."""
        return len(self.busy_seconds)

    @property
    def busy_fraction(self) -> float:
        """Fraction of the ranks' time in which they compute."""
        busy = float(np.dot(self.busy_seconds, self.compiled.rank_shares))
        return busy / self.iteration_seconds if self.iteration_seconds else 0.0

    @property
    def peak_memory_bytes(self) -> int:
        """The largest peak of any rank."""
        return max(self.peak_total_bytes, default=0)

    @cached_property
    def timeline(self) -> Timeline:
        """Computations, and the times that lanes waited for receives, sends and collectives, as a run measures them."""
        return build_timeline(self.compiled, self.times)

    @cached_property
    def stage_seconds(self) -> Mapping[Place, float]:
        """Seconds of computation per microbatch and virtual stage, forward and backward together."""
        seconds: dict[Place, float] = {}
        computed, actions = self.compiled.computed, self.compiled.schedule.work.computed
        for piece, took in zip(computed.pieces.tolist(), self.compiled.computed_seconds.tolist(), strict=True):
            place = actions[piece].place
            seconds[place] = seconds.get(place, 0.0) + took
        return seconds


def simulate_schedule(schedule: Schedule, costs: StepCosts) -> Simulation:
    """Run a valid lowered schedule on a clock, as the executor would run it.

    Lanes run their lists in order. Computations wait for their needs and occupy the lane. Sends are started by a lane; they
    occupy its sending, the receivers' receiving and a shared link, one after another, then take their latency. Receives are only
    posted. Collectives are started by a lane, and run once all replicas have started theirs. See `simulate_events` for the rules.

    Raises ScheduleError if the schedule cannot finish or lacks an action that another one needs; ConfigError for costs that are
    negative or not finite. O((actions + dependencies) log lanes).
    """
    compiled = compile_schedule(schedule).with_costs(costs)
    times = _run(compiled)
    arrays = compiled.arrays
    iteration_seconds = _iteration_seconds(compiled, times)
    work = np.where(arrays.kinds == NodeKind.COMPUTE, arrays.seconds, 0.0)[arrays.lane_nodes]
    busy_seconds = np.bincount(compiled.lane_of_entry, work - compiled.unfilled_seconds, arrays.num_lanes)
    peaks = peak_activation_bytes(compiled, times, costs.kept_bytes)
    available_flops = costs.peak_flops_per_second * iteration_seconds
    return Simulation(
        iteration_seconds=iteration_seconds,
        ideal_seconds=float(np.dot(work, compiled.rank_shares[compiled.lane_of_entry])),
        mfu=costs.model_flops / available_flops if available_flops else 0.0,
        bubble=bubble_fractions(compiled, times, iteration_seconds=iteration_seconds),
        busy_seconds=tuple(busy_seconds.tolist()),
        peak_activation_bytes=peaks,
        peak_total_bytes=tuple(peak + costs.static_bytes(lane) for lane, peak in enumerate(peaks)),
        num_microbatches=max((each.num_microbatches for each in schedule.shape.counts.values()), default=0),
        compiled=compiled,
        times=times,
    )


def simulate_seconds(compiled: CompiledSchedule, costs: StepCosts) -> float:
    """Return `simulate_schedule`'s iteration time alone, for a schedule under many sets of costs; raises the same errors."""
    timed = compiled.with_costs(costs)
    return _iteration_seconds(timed, _run(timed))


def timeline_of_unit_costs(schedule: Schedule) -> Timeline:
    """Simulate a valid schedule of either dialect with `UnitCosts`, which shows its shape with equal microbatches.

    In the lowered dialect the time for which a lane waits for a message is an event of its receive. Raises ScheduleError
    when the schedule cannot finish.
    """
    compiled = compile_schedule(schedule).with_costs(UnitCosts(schedule.shape))
    return build_timeline(compiled, _run(compiled))


def _run(compiled: CompiledSchedule) -> EventTimes:
    """Run a schedule; raises ScheduleError, with every lane's position, if any work never ran."""
    times = simulate_events(compiled.arrays)
    never = np.isnan(times.end_seconds)
    if not never.any():
        return times
    check_expert_groups(compiled.schedule)
    entries = compiled.arrays.lane_starts[:-1] + times.positions
    is_stuck = entries < compiled.arrays.lane_starts[1:]
    starts = compiled.schedule.lane_starts
    stuck = {int(lane): int(compiled.slots[entries[lane]] - starts[lane]) for lane in np.flatnonzero(is_stuck)}
    raise ScheduleError(
        f"the schedule cannot finish: {int(never.sum())} actions never run; validate_schedule says why\n"
        + show_slots(compiled.schedule.lanes, marked=stuck)
    )


def _iteration_seconds(compiled: CompiledSchedule, times: EventTimes) -> float:
    return float(np.max(times.end_seconds + compiled.arrays.latency_seconds, initial=0.0))


def build_timeline(compiled: CompiledSchedule, times: EventTimes) -> Timeline:
    """Build the timeline of computations, sends, collectives and waits for receives. O(actions log).

    Work inside a computation has an event within its carrier's; work in line has none if its length is zero.
    """
    schedule, start, end = compiled.schedule, times.start_seconds, times.end_seconds
    inside = [] if compiled.inside is None else _inside(compiled, compiled.inside, times)
    entries = np.flatnonzero(end[compiled.arrays.lane_nodes] > start[compiled.arrays.lane_nodes])
    nodes = compiled.arrays.lane_nodes[entries]
    actions = map(schedule.work.actions.__getitem__, schedule.pieces[compiled.slots[entries]].tolist())
    columns = (compiled.lane_of_entry[entries], start[nodes], end[nodes])
    events = [*map(TimelineEvent, actions, *(column.tolist() for column in columns)), *inside, *_waits(compiled, times)]
    ordered = sorted(events, key=lambda event: (event.start_seconds, event.lane, event.end_seconds))
    return Timeline(schedule.shape.plan.lanes, tuple(ordered))


def _inside(compiled: CompiledSchedule, inside: InsideSlots, times: EventTimes) -> list[TimelineEvent]:
    """Return the work inside computations, each at its place within its carrier."""
    assert compiled.carrier_times is not None, "a schedule without costs has no timeline"
    nodes = compiled.arrays.lane_nodes[np.searchsorted(compiled.slots, inside.carrier_slots)]
    start = times.start_seconds[nodes] + compiled.carrier_times.offsets
    columns = inside.lanes, start, start + compiled.carrier_times.durations
    actions = map(compiled.schedule.work.actions.__getitem__, inside.pieces.tolist())
    return list(map(TimelineEvent, actions, *(column.tolist() for column in columns)))


def _waits(compiled: CompiledSchedule, times: EventTimes) -> list[TimelineEvent]:
    """Return the waits for receives: from when the lane was free, or the previous message came, to the arrival."""
    arrays, pieces = compiled.arrays, compiled.schedule.pieces
    arrival = (times.end_seconds + arrays.latency_seconds).tolist()
    start, end, kinds = times.start_seconds.tolist(), times.end_seconds.tolist(), arrays.kinds.tolist()
    need_starts, needs = arrays.need_starts.tolist(), arrays.needs.tolist()
    receiver_starts, receivers = arrays.receiver_starts.tolist(), arrays.receivers.tolist()
    is_computed = arrays.kinds[arrays.lane_nodes] == NodeKind.COMPUTE
    of_lane: dict[int, list[int]] = defaultdict(list)
    for node, lane in zip(arrays.lane_nodes[is_computed].tolist(), compiled.lane_of_entry[is_computed].tolist(), strict=True):
        of_lane[lane].append(node)
    waits: list[TimelineEvent] = []
    for lane, nodes in of_lane.items():
        free_at = 0.0
        for node in sorted(nodes, key=lambda each: (start[each], end[each])):
            sends = [need for need in needs[need_starts[node] : need_starts[node + 1]] if kinds[need] == NodeKind.SEND]
            if compiled.together.size:  # lanes also wait for messages of the replicas that they compute with
                sends = [each for each in sends if lane in receivers[receiver_starts[each] : receiver_starts[each + 1]]]
            for send in sorted(sends, key=arrival.__getitem__):
                if arrival[send] > free_at:
                    receive = compiled.schedule.work.actions[pieces[compiled.receive_slots[send]]]
                    waits.append(TimelineEvent(receive, lane, free_at, arrival[send]))
                    free_at = arrival[send]
            free_at = end[node]
    return waits


def peak_activation_bytes(
    compiled: CompiledSchedule, times: EventTimes, kept_bytes: Callable[[StepWork, Integers], Integers]
) -> tuple[int, ...]:
    """Return the peak per lane: a place's bytes are kept from the start of its forward to the end of its last backward.

    A place without a backward keeps its bytes during its forward only. At equal times, bytes are freed before others are added.
    O(places log places).
    """
    computed, work = compiled.computed, compiled.schedule.work
    places = np.flatnonzero(computed.first_forwards >= 0)
    forwards = computed.first_forwards[places]
    freed_at = np.zeros(len(computed.first_forwards))
    np.maximum.at(freed_at, computed.places, times.end_seconds[computed.nodes])
    starts, lanes = work.lanes_of(computed.pieces[forwards])
    of_lanes = row_numbers(starts)
    num_bytes = kept_bytes(work, computed.pieces[forwards])[of_lanes]
    allocated_at, freed_at = times.start_seconds[computed.nodes[forwards]][of_lanes], freed_at[places][of_lanes]
    moments = np.concatenate((allocated_at, freed_at))
    changes = np.concatenate((num_bytes, -num_bytes))
    turns = np.concatenate((np.ones(len(lanes)), np.where(freed_at > allocated_at, 0, 2)))
    lanes = np.concatenate((lanes, lanes))
    order = np.lexsort((turns, moments, lanes))
    kept = np.cumsum(changes[order])  # Every lane ends with nothing, so the next one starts from 0.
    peaks = np.zeros(compiled.arrays.num_lanes, np.int64)
    np.maximum.at(peaks, lanes[order], kept)
    return tuple(peaks.tolist())


BUBBLE_KINDS = ("dp_all_gather", "dp_reduce_scatter", "pp_warmup", "pp_cooldown", "pp_other", "tp")


def bubble_fractions(compiled: CompiledSchedule, times: EventTimes, *, iteration_seconds: float) -> Mapping[str, float]:
    """Return kind -> fraction of the ranks' time (ranks x iteration); every moment of a rank belongs to at most one kind.

    A lane's idle time before its first computation is warm-up, and between two computations `pp_other`; in both, the time until
    the parameters of the next computation are gathered is `dp_all_gather` instead. After its last computation a lane cools down
    until the last computation in its pipeline (its component), then waits for the reduction of gradients, its own or slower
    replicas'; without reductions, all of it is cool-down. A lane without computations is idle for `pp_other`. `tp` is the part of
    computations in which a lane waits for a collective inside a layer and runs nothing else.
    """
    arrays, shares = compiled.arrays, compiled.rank_shares
    num_lanes = arrays.num_lanes
    is_computed = arrays.kinds[arrays.lane_nodes] == NodeKind.COMPUTE
    nodes, lanes = arrays.lane_nodes[is_computed], compiled.lane_of_entry[is_computed]
    order = np.lexsort((times.end_seconds[nodes], times.start_seconds[nodes], lanes))
    nodes, lanes = nodes[order], lanes[order]
    start, end = times.start_seconds[nodes], times.end_seconds[nodes]
    is_first = np.diff(lanes, prepend=-1) != 0
    is_last = np.diff(lanes, append=num_lanes) != 0
    free_at = np.where(is_first, 0.0, np.concatenate(([0.0], end[:-1]))) if len(nodes) else end
    # When the parameters that each node needs are gathered; 0 if it needs none.
    gathered_at, owners = np.zeros(arrays.num_nodes), row_numbers(arrays.need_starts)
    is_collective = arrays.kinds[arrays.needs] == NodeKind.COLLECTIVE
    np.maximum.at(gathered_at, owners[is_collective], times.end_seconds[arrays.needs[is_collective]])
    gathering = np.clip(np.minimum(gathered_at[nodes], start) - free_at, 0.0, None)
    waiting = start - free_at - gathering
    computed_at = np.zeros(int(compiled.component_of_lane.max(initial=-1)) + 1)
    np.maximum.at(computed_at, compiled.component_of_lane[lanes], end)
    pipeline_end = computed_at[compiled.component_of_lane[lanes[is_last]]]
    shares_of_last = shares[lanes[is_last]]
    after = float(np.dot(iteration_seconds - pipeline_end, shares_of_last))
    reduces = bool((compiled.schedule.work.kinds[compiled.pieces[arrays.kinds == NodeKind.COLLECTIVE]] == REDUCTION).any())
    idle_share = float(np.delete(shares, lanes[is_last]).sum())  # of lanes without computations
    seconds = {
        "dp_all_gather": float(np.dot(gathering, shares[lanes])),
        "dp_reduce_scatter": after if reduces else 0.0,
        "pp_warmup": float(np.dot(waiting[is_first], shares[lanes[is_first]])),
        "pp_cooldown": float(np.dot(pipeline_end - end[is_last], shares_of_last)) + (0.0 if reduces else after),
        "pp_other": float(np.dot(waiting[~is_first], shares[lanes[~is_first]])) + idle_share * iteration_seconds,
        "tp": float(np.dot(compiled.unfilled_seconds, shares[compiled.lane_of_entry])),
    }
    return {kind: seconds[kind] / iteration_seconds if iteration_seconds else 0.0 for kind in BUBBLE_KINDS}


def report_simulations(simulations: Sequence[Simulation], *, update_seconds: float = 0.0) -> dict[str, Any]:
    """Summarise simulations of consecutive steps of one plan, in seconds, bytes and, for bubbles, fractions of the ranks' time.

    Times are means over the steps, MFU and bubbles means weighted by the steps' times, peaks and counts maxima. `lanes` and
    `stages` describe the first step; `stages` has each virtual stage's computation, microbatch by microbatch. update_seconds:
    time of every step after the simulated work; it counts as step time, but neither as busy nor as a bubble.
    """
    whole = sum(each.iteration_seconds + update_seconds for each in simulations)

    def over_time(value: Callable[[Simulation], float]) -> float:
        return sum(value(each) * each.iteration_seconds for each in simulations) / whole if whole else 0.0

    first = simulations[0]
    lanes = first.compiled.schedule.lanes
    held = [sorted({action.place[:3] for action in lane.actions}) for lane in lanes]
    rows: dict[tuple[str, int, int], list[tuple[int, float]]] = {}
    for place, seconds in first.stage_seconds.items():
        rows.setdefault((place.unit, place.replica, place.stage), []).append((place.microbatch, seconds))
    return {
        "iteration_seconds": whole / len(simulations),
        "update_seconds": update_seconds,
        "ideal_seconds": sum(each.ideal_seconds for each in simulations) / len(simulations),
        "mfu": over_time(lambda each: each.mfu),
        "bubble": {kind: over_time(lambda each, kind=kind: each.bubble[kind]) for kind in first.bubble},  # type: ignore[misc]
        "busy_fraction": over_time(lambda each: each.busy_fraction),
        "peak_memory_bytes": max(each.peak_memory_bytes for each in simulations),
        "num_lanes": first.num_lanes,
        "num_microbatches": max(each.num_microbatches for each in simulations),
        "iterations": [
            {
                "iteration_seconds": each.iteration_seconds + update_seconds,
                "ideal_seconds": each.ideal_seconds,
                "mfu": each.mfu * each.iteration_seconds / (each.iteration_seconds + update_seconds or 1.0),
                "peak_memory_bytes": each.peak_memory_bytes,
                "num_microbatches": each.num_microbatches,
            }
            for each in simulations
        ],
        "lanes": [
            {
                "ranks": list(lane.ranks),
                "stages": [f"{unit} {replica} stage {stage}" for unit, replica, stage in held[index]],
                "busy_seconds": first.busy_seconds[index],
                "peak_activation_bytes": first.peak_activation_bytes[index],
                "peak_memory_bytes": first.peak_total_bytes[index],
            }
            for index, lane in enumerate(lanes)
        ],
        "stages": [
            {"unit": unit, "replica": replica, "stage": stage, "microbatch_seconds": [seconds for _, seconds in sorted(found)]}
            for (unit, replica, stage), found in sorted(rows.items())
        ],
    }
