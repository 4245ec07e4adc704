"""A cost table as it looks where every stage of the LLM holds a copy of all encoders."""

from collections.abc import Sequence
from dataclasses import replace

from multimodal.cost.cost_table import CostTable, StageSeconds
from multimodal.cost.table_model import build_table_step
from multimodal.values.assignment import Assignment
from multimodal.values.plan import Plan, Replica, UnitPlan
from multimodal.values.step_graph import StepGraph


def replicate_encoders(table: CostTable) -> tuple[CostTable, StepGraph]:
    """Return the table with every encoder in one stage, and a model in which each rank of the LLM has a copy of it.

    A copy takes what all stages of its encoder took together, forward and backward. The ranks that encoders had are gone; the
    others close up. The copy beside the LLM's first stage has all microbatches, the others none of their own.

    Raises ConfigError as `build_table_step`.
    """
    encoders = [unit.name for unit in build_table_step(table).graph.encoders]
    kept = sorted({rank for name, unit in table.units.items() if name not in encoders for rank in unit.ranks})
    number = {rank: index for index, rank in enumerate(kept)}
    units = {
        name: replace(unit, stages=(_together(unit.stages),), ranks=(len(kept) + encoders.index(name),))
        if name in encoders
        else replace(unit, ranks=tuple(number[rank] for rank in unit.ranks))
        for name, unit in table.units.items()
    }
    fused = CostTable(table.num_microbatches, table.send_seconds, units)
    step = build_table_step(fused)
    graph, plan, assignment = step.graph, step.plan, step.assignment
    stages = plan.units[graph.backbone.name].replicas[0].stages
    plans = {name: _copies(plan.units[name], [stage.ranks for stage in stages]) for name in encoders}
    placed = {name: (assignment.units[name][0], *[()] * (len(stages) - 1)) for name in encoders}
    return fused, StepGraph(graph, Plan({**plan.units, **plans}), Assignment({**assignment.units, **placed}))


def _together(stages: Sequence[StageSeconds]) -> StageSeconds:
    """One stage that does the work of several."""

    def total(columns: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
        return tuple(map(sum, zip(*columns, strict=True)))

    return StageSeconds(
        total([stage.forward for stage in stages]),
        total([stage.input_gradient for stage in stages]),
        total([stage.weight_gradient for stage in stages]),
        has_backward=any(stage.has_backward for stage in stages),
    )


def _copies(unit: UnitPlan, ranks: Sequence[tuple[int, ...]]) -> UnitPlan:
    """A replica of a unit of one stage on each of these groups of ranks."""
    (stage,) = unit.replicas[0].stages
    return replace(unit, replicas=tuple(Replica((replace(stage, ranks=each),)) for each in ranks))
