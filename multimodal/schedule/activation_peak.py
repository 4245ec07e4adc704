"""The most that the places of a lane keep at one time in a simulated step."""

from collections.abc import Callable

import numpy as np

from multimodal.schedule.compile_schedule import CompiledSchedule
from multimodal.schedule.event_arrays import EventTimes, Floats, Integers
from multimodal.values.schedule import Place


def peak_activation_bytes(
    compiled: CompiledSchedule, times: EventTimes, activation_bytes: Callable[[Place], int]
) -> tuple[int, ...]:
    """Return the peak per lane: a place's bytes are kept from its forward's start to the end of its last backward.

    A place without a backward keeps its bytes during its forward only. What ends when something else starts is freed first.
    O(places log places).
    """
    arrays = compiled.arrays
    forwards = compiled.forward_of_place
    has_forward = np.flatnonzero(forwards >= 0)
    num_bytes = np.zeros(len(forwards), np.int64)
    num_bytes[has_forward] = [activation_bytes(compiled.actions[node].place) for node in forwards[has_forward].tolist()]
    freed_at = _freed_at(compiled, times)
    places = np.where(arrays.kinds == 0, compiled.place_of_node, -1)[arrays.lane_nodes]
    keeps = (places >= 0) & (forwards[places] == arrays.lane_nodes) if len(forwards) else np.zeros(0, np.bool_)
    places, lanes = places[keeps], compiled.lane_of_entry[keeps]
    allocated_at = times.start_seconds[forwards[places]]
    moments = np.concatenate((allocated_at, freed_at[places]))
    changes = np.concatenate((num_bytes[places], -num_bytes[places]))
    turns = np.concatenate((np.ones(len(places)), np.where(freed_at[places] > allocated_at, 0, 2)))
    return _peaks(np.concatenate((lanes, lanes)), moments, turns, changes, arrays.num_lanes)


def _freed_at(compiled: CompiledSchedule, times: EventTimes) -> Floats:
    freed_at = np.zeros(len(compiled.forward_of_place))
    computes = np.flatnonzero(compiled.place_of_node >= 0)
    np.maximum.at(freed_at, compiled.place_of_node[computes], times.end_seconds[computes])
    return freed_at


def _peaks(lanes: Integers, moments: Floats, turns: Floats, changes: Integers, num_lanes: int) -> tuple[int, ...]:
    order = np.lexsort((turns, moments, lanes))
    kept = np.cumsum(changes[order])  # Every lane ends with nothing, so the next one starts from 0.
    peaks = np.zeros(num_lanes, np.int64)
    np.maximum.at(peaks, lanes[order], kept)
    return tuple(peaks.tolist())
