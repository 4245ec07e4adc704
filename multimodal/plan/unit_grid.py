"""Lays one unit out on consecutive ranks, in Megatron's default order (tp fastest, then cp, then dp, then pp)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from multimodal.plan.partition_layers import partition_unit, range_seconds
from multimodal.plan.unit_sizes import UnitSizes
from multimodal.values.errors import PlanError
from multimodal.values.model_graph import Unit
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan, split_layers

LayerSeconds = Mapping[str, Sequence[float]]
"""Unit -> the seconds of each of its layers, forward and backward."""
EVEN: LayerSeconds = MappingProxyType({})
"""No seconds: all stages get equally many transformer layers."""
LEAST_GAIN = 0.01
"""Part of the slowest range's seconds that uneven ranges must save."""
V_SHAPE_RANGES = 2
"""Layer ranges of a stage that is folded into a V."""


def build_unit_plan(unit: Unit, *, sizes: UnitSizes, first_rank: int, seconds: Sequence[float] | None = None) -> UnitPlan:
    """Build the unit's plan on ranks `first_rank` and up.

    Layers are cut so that the slowest range is as fast as possible. They are divided evenly without their seconds, if cutting
    gains little, or if a number of transformer layers is requested. With several ranges per stage, stage p of P holds every P-th
    from p on, as Megatron deals model chunks. seconds: of each of the unit's layers. Raises PlanError if there are more ranges
    than layers, and for virtual stages without a pipeline.
    """
    assert sizes.data_parallel_size is not None
    num_stages = sizes.pipeline_parallel_size
    num_chunks = count_virtual_stages(unit, sizes=sizes)
    try:
        ranges = split_layers(unit.layers, num_stages=num_stages * num_chunks)
    except PlanError as problem:
        raise PlanError(f"unit '{unit.name}': {_explain(problem, unit, sizes=sizes, num_chunks=num_chunks)}") from None
    if seconds is not None and sizes.layers_per_virtual_stage is None:
        # Cuts with equal slowest ranges fill pipelines differently, so even ones are kept where little is gained.
        best = partition_unit(unit, seconds, num_stages=len(ranges))
        if max(range_seconds(seconds, best)) < (1 - LEAST_GAIN) * max(range_seconds(seconds, ranges)):
            ranges = best
    held = {p: ranges[p::num_stages] for p in range(num_stages)}
    tensor, context, data = sizes.tensor_parallel_size, sizes.context_parallel_size, sizes.data_parallel_size
    plan = place_stages(held, tensor=tensor, context=context, data=data, first_rank=first_rank)
    return replace(plan, expert_parallel_size=sizes.expert_parallel_size)


def place_stages(
    held: Mapping[int, Sequence[tuple[int, int]]], *, tensor: int, context: int, data: int, first_rank: int = 0
) -> UnitPlan:
    """Give each stage of each replica its ranks, in Megatron's order tp-cp-ep-dp-pp.

    Stage p of replica d holds the ranks `first_rank + (p * data + d) * (context * tensor) + 0 .. context * tensor - 1`. held:
    position p of a stage -> its layer ranges; tensor, context, data: parallel sizes.
    """
    size = tensor * context

    def stage(position: int, replica: int) -> Stage:
        first = first_rank + (position * data + replica) * size
        return Stage(tuple(range(first, first + size)), tuple(held[position]))

    return UnitPlan(tuple(Replica(tuple(stage(each, replica) for each in held)) for replica in range(data)), tensor, context)


def fold_stages(plan: Plan) -> Plan:
    """Return the plan with stages of two ranges folded into a V (ZB-V): p of P holds p and 2 P - 1 - p instead of p and P + p."""

    def folded(replica: Replica) -> Replica:
        ranges = sorted(each for stage in replica.stages for each in stage.layer_ranges)
        pairs = zip(ranges, reversed(ranges), strict=True)
        return Replica(tuple(replace(stage, layer_ranges=pair) for stage, pair in zip(replica.stages, pairs, strict=False)))

    units = dict(plan.units)
    for name, unit in plan.units.items():
        if all(len(stage.layer_ranges) == V_SHAPE_RANGES for replica in unit.replicas for stage in replica.stages):
            units[name] = replace(unit, replicas=tuple(map(folded, unit.replicas)))
    return Plan(units)


def count_virtual_stages(unit: Unit, *, sizes: UnitSizes) -> int:
    """Return the number of layer ranges of each of the unit's stages; raises PlanError if sizes and layers do not match."""
    num_stages, num_layers, each = sizes.pipeline_parallel_size, unit.num_inner_layers, sizes.layers_per_virtual_stage
    flags = f"--{unit.name.replace('_', '-')}"
    flag, other = f"{flags}-num-layers-per-virtual-pipeline-stage", f"{flags}-virtual-pipeline-model-parallel-size"
    if each is not None and num_layers % (num_stages * each):
        fitting = [str(count) for count in range(1, num_layers + 1) if num_layers % (num_stages * count) == 0]
        advice = f"choose {' or '.join(fitting)}" if fitting else f"{num_stages} stages cannot hold equally many"
        raise PlanError(
            f"unit '{unit.name}': {flag} {each} does not divide its {num_layers} transformer layers over {num_stages} pipeline "
            f"stage{'s' * (num_stages != 1)}; {advice}, or use {other} N, which allows uneven ranges"
        )
    count = num_layers // (num_stages * each) if each is not None else sizes.virtual_pipeline_size
    if count > 1 and num_stages == 1:
        given = f"{flag} {each}" if each is not None else f"{other} {count}"
        raise PlanError(
            f"unit '{unit.name}': {given} would be ignored: with one pipeline stage there is nothing to interleave; raise "
            f"{flags}-pipeline-model-parallel-size or leave it out"
        )
    return count


def _explain(problem: PlanError, unit: Unit, *, sizes: UnitSizes, num_chunks: int) -> str:
    flags = f"--{unit.name.replace('_', '-')}"
    if unit.module is not None:
        return (
            f"a module of transformers is one piece, which cannot be cut into {sizes.pipeline_parallel_size} pipeline stages; "
            f"give it replicas instead ({flags}-data-parallel-size)"
        )
    if num_chunks == 1:
        return f"{problem} ({flags}-pipeline-model-parallel-size)"
    num_layers, num_stages = unit.num_inner_layers, sizes.pipeline_parallel_size
    most = num_layers // num_stages
    advice = f"use at most {most}" if most > 1 else "leave virtual stages out"
    return (
        f"{num_layers} transformer layers cannot be cut into {num_stages * num_chunks} layer ranges, {num_chunks} for each of "
        f"{num_stages} pipeline stages ({flags}-virtual-pipeline-model-parallel-size); {advice}, or lower "
        f"{flags}-pipeline-model-parallel-size"
    )
