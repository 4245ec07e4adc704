"""Optimus: encoder work in the bubbles of the LLM's pipeline (Feng et al., Optimus, Algorithm 2)."""

import math
from collections.abc import Collection

from multimodal.cost.step_costs import StepCosts
from multimodal.schedule.builders.interleaved_1f1b import build_interleaved_1f1b, is_interleaved
from multimodal.schedule.builders.one_f_one_b import build_one_f_one_b
from multimodal.schedule.fill_pipelines import Movable, fill_pipelines
from multimodal.schedule.split_in_line import fills_of, reduced_units, split_in_line, weights_before_forwards, weights_before_last
from multimodal.values.schedule import Schedule
from multimodal.values.shape import StepShape


def build_optimus(
    shape: StepShape, costs: StepCosts, *, memory_factor: float = math.inf, splits_backwards: bool = False
) -> Schedule:
    """Build a schedule in which encoders compute while the LLM's lanes would wait, in the compute dialect.

    The LLM keeps the order of 1F1B, interleaved if its stages hold several layer ranges. Forwards and backwards of encoders, and
    of generators at the other end of the pipeline, go where the lane would be idle for their duration, by the durations of
    `costs`; they go earlier if an LLM microbatch would otherwise wait for them longer than other microbatches would for the LLM
    (`fill_idle_lanes`). So the number of forwards before the pipeline and of backwards after it, which Algorithm 2 finds by
    moving one microbatch after another into bubbles, follows from the clock.

    memory_factor: microbatches that a stage of an encoder keeps at most, over those of 1F1B (`encoder_limits`); more only if the
    LLM's order could not continue otherwise. splits_backwards: also fill with weight gradients if that shortens the step, as far
    as the LLM's stages keep no more than without (`weights_before_forwards`): with those of all units, or of all but the encoders
    on the LLM's ranks, which can then run in ranges of segments.
    """
    interleaves = is_interleaved(shape.plan.units[shape.graph.backbone.name])
    in_line = (build_interleaved_1f1b if interleaves else build_one_f_one_b)(shape)
    if not splits_backwards or shape.forward_only:
        return fill_pipelines(in_line, costs, _movable(in_line, (), memory_factor)).schedule
    reduced, lines = reduced_units(shape, costs), [split_in_line(in_line, units) for units in _ways_to_split(shape)]
    found = (fill_pipelines(line, costs, _movable(line, reduced, memory_factor)) for line in lines)
    return min(found, key=lambda filled: filled.end).schedule


def _movable(in_line: Schedule, reduced: Collection[str], memory_factor: float) -> Movable:
    """Return all computations but the LLM's forwards and backwards as movable work."""
    llm, last = in_line.shape.graph.backbone.name, weights_before_last(in_line, reduced)
    fills = fills_of(in_line, [unit for unit in in_line.shape.graph.unit_names if unit != llm], last)
    return Movable(fills, weights_before_forwards(in_line, llm).joined(last), memory_factor, goes_inside=True)


def _ways_to_split(shape: StepShape) -> list[list[str]]:
    """Return the sets of units whose backwards are split: none; all but encoders on the LLM's ranks; if these train, all."""
    ranks = set(shape.plan.units[shape.graph.backbone.name].ranks)
    encoders = {unit.name for unit in shape.graph.encoders}
    keeping = {key[0] for key in shape.stages if shape.backward_need(*key).has_backward}
    trained = [name for name in shape.graph.unit_names if name in keeping]
    apart = [name for name in trained if name not in encoders or ranks.isdisjoint(shape.plan.units[name].ranks)]
    return [[], apart, trained] if len(apart) < len(trained) else [[], apart]
