"""Optimus: encoder work in the bubbles of the LLM's pipeline (Feng et al., Optimus, Algorithm 2)."""

import math
from collections import Counter
from functools import partial

import numpy as np

from multimodal.cost.step_costs import StepCosts
from multimodal.schedule.builders.interleaved_1f1b import build_interleaved_1f1b, interleaved_spans, is_interleaved
from multimodal.schedule.builders.one_f_one_b import MEMORY_SHARE, build_one_f_one_b, kept_by_stage
from multimodal.schedule.encoder_ranges import reduced_units, split_in_line
from multimodal.schedule.fill_pipelines import Movable, fill_pipelines
from multimodal.values.arrays.rows import Integers
from multimodal.values.parts.cuts import StageKey
from multimodal.values.schedule import Schedule
from multimodal.values.shape import StepShape
from multimodal.values.work.step_work import step_work


def build_optimus(
    shape: StepShape, costs: StepCosts, *, memory_factor: float = math.inf, splits_backwards: bool = False
) -> Schedule:
    """Build a schedule in which encoders compute while the LLM's lanes would wait, in the compute dialect.

    The LLM keeps the order of 1F1B, interleaved if its stages hold several layer ranges. Forwards and backwards of encoders, and
    of generators at the other end of the pipeline, go where the lane would be idle for their duration, by the durations of
    `costs`; they go earlier if an LLM microbatch would otherwise wait for them longer than other microbatches would for the LLM
    (`fill_idle_lanes`). So the number of forwards before the pipeline and of backwards after it, which Algorithm 2 finds by
    moving one microbatch after another into bubbles, follows from the clock.

    memory_factor: microbatches that a stage of an encoder keeps at most, over those of 1F1B (`_encoder_limits`); more only if the
    LLM's order could not continue otherwise. splits_backwards: also fill with weight gradients if that shortens the step, as far
    as the LLM's stages keep no more than without (`weights_before_forwards`): with those of all units, or of all but the encoders
    on the LLM's ranks, which can then run in ranges of segments.
    """
    llm = shape.graph.backbone.name
    in_line = (build_interleaved_1f1b if is_interleaved(shape.plan.units[llm]) else build_one_f_one_b)(shape)
    limits = _encoder_limits(shape, costs, memory_factor)
    others = [unit for unit in shape.graph.unit_names if unit != llm]
    movable = partial(Movable.of, units=others, llm=llm, limits=limits, goes_inside=True)
    if not splits_backwards or shape.forward_only:
        return fill_pipelines(in_line, costs, movable(in_line)).schedule
    reduced, lines = reduced_units(shape, costs), [split_in_line(in_line, units) for units in _ways_to_split(shape)]
    found = (fill_pipelines(line, costs, movable(line, reduced=reduced)) for line in lines)
    return min(found, key=lambda filled: filled.end).schedule


def _ways_to_split(shape: StepShape) -> list[list[str]]:
    """Return the sets of units whose backwards are split: none; all but encoders on the LLM's ranks; if these train, all."""
    ranks = set(shape.plan.units[shape.graph.backbone.name].ranks)
    encoders = {unit.name for unit in shape.graph.encoders}
    keeping = {key[0] for key in shape.stages if shape.backward_need(*key).has_backward}
    trained = [name for name in shape.graph.unit_names if name in keeping]
    apart = [name for name in trained if name not in encoders or ranks.isdisjoint(shape.plan.units[name].ranks)]
    return [[], apart, trained] if len(apart) < len(trained) else [[], apart]


def _encoder_limits(shape: StepShape, costs: StepCosts, memory_factor: float) -> Integers:
    """Return, for each numbered stage, the microbatches that an encoder may have in flight there; -1: any number.

    That is the number of 1F1B. On the LLM's ranks, where planners count on it, it is up to `memory_factor` times as large (the
    factor may be infinite); on ranks of the encoder's own, as far as the microbatches fit into the memory of `costs`.
    """
    keys = step_work(shape).stages
    limits = np.full(len(keys), -1)
    room = {} if shape.forward_only else _room_by_memory(shape, costs)
    if shape.forward_only or (math.isinf(memory_factor) and not room):
        return limits
    encoders, spans = {unit.name for unit in shape.graph.encoders}, interleaved_spans(shape)
    there = set(shape.stages)
    for number, key in enumerate(keys):
        if key[0] in encoders and key in there and shape.backward_need(*key).has_backward:
            held = shape.plan.units[key[0]].replicas[key[1]]
            in_1f1b = len(held.stages) - held.virtual_stages[key[2]].stage_index + spans[key]
            most = max(in_1f1b, min(memory_factor * in_1f1b, room.get(key, math.inf)))
            limits[number] = -1 if math.isinf(most) else math.ceil(most)
    return limits


def _room_by_memory(shape: StepShape, costs: StepCosts) -> dict[StageKey, float]:
    """Return how many of the largest microbatches fit at once into each stage of the encoders on ranks of their own.

    Stages on the same ranks share the room equally. Empty if the memory is unknown, or microbatches take none.
    """
    if math.isinf(costs.memory_bytes):
        return {}
    ranks = set(shape.plan.units[shape.graph.backbone.name].ranks)
    apart = {unit.name for unit in shape.graph.encoders if ranks.isdisjoint(shape.plan.units[unit.name].ranks)}
    kept, lane_of = Counter[int](), dict[StageKey, int]()
    for stage, sizes in kept_by_stage(shape, costs):
        if stage[0] in apart:
            lane_of[stage] = lane = shape.plan.lanes_of_stage(*stage)[0]
            kept[lane] += int(sizes.max())
    free = {lane: MEMORY_SHARE * costs.memory_bytes - costs.static_bytes(lane) for lane, size in kept.items() if size}
    return {key: free[lane] // kept[lane] for key, lane in lane_of.items() if lane in free}
