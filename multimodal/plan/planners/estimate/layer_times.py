"""Seconds of every layer of a unit for a microbatch of average samples, which planners add up over stages."""

from collections.abc import Sequence
from typing import NamedTuple

from multimodal.cost.memoize import memoized
from multimodal.cost.unit_load import UnitLoad
from multimodal.plan.partition_layers import Range, partition_unit, range_seconds
from multimodal.plan.planners.estimate.unit_layout import UnitLayout, deal_ranges
from multimodal.plan.planners.planning_request import PlanningRequest, StageSize
from multimodal.values.model_graph import Unit
from multimodal.values.plan import UnitPlan


class LayerTimes(NamedTuple):
    """Seconds per layer of a unit, for one microbatch."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]

    @property
    def total(self) -> tuple[float, ...]:
        """Seconds of forward and backward together: a microbatch's time in a stage of a full pipeline."""
        return tuple(map(sum, zip(self.forward, self.backward, strict=True)))


@memoized
def layer_times(request: PlanningRequest, unit: str, size: StageSize) -> LayerTimes:
    """Return the seconds of each layer for a microbatch of average samples on a stage's ranks from a node's first on."""
    kinds = kind_seconds(request, unit, request.loads.of_average(unit, request.default_micro_batch_size), size)
    if not request.is_frozen_aware:
        kinds = {kind: (forward, 2 * forward) for kind, (forward, _) in kinds.items()}
    return LayerTimes(*zip(*(kinds[kind] for kind in request.graph.unit(unit).layers), strict=True))


def kind_seconds(request: PlanningRequest, unit: str, load: UnitLoad, size: StageSize) -> dict[str, tuple[float, float]]:
    """Return kind of layer -> seconds of its forward and backward; layers of one kind in a unit are alike."""
    seconds = {}
    num_ranks = size.tensor * size.context
    for kind in dict.fromkeys(request.graph.unit(unit).layers):
        one = request.layer_costs.seconds(
            unit,
            kind,
            load,
            tensor_parallel_size=size.tensor,
            context_parallel_size=size.context,
            recompute=request.recompute,
            expert_ranks=tuple(range(0, num_ranks * request.experts_of(unit), num_ranks)),
        )
        seconds[kind] = one.forward, one.backward(kind, request.backward_need(unit, kind))
    return seconds


def unit_seconds(request: PlanningRequest, unit: str, load: UnitLoad, size: StageSize) -> float:
    """Return the seconds of a load in all layers of a unit, forward and backward."""
    layers = request.graph.unit(unit).layers
    return sum(layers.count(kind) * sum(seconds) for kind, seconds in kind_seconds(request, unit, load, size).items())


def stage_times(request: PlanningRequest, unit: str, size: StageSize, stages: Sequence[Sequence[Range]]) -> tuple[float, ...]:
    """Return the seconds of each stage per microbatch, forward and backward; stages: layer ranges of each."""
    total = layer_times(request, unit, size).total
    return tuple(sum(range_seconds(total, ranges)) for ranges in stages)


def unit_plan_times(request: PlanningRequest, name: str, unit: UnitPlan) -> tuple[float, ...]:
    """Return the seconds of each stage of a unit's first replica per microbatch, forward and backward."""
    size = StageSize(unit.tensor_parallel_size, unit.context_parallel_size)
    return stage_times(request, name, size, [stage.layer_ranges for stage in unit.replicas[0].stages])


def balanced_layout(
    request: PlanningRequest, unit: Unit, size: StageSize, *, data: int, num_stages: int, virtual_stages: int = 1
) -> UnitLayout:
    """Cut a unit's layers by their times, so that the slowest range is as fast as possible; virtual stages are dealt in turn."""
    ranges = partition_unit(unit, layer_times(request, unit.name, size).total, num_stages=num_stages * virtual_stages)
    return UnitLayout(size.tensor, data, deal_ranges(ranges, num_stages=num_stages), size.context)
