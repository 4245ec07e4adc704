"""Simulate a step: how long a lowered schedule takes at given costs, and where its time goes."""

import numpy as np

from multimodal.cost.step_costs import StepCosts
from multimodal.schedule.activation_peak import peak_activation_bytes
from multimodal.schedule.bubbles import bubble_fractions
from multimodal.schedule.compile_schedule import CompiledSchedule, CompiledStructure, compile_schedule
from multimodal.schedule.event_arrays import EventTimes
from multimodal.schedule.place_grid import show_places
from multimodal.schedule.simulate_events import simulate_events
from multimodal.schedule.simulation import Simulation
from multimodal.values.assignment import Assignment
from multimodal.values.errors import ScheduleError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Schedule


def simulate_schedule(
    schedule: Schedule, *, graph: ModelGraph, plan: Plan, assignment: Assignment, costs: StepCosts
) -> Simulation:
    """Run a valid lowered schedule on a clock, as the executor would run it.

    Lanes run their lists in order. Computations wait for what they need and occupy the lane; sends are started, and occupy the
    lane's sending, the receivers' receiving and a shared link, one after another, then take their latency; receives are only
    posted; collectives are started, and run once all replicas have started theirs. See `simulate_events` for the rules.

    Raises ScheduleError when the schedule cannot finish or lacks an action that another needs; ConfigError for costs that are
    negative or not finite. O((actions + dependencies) log lanes).
    """
    compiled = compile_schedule(schedule, graph=graph, plan=plan, assignment=assignment, costs=costs)
    times = _run(compiled)
    arrays = compiled.arrays
    iteration_seconds = _iteration_seconds(compiled, times)
    work = np.where(compiled.place_of_node >= 0, arrays.seconds, 0.0)[arrays.lane_nodes]
    waits = compiled.tensor_parallel_seconds[arrays.lane_nodes]
    busy_seconds = np.bincount(compiled.lane_of_entry, work - waits, arrays.num_lanes)
    peaks = peak_activation_bytes(compiled, times, costs.activation_bytes)
    available_flops = costs.peak_flops_per_second * iteration_seconds
    return Simulation(
        iteration_seconds=iteration_seconds,
        ideal_seconds=float(work.sum()) / arrays.num_lanes,
        mfu=costs.model_flops / available_flops if available_flops else 0.0,
        bubble=bubble_fractions(compiled, times, iteration_seconds=iteration_seconds),
        busy_seconds=tuple(busy_seconds.tolist()),
        peak_activation_bytes=peaks,
        peak_total_bytes=tuple(peak + costs.static_bytes(lane) for lane, peak in enumerate(peaks)),
        num_microbatches=max((sum(map(len, replicas)) for replicas in assignment.units.values()), default=0),
        compiled=compiled,
        times=times,
    )


def simulate_seconds(structure: CompiledStructure, costs: StepCosts) -> float:
    """Return `simulate_schedule`'s iteration time alone, for a structure that is simulated under one set of costs after another.

    Raises what `simulate_schedule` raises.
    """
    compiled = structure.with_costs(costs)
    return _iteration_seconds(compiled, _run(compiled))


def _run(compiled: CompiledSchedule) -> EventTimes:
    times = simulate_events(compiled.arrays)
    check_finished(compiled, times)
    return times


def _iteration_seconds(compiled: CompiledSchedule, times: EventTimes) -> float:
    return float(np.max(times.end_seconds + compiled.arrays.latency_seconds, initial=0.0))


def check_finished(compiled: CompiledSchedule, times: EventTimes) -> None:
    """Raise ScheduleError, with every lane's place, when something never ran."""
    never = np.isnan(times.end_seconds)
    if not never.any():
        return
    entries = compiled.arrays.lane_starts[:-1] + times.positions
    is_stuck = entries < compiled.arrays.lane_starts[1:]
    stuck = {int(lane): int(compiled.lane_positions[entries[lane]]) for lane in np.flatnonzero(is_stuck)}
    raise ScheduleError(
        f"the schedule cannot finish: {int(never.sum())} actions never run; validate_schedule says why\n"
        + show_places(compiled.schedule, marked=stuck)
    )
