"""Simulations of one or several steps as plain values, for JSON and tables."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from multimodal.schedule.simulate import Simulation


def report_simulations(simulations: Sequence[Simulation], *, update_seconds: float = 0.0) -> dict[str, Any]:
    """Summarise simulations of consecutive steps of one plan, in seconds, bytes and, for bubbles, fractions of lane time.

    Times are means over the steps, MFU and bubbles means weighted by the steps' times, peaks and counts maxima. `lanes` and
    `stages` describe the first step; `stages` has each virtual stage's computation, microbatch by microbatch. update_seconds:
    time of every step after the simulated work; it counts as step time, but neither as busy nor as a bubble.
    """
    whole = sum(each.iteration_seconds + update_seconds for each in simulations)

    def over_time(value: Callable[[Simulation], float]) -> float:
        return sum(value(each) * each.iteration_seconds for each in simulations) / whole if whole else 0.0

    first = simulations[0]
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
        "iterations": [_step(each, update_seconds) for each in simulations],
        "lanes": _lanes(first),
        "stages": _stages(first),
    }


def _step(simulation: Simulation, update_seconds: float) -> Mapping[str, Any]:
    whole = simulation.iteration_seconds + update_seconds
    return {
        "iteration_seconds": whole,
        "ideal_seconds": simulation.ideal_seconds,
        "mfu": simulation.mfu * simulation.iteration_seconds / whole if whole else 0.0,
        "peak_memory_bytes": simulation.peak_memory_bytes,
        "num_microbatches": simulation.num_microbatches,
    }


def _lanes(simulation: Simulation) -> list[Mapping[str, Any]]:
    lanes = simulation.compiled.schedule.lanes
    held = [sorted({action.place[:3] for action in lane.actions}) for lane in lanes]
    return [
        {
            "ranks": list(lane.ranks),
            "stages": [f"{unit} {replica} stage {stage}" for unit, replica, stage in held[index]],
            "busy_seconds": simulation.busy_seconds[index],
            "peak_activation_bytes": simulation.peak_activation_bytes[index],
            "peak_memory_bytes": simulation.peak_total_bytes[index],
        }
        for index, lane in enumerate(lanes)
    ]


def _stages(simulation: Simulation) -> list[Mapping[str, Any]]:
    rows: dict[tuple[str, int, int], list[tuple[int, float]]] = {}
    for place, seconds in simulation.stage_seconds.items():
        rows.setdefault((place.unit, place.replica, place.stage), []).append((place.microbatch, seconds))
    return [
        {"unit": unit, "replica": replica, "stage": stage, "microbatch_seconds": [seconds for _, seconds in sorted(found)]}
        for (unit, replica, stage), found in sorted(rows.items())
    ]
