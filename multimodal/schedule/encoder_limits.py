"""Limits on the microbatches that a stage of an encoder has in flight while it fills the LLM's bubbles."""

import math
from collections import defaultdict

import numpy as np

from multimodal.cost.step_costs import StepCosts
from multimodal.schedule.builders.interleaved_1f1b import interleaved_spans
from multimodal.schedule.builders.room_ahead import MEMORY_SHARE
from multimodal.values.arrays.rows import Integers
from multimodal.values.parts.cuts import StageKey
from multimodal.values.shape import StepShape
from multimodal.values.work.step_work import step_work


def encoder_limits(shape: StepShape, costs: StepCosts, *, memory_factor: float) -> Integers:
    """Return, for each numbered stage, the number of microbatches an encoder may have in flight there; -1: any number.

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
    ranks = set(shape.plan.units[shape.graph.backbone.name].ranks)
    apart = [unit.name for unit in shape.graph.encoders if ranks.isdisjoint(shape.plan.units[unit.name].ranks)]
    if math.isinf(costs.memory_bytes):
        return {}
    kept, lane_of = defaultdict[int, int](int), dict[StageKey, int]()
    for name in apart:
        sizes = _largest_kept(shape, costs, name)
        for _, replica, stage in (key for key in shape.stages if key[0] == name):
            lane_of[name, replica, stage] = lane = shape.lanes_of(name, replica, stage)[0]
            kept[lane] += int(sizes[replica, stage])
    free = {lane: MEMORY_SHARE * costs.memory_bytes - costs.static_bytes(lane) for lane, size in kept.items() if size}
    return {key: free[lane] // kept[lane] for key, lane in lane_of.items() if lane in free}


def _largest_kept(shape: StepShape, costs: StepCosts, unit: str) -> Integers:
    """[num_replicas, num_stages] bytes per rank that the largest microbatch keeps."""
    work = step_work(shape)
    pieces = work.pieces.units[unit]
    kept, is_there = np.zeros(pieces.forward.shape, np.int64), pieces.forward >= 0
    kept[is_there] = costs.kept_bytes(work, pieces.forward[is_there])
    found = np.zeros((pieces.counted.num_replicas, len(kept)), np.int64)
    np.maximum.at(found, pieces.counted.replica_of_microbatch, kept.T)
    return found
