"""The sizes and layer ranges of one unit before ranks are dealt, and how units are laid out on ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from multimodal.plan.planners.partition_layers import Range
from multimodal.values.errors import PlanError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan, validate_plan

Groups = tuple[tuple[str, ...], ...]
"""Which units share ranks."""


@dataclass(frozen=True)
class UnitLayout:
    """One unit's parallelism."""

    tensor_parallel_size: int
    data_parallel_size: int
    stages: tuple[tuple[Range, ...], ...]
    """Per pipeline stage its layer ranges; several when the stage is virtual."""
    context_parallel_size: int = 1

    @property
    def ranks_per_stage(self) -> int:
        """Ranks of one stage of one replica: tp x cp."""
        return self.tensor_parallel_size * self.context_parallel_size

    @property
    def weight_copies(self) -> int:
        """Ranks that hold the same weights: of all replicas and context parallel shares."""
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
    """Deal consecutive ranges to stages in turn, as interleaved 1F1B wants them."""
    return tuple(tuple(ranges[stage::num_stages]) for stage in range(num_stages))


def lay_out_units(
    graph: ModelGraph, layouts: Mapping[str, UnitLayout], *, groups: Groups, idle: frozenset[str] = frozenset()
) -> Plan:
    """Give each group of units ranks of its own, the group with the largest stages (tp x cp) first.

    Sizes that divide a node then never let a tensor parallel group span two nodes. Units of one group lie over the same ranks
    (Optimus, DIP). Inside a unit the order is Megatron's (tp fastest, then cp, then dp, then pp).
    Raises PlanError when the units of a group differ in their number of ranks, or the plan does not fit the model.
    """
    first_rank, units = 0, {}
    for group in _in_order(groups, layouts):
        counts = {unit: layouts[unit].num_ranks for unit in group if unit not in idle}
        if len(set(counts.values())) != 1:
            raise PlanError(f"units that share ranks must use all of them, found {counts}; change a size")
        units.update({unit: build_unit(layouts[unit], first_rank=first_rank) for unit in group})
        first_rank += max(counts.values())
    return _checked(graph, units)


def lay_out_grid(
    graph: ModelGraph, stages: Mapping[str, Mapping[int, Sequence[Range]]], *, num_stages: int, layout: UnitLayout
) -> Plan:
    """Lay all units over one grid of `num_stages` stages; layout: the tp, cp and dp of the grid.

    stages: unit -> stage of the grid -> the unit's layer ranges there, for the stages that hold any of it.
    """
    size, replicas = layout.ranks_per_stage, layout.data_parallel_size

    def stage(index: int, replica: int, ranges: Sequence[Range]) -> Stage:
        first = (index * replicas + replica) * size
        return Stage(tuple(range(first, first + size)), tuple(ranges))

    assert all(0 <= index < num_stages for held in stages.values() for index in held)
    units = {
        name: UnitPlan(
            tuple(Replica(tuple(stage(index, replica, held[index]) for index in held)) for replica in range(replicas)),
            layout.tensor_parallel_size,
            layout.context_parallel_size,
        )
        for name, held in stages.items()
    }
    return _checked(graph, units)


def build_unit(layout: UnitLayout, *, first_rank: int) -> UnitPlan:
    """Lay one unit out: stage p of replica d begins at `first_rank + (p * dp + d) * tp * cp`."""
    size, replicas = layout.ranks_per_stage, layout.data_parallel_size

    def stage(index: int, replica: int) -> Stage:
        first = first_rank + (index * replicas + replica) * size
        return Stage(tuple(range(first, first + size)), layout.stages[index])

    return UnitPlan(
        tuple(Replica(tuple(stage(index, replica) for index in range(len(layout.stages)))) for replica in range(replicas)),
        layout.tensor_parallel_size,
        layout.context_parallel_size,
    )


def _in_order(groups: Groups, layouts: Mapping[str, UnitLayout]) -> list[tuple[str, ...]]:
    """Sort by the ranks of a stage, so that these are neighbours in a node, too; where sizes do not divide each other, by tp."""
    whole = {group: max(layouts[unit].ranks_per_stage for unit in group) for group in groups}
    tensor = {group: max(layouts[unit].tensor_parallel_size for unit in group) for group in groups}
    sizes = sorted(whole.values(), reverse=True)
    keys = tensor if any(larger % smaller for larger, smaller in pairwise(sizes)) else whole
    return sorted(groups, key=lambda group: -keys[group])


def _checked(graph: ModelGraph, units: Mapping[str, UnitPlan]) -> Plan:
    plan = Plan({name: units[name] for name in graph.unit_names})
    validate_plan(plan, graph=graph, world_size=plan.num_ranks)
    return plan
