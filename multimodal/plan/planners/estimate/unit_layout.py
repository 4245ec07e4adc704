"""One unit's sizes and layer ranges."""

from collections.abc import Sequence
from dataclasses import dataclass

from multimodal.plan.partition_layers import Range
from multimodal.plan.planners.planning_request import StageSize
from multimodal.plan.unit_grid import place_stages
from multimodal.values.model_graph import Unit
from multimodal.values.plan import UnitPlan, split_layers


@dataclass(frozen=True)
class UnitLayout:
    """One unit's parallelism."""

    tensor_parallel_size: int
    data_parallel_size: int
    stages: tuple[tuple[Range, ...], ...]
    """The layer ranges of each pipeline stage; several for virtual stages."""
    context_parallel_size: int = 1

    @property
    def stage_size(self) -> StageSize:
        """Return the sizes by which ranks share a stage."""
        return StageSize(self.tensor_parallel_size, self.context_parallel_size)

    @property
    def ranks_per_stage(self) -> int:
        """Ranks of one stage of one replica: tp x cp."""
        return self.tensor_parallel_size * self.context_parallel_size

    @property
    def weight_copies(self) -> int:
        """Ranks that hold the same weights, over all replicas and context parallel ranks."""
        return self.data_parallel_size * self.context_parallel_size

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
        return self.ranks_per_stage * self.data_parallel_size * self.pipeline_parallel_size


def deal_ranges(ranges: Sequence[Range], *, num_stages: int) -> tuple[tuple[Range, ...], ...]:
    """Deal consecutive ranges to stages in turn, as interleaved 1F1B requires."""
    return tuple(tuple(ranges[stage::num_stages]) for stage in range(num_stages))


def even_layout(unit: Unit, tensor: int, data: int, num_stages: int, virtual_stages: int = 1, *, context: int = 1) -> UnitLayout:
    """Cut a unit's layers evenly into stages; virtual stages are dealt in turn."""
    ranges = split_layers(unit.layers, num_stages=num_stages * virtual_stages)
    return UnitLayout(tensor, data, deal_ranges(ranges, num_stages=num_stages), context)


def build_unit(layout: UnitLayout, *, first_rank: int) -> UnitPlan:
    """Lay one unit out on consecutive ranks (`place_stages`)."""
    return place_stages(
        dict(enumerate(layout.stages)),
        tensor=layout.tensor_parallel_size,
        context=layout.context_parallel_size,
        data=layout.data_parallel_size,
        first_rank=first_rank,
    )
