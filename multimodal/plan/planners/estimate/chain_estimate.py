"""Seconds of a step of one interleaved chain: average microbatches in layer ranges that are dealt to lanes in turn."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from multimodal.schedule.builders.interleaved_1f1b import interleaved_order
from multimodal.schedule.simulate_events import EventArrays, NodeKind, simulate_events
from multimodal.values.action import ActionKind
from multimodal.values.arrays.rows import row_starts
from multimodal.values.work.step_work import KIND_NUMBERS

SHORT, LONG = 2, 3
"""Microbatches of two short steps, divided by the number of lanes: after its warm-up a pipeline is periodic."""


class ChainRange(NamedTuple):
    """One layer range; seconds are of one microbatch."""

    forward_seconds: float
    backward_seconds: float
    gathering_seconds: float = 0.0
    """Seconds of gathering its updated weights before its first forward."""
    reducing_seconds: float = 0.0
    """Seconds of reducing its gradients, without the part that runs during its last backward."""


def chain_seconds(ranges: Sequence[ChainRange], *, num_lanes: int, num_microbatches: int) -> float:
    """Return the seconds of a step of interleaved 1F1B; range i is in lane i modulo `num_lanes`.

    All lanes pass their ranges in groups of `num_lanes` microbatches and wait for each other at every step, so unequal ranges
    cost more than the busiest lane's work: in its short ranges, a lane waits for its neighbours' long ones. Messages take no
    time. A step of many microbatches is extrapolated linearly from two short ones. O(ranges x lanes).
    """
    if num_microbatches <= LONG * num_lanes:
        return _run(ranges, num_lanes, num_microbatches)
    short, long = (_run(ranges, num_lanes, times * num_lanes) for times in (SHORT, LONG))
    return short + (long - short) * (num_microbatches - SHORT * num_lanes) / ((LONG - SHORT) * num_lanes)


def slowdown_by_lengths(works: NDArray[np.float64], *, num_lanes: int, num_chunks: int) -> float:
    """Return the ratio of a step of equal ranges on these works, in order, a multiple of the lanes, to one of average ones."""
    even, count = [ChainRange(1.0, 2.0)] * (num_lanes * num_chunks), len(works)
    return _run(even, num_lanes, count, works / works.mean()) / _run(even, num_lanes, count)


def num_nodes(*, num_ranges: int, num_lanes: int, num_microbatches: int) -> int:
    """Return the approximate number of computations that `chain_seconds` runs."""
    short_steps = (SHORT + LONG) * num_lanes
    return 2 * num_ranges * (num_microbatches if num_microbatches <= LONG * num_lanes else short_steps)


@lru_cache(maxsize=256)
def chunks_in_flight(lane: int, *, num_lanes: int, chunks: int, num_microbatches: int) -> NDArray[np.int64]:
    """Return the microbatches of each of its chunks that a lane keeps after each of its steps, [num_steps, chunks]."""
    num_microbatches = min(num_microbatches, LONG * num_lanes)
    order = interleaved_order(lane, num_stages=num_lanes, chunks=chunks, num_microbatches=num_microbatches)
    changes = np.zeros((len(order.kinds), chunks), np.int64)
    changes[np.arange(len(changes)), order.chunks] = np.where(order.kinds == KIND_NUMBERS[ActionKind.FORWARD], 1, -1)
    return changes.cumsum(axis=0)


def _run(ranges: Sequence[ChainRange], num_lanes: int, num_microbatches: int, works: NDArray[np.float64] | float = 1.0) -> float:
    """Return the seconds of the ranges in that order; works: of each microbatch, relative to an average one."""
    arrays = _arrays(num_lanes, len(ranges) // num_lanes, num_microbatches)
    forward, backward, gathering, reducing = np.array(ranges).T
    of_each = np.broadcast_to(works, num_microbatches)
    computing = (np.outer(seconds, of_each).ravel() for seconds in (forward, backward))
    seconds = np.concatenate((*computing, gathering, reducing))
    return float(simulate_events(replace(arrays, seconds=seconds)).end_seconds.max())


@lru_cache(maxsize=64)
def _arrays(num_lanes: int, chunks: int, num_microbatches: int) -> EventArrays:
    """Number the forwards of all ranges, their backwards, then the gathers and the reductions; without their seconds."""
    num_ranges = num_lanes * chunks
    count = num_ranges * num_microbatches
    forwards, ranges = np.arange(count), np.arange(num_ranges)
    position, first = forwards // num_microbatches, ranges * num_microbatches
    needs = np.full((2 * (count + num_ranges), 2), -1)
    needs[:count, 0] = np.where(position > 0, forwards - num_microbatches, -1)
    needs[first, 1] = 2 * count + ranges
    needs[count : 2 * count, 0] = forwards
    needs[count : 2 * count, 1] = np.where(position < num_ranges - 1, count + forwards + num_microbatches, -1)
    needs[2 * count + num_ranges :, 0] = count + first + num_microbatches - 1
    lanes = []
    for lane in range(num_lanes):  # gathers, runs Megatron's order, and reduces each range after its last backward
        order = interleaved_order(lane, num_stages=num_lanes, chunks=chunks, num_microbatches=num_microbatches)
        is_backward, held = order.kinds == KIND_NUMBERS[ActionKind.BACKWARD], order.chunks * num_lanes + lane
        nodes = is_backward * count + held * num_microbatches + order.microbatches
        last = np.flatnonzero(is_backward & (order.microbatches == num_microbatches - 1))
        gatherings = 2 * count + np.arange(chunks) * num_lanes + lane
        reductions = 2 * count + num_ranges + held[last]
        lanes.append(np.concatenate((gatherings, np.insert(nodes, last + 1, reductions))))
    num_nodes, is_needed = len(needs), needs >= 0
    entries = np.concatenate(lanes)
    none, kinds = np.zeros(num_nodes), np.full(num_nodes, NodeKind.COMPUTE, np.uint8)
    kinds[2 * count :] = NodeKind.COLLECTIVE
    return EventArrays(
        lane_starts=row_starts(list(map(len, lanes))),
        lane_nodes=entries,
        lane_fillers=np.zeros(len(entries), np.uint8),
        kinds=kinds,
        need_starts=row_starts(is_needed.sum(axis=1)),
        needs=needs[is_needed],
        receiver_starts=np.zeros(num_nodes + 1, np.int64),
        receivers=np.zeros(0, np.int64),
        seconds=none,
        latency_seconds=none,
        links=np.full(num_nodes, -1),
        num_links=0,
    )
