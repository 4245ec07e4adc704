"""One unit's sizes and layer ranges, and the seconds of its layers and stages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from multimodal.cost.memoize import memoized
from multimodal.cost.seconds.layer_costs import Sharing
from multimodal.cost.unit_load import UnitLoad
from multimodal.plan.partition_layers import Range, partition_unit, range_seconds
from multimodal.plan.planners.planning_request import PlanningRequest, StageSize
from multimodal.plan.plans_of_sizes import place_stages
from multimodal.values.model_graph import Unit
from multimodal.values.plan import UnitPlan, split_layers


@dataclass(frozen=True)
class UnitLayout:
    """One unit's parallelism."""

    size: StageSize
    data_parallel_size: int
    stages: tuple[tuple[Range, ...], ...]
    """The layer ranges of each pipeline stage; several for virtual stages."""

    @property
    def weight_copies(self) -> int:
        """Ranks that hold the same weights, over all replicas and context parallel ranks."""
        return self.data_parallel_size * self.size.context

    @property
    def pipeline_parallel_size(self) -> int:
        """Number of stages."""
        return len(self.stages)

    @property
    def virtual_stages(self) -> int:
        """Most layer ranges that a stage holds."""
        return max(map(len, self.stages))

    @property
    def num_ranks(self) -> int:
        """Ranks of all replicas."""
        return self.size.num_ranks * self.data_parallel_size * self.pipeline_parallel_size


def deal_ranges(ranges: Sequence[Range], *, num_stages: int) -> tuple[tuple[Range, ...], ...]:
    """Deal consecutive ranges to stages in turn, as interleaved 1F1B requires."""
    return tuple(tuple(ranges[stage::num_stages]) for stage in range(num_stages))


def even_layout(unit: Unit, size: StageSize, data: int, num_stages: int, virtual_stages: int = 1) -> UnitLayout:
    """Cut a unit's layers evenly into stages; virtual stages are dealt in turn."""
    ranges = split_layers(unit.layers, num_stages=num_stages * virtual_stages)
    return UnitLayout(size, data, deal_ranges(ranges, num_stages=num_stages))


def build_unit(layout: UnitLayout, *, first_rank: int) -> UnitPlan:
    """Lay one unit out on consecutive ranks (`place_stages`)."""
    held, sizes = dict(enumerate(layout.stages)), layout.size._asdict()
    return place_stages(held, **sizes, data=layout.data_parallel_size, first_rank=first_rank)


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
    seconds, expert_ranks = {}, tuple(range(0, size.num_ranks * request.experts_of(unit), size.num_ranks))
    sharing = Sharing(*size, request.recompute, expert_ranks=expert_ranks)
    for kind in dict.fromkeys(request.graph.unit(unit).layers):
        one = request.layer_costs.seconds(unit, kind, load, sharing)
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
    return UnitLayout(size, data, deal_ranges(ranges, num_stages=num_stages))
