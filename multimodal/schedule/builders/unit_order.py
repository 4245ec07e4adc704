"""The order of a unit's actions in each of its stages, from a closed form over chunks and microbatches."""

from collections.abc import Iterable
from typing import NamedTuple

from multimodal.values.action import Action, ActionKind
from multimodal.values.plan import UnitPlan


class Step(NamedTuple):
    """One action of one physical stage."""

    kind: ActionKind
    chunk: int
    """Index among the stage's layer ranges, from 0 upstream."""
    microbatch: int


def num_chunks(unit: UnitPlan) -> int:
    """Layer ranges per stage, where all stages have equally many; else 0."""
    counts = {len(stage.layer_ranges) for replica in unit.replicas for stage in replica.stages}
    return counts.pop() if len(counts) == 1 else 0


def chunk_stages(unit: UnitPlan, replica: int, stage_index: int) -> tuple[int, ...]:
    """The virtual stages that one physical stage holds, upstream first."""
    return tuple(each.index for each in unit.replicas[replica].virtual_stages if each.stage_index == stage_index)


def ordered_actions(
    steps: Iterable[Step], unit: UnitPlan, *, name: str, replica: int, stage_index: int, existing: frozenset[Action]
) -> tuple[Action, ...]:
    """Turn the steps of a physical stage into actions; what the stage does not have (frozen parts) is left out."""
    stages = chunk_stages(unit, replica, stage_index)
    actions = (Action(step.kind, name, replica, stages[step.chunk], step.microbatch) for step in steps)
    return tuple(action for action in actions if action in existing)
