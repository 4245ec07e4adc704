"""Optimus: encoder work in the bubbles of the LLM's pipeline (Feng et al., Optimus, Algorithm 2)."""

import math

import numpy as np

from multimodal.cost.step_costs import StepCosts
from multimodal.schedule.builders.interleaved_1f1b import build_interleaved_1f1b, interleaved_spans, is_interleaved
from multimodal.schedule.builders.one_f_one_b import build_one_f_one_b
from multimodal.schedule.compile_schedule import connected_lanes
from multimodal.schedule.fill_idle_lanes import LanesToFill
from multimodal.schedule.list_schedule import place_reductions
from multimodal.values.action import ActionKind
from multimodal.values.arrays.rows import Integers, row_starts, take_rows
from multimodal.values.schedule import Schedule
from multimodal.values.step_graph import StepGraph
from multimodal.values.step_work import KIND_NUMBERS, StepWork, step_work

TOLERANCES = (0, 20, 40, 60, 80, 100)
"""Percent of an encoder's computation that may stick out of a bubble; the one with the shortest step is taken."""
_NANOSECONDS = 1e9
_FORWARD, _BACKWARD, _REDUCTION = (
    KIND_NUMBERS[kind] for kind in (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.REDUCE_GRADIENTS)
)


def build_optimus(step: StepGraph, costs: StepCosts, *, memory_factor: float = math.inf) -> Schedule:
    """Build a schedule in which encoders compute while the LLM's lanes would wait, in the compute dialect.

    The LLM and what follows it keep the order of 1F1B, interleaved if its stages hold several layer ranges. Forwards and
    backwards of encoders go where the lane would be idle for as long as they take, by the durations of `costs`; before that where
    an LLM microbatch would have to wait for them longer than others would for the LLM (`fill_idle_lanes`). So the number of
    forwards before the pipeline and of backwards after it, which Algorithm 2 finds by moving one microbatch after another into
    bubbles, follows from the clock.

    memory_factor: microbatches that a stage of an encoder keeps at most, over those of 1F1B. More than that only where the LLM's
    order would never go on otherwise.
    """
    work = step_work(step)
    interleaves = is_interleaved(step.plan.units[step.graph.backbone.name])
    in_line = (build_interleaved_1f1b if interleaves else build_one_f_one_b)(step)
    clock = _Clock(work, costs)
    found: dict[bytes, Integers] = {}
    lanes: list[Integers] = [np.zeros(0, np.int64)] * len(step.plan.lanes)
    limits = _limits(step, memory_factor)
    for pipeline in map(np.array, step.once(connected_lanes)):
        pieces = _pieces_of(work, pipeline)
        to_fill = _lanes_to_fill(in_line, pieces, pipeline, clock, limits)
        alike = b"".join(array.tobytes() for array in vars(to_fill).values())
        if alike not in found:
            found[alike] = min((to_fill.fill(tolerance=each) for each in TOLERANCES), key=lambda filled: filled.end).order
        in_order = found[alike]
        starts, of_piece = take_rows(to_fill.lane_starts, to_fill.lanes, in_order)
        ordered = np.repeat(pieces[in_order], np.diff(starts))
        for index, lane in enumerate(pipeline.tolist()):
            lanes[lane] = ordered[of_piece == index]
    return place_reductions(Schedule.of_numbers(step, lanes))


class _Clock:
    """Durations of a step's computations and delays of its messages, in nanoseconds."""

    def __init__(self, work: StepWork, costs: StepCosts) -> None:
        computed, sends = np.flatnonzero(work.kinds != _REDUCTION), work.num_computed + 2 * np.arange(work.num_messages)
        found = costs.of_pieces(work, np.concatenate((computed, sends)))
        nanoseconds = np.round((found.seconds + found.latency_seconds) * _NANOSECONDS).astype(np.int64)
        self.durations = np.zeros(work.num_computed, np.int64)
        """[num_computed]."""
        self.durations[computed] = nanoseconds[: len(computed)]
        self.delays = np.append(nanoseconds[len(computed) :], 0)[work.message_of_need]
        """[num_needs] none where nothing is sent."""


def _pieces_of(work: StepWork, pipeline: Integers) -> Integers:
    """Return the computations of a pipeline's lanes, ascending."""
    starts, lanes = work.lane_rows
    in_pipeline = np.isin(lanes[starts[:-1]], pipeline)[work.computed_stages]
    return np.flatnonzero(in_pipeline & (work.kinds != _REDUCTION))


def _limits(step: StepGraph, memory_factor: float) -> Integers:
    """Return, for each of the numbered stages, how many microbatches an encoder may have in flight there; -1: any number."""
    keys = step_work(step).stages
    if step.forward_only or math.isinf(memory_factor):
        return np.full(len(keys), -1)
    encoders = {unit.name for unit in step.graph.encoders}
    spans = interleaved_spans(step)

    def limit(unit: str, replica: int, stage: int) -> int:
        if unit not in encoders or not step.backward_need(unit, replica, stage).has_backward:
            return -1
        held = step.plan.units[unit].replicas[replica]
        own = len(held.stages) - held.virtual_stages[stage].stage_index
        return math.ceil(memory_factor * (own + spans[unit, replica, stage]))

    return np.array([limit(*key) for key in keys], np.int64)


def _lanes_to_fill(in_line: Schedule, pieces: Integers, pipeline: Integers, clock: _Clock, limits: Integers) -> LanesToFill:
    """Return a pipeline's part of a step, pieces and lanes numbered anew: encoders fill, all else keeps its order.

    Forwards and backwards of one encoder stage keep their order among themselves, the one in which they are needed.
    """
    work = in_line.work
    encoders = [unit.name for unit in work.graph.encoders]
    fills = np.array([unit in encoders for unit, _, _ in work.stages], bool)[work.computed_stages]
    local_piece, local_lane = np.full(work.num_computed, -1), np.full(in_line.num_lanes, -1)
    local_piece[pieces], local_lane[pipeline] = np.arange(len(pieces)), np.arange(len(pipeline))
    lane_starts, lanes = work.lanes_of(pieces)
    need_starts, needs = take_rows(work.need_starts, np.arange(len(work.needs)), pieces)
    rows = [in_line.lane_pieces(lane) for lane in pipeline.tolist()]
    line = [row[~fills[row] & (local_piece[row] >= 0)] for row in rows]
    filling = np.concatenate([row[fills[row] & (local_piece[row] >= 0)] for row in rows])
    filling = filling[np.sort(np.unique(filling, return_index=True)[1])]
    filling = filling[np.argsort(work.blocks[filling], kind="stable")]
    _, sizes = np.unique(work.blocks[filling], return_counts=True)
    stages, stage_of_piece = np.unique(work.computed_stages[pieces], return_inverse=True)
    is_limited, kinds = fills[pieces] & (limits[stages] >= 0)[stage_of_piece], work.kinds[pieces]
    return LanesToFill(
        durations=clock.durations[pieces],
        lane_starts=lane_starts,
        lanes=local_lane[lanes],
        need_starts=need_starts,
        needs=local_piece[work.needs[needs]],
        delays=clock.delays[needs],
        line_starts=row_starts(list(map(len, line))),
        line=local_piece[np.concatenate(line)],
        queue_starts=row_starts(sizes),
        queues=local_piece[filling],
        holders=np.where(is_limited & (kinds == _FORWARD), stage_of_piece, -1),
        releases=np.where(is_limited & (kinds == _BACKWARD), stage_of_piece, -1),
        limits=limits[stages],
    )
