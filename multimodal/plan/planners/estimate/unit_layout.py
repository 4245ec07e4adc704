"""One unit's sizes and layer ranges, and units laid out on ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from multimodal.plan.partition_layers import Range
from multimodal.plan.planners.planning_request import StageSize
from multimodal.plan.unit_grid import place_stages
from multimodal.values.errors import PlanError
from multimodal.values.model_graph import ModelGraph, Unit
from multimodal.values.plan import Plan, UnitPlan, split_layers

Groups = tuple[tuple[str, ...], ...]
"""Groups of units that share ranks."""


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


def lay_out_units(graph: ModelGraph, layouts: Mapping[str, UnitLayout], *, groups: Groups) -> Plan:
    """Give each group of units ranks of its own, the group with the largest stages (tp x cp) first.

    With sizes that divide a node, no tensor parallel group then spans two nodes. Units of one group lie on the same ranks
    (Optimus, DIP). Inside a unit the order is Megatron's (tp fastest, then cp, then dp, then pp). Raises PlanError if the units
    of a group differ in their number of ranks.
    """
    for group in groups:
        counts = {unit: layouts[unit].num_ranks for unit in group}
        if len(set(counts.values())) != 1:
            raise PlanError(f"units that share ranks must use all of them, found {counts}; change a size")
    firsts = first_ranks(layouts, groups=groups)
    return Plan({name: build_unit(layouts[name], first_rank=firsts[name]) for name in graph.unit_names})


def first_ranks(layouts: Mapping[str, UnitLayout], *, groups: Groups) -> dict[str, int]:
    """Return the first rank of each unit, as `lay_out_units` assigns them."""
    # By the ranks of a stage, so that stages fit into nodes; sizes that do not divide each other are sorted by tp.
    whole = {group: max(layouts[unit].ranks_per_stage for unit in group) for group in groups}
    tensor = {group: max(layouts[unit].tensor_parallel_size for unit in group) for group in groups}
    keys = tensor if any(larger % smaller for smaller, larger in pairwise(sorted(whole.values()))) else whole
    first_rank, firsts = 0, {}
    for group in sorted(groups, key=lambda group: -keys[group]):
        firsts.update(dict.fromkeys(group, first_rank))
        first_rank += max(layouts[unit].num_ranks for unit in group)
    return firsts


def build_unit(layout: UnitLayout, *, first_rank: int) -> UnitPlan:
    """Lay one unit out on consecutive ranks (`place_stages`)."""
    return place_stages(
        dict(enumerate(layout.stages)),
        tensor=layout.tensor_parallel_size,
        context=layout.context_parallel_size,
        data=layout.data_parallel_size,
        first_rank=first_rank,
    )
