"""Durations of actions on the clock of builders and passes: small whole numbers, the same for every microbatch."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from multimodal.cost.step_costs import ActionCosts, ComputeCost
from multimodal.values.action import ACTION_TABLE, Action, ActionKind, Resource, SegmentRange
from multimodal.values.arrays.rows import Integers
from multimodal.values.shape import StepShape
from multimodal.values.work.step_work import KIND_NUMBERS, KINDS, step_work


def unit_cost(action: Action, shape: StepShape) -> int:
    """Return an action's duration in clock ticks: forward 1, backward 2 (1 for each half), messages 0, reduction 1.

    A range of segments takes 1, like a whole forward: no computation is shorter.

    A backward has two products per weight matrix, one for the input's gradient and one for the weight's. A stage that only passes
    a gradient on, or trains only adapters, computes one of them; a stage that trains little more than its projector computes
    hardly any, and counts as 1, the minimum.
    """
    if ACTION_TABLE[action.kind].resource in (Resource.SEND, Resource.RECEIVE):
        return 0
    if action.kind is not ActionKind.BACKWARD or isinstance(action.covers, SegmentRange):
        return 1
    layers = shape.plan.virtual_stage(*action[1:4]).layers
    unit = shape.graph.unit(action.unit)
    sends = shape.backward_need(*action[1:4]).sends_gradient
    num_passing = len(layers) if sends else len(layers) - 1 - [unit.is_trainable(layer) for layer in layers].index(True)
    num_weight_gradients = sum(unit.trains_weights(layer) for layer in layers)
    return max(1, round((num_passing + num_weight_gradients) / len(layers)))


@lru_cache(maxsize=32)
def unit_costs(shape: StepShape) -> Integers:
    """Return the `unit_cost` of every computation and collective, [num_computed]."""
    work = step_work(shape)
    costs = np.ones((len(work.stages), len(KINDS)), np.int64)
    known: dict[tuple[str, int, range], int] = {}
    for unit, pieces in work.pieces.units.items():
        for stage, replica in np.argwhere(pieces.has_backward).tolist():
            like = unit, stage, shape.plan.virtual_stage(unit, replica, stage).layers
            if like not in known:
                known[like] = unit_cost(Action(ActionKind.BACKWARD, unit, replica, stage, 0), shape)
            number = pieces.first_stage + stage * pieces.has_backward.shape[1] + replica
            costs[number, KIND_NUMBERS[ActionKind.BACKWARD]] = known[like]
    of_pieces: Integers = costs[work.computed_stages, work.kinds]
    of_pieces[work.pieces.is_range] = 1
    return of_pieces


@dataclass(frozen=True)
class UnitCosts(ActionCosts):
    """`StepCosts` in which every action takes its `unit_cost` in seconds; sizes are 0, and messages take no time."""

    shape: StepShape

    def compute(self, action: Action) -> ComputeCost:
        """Return the cost of a computation."""
        return ComputeCost(unit_cost(action, self.shape))

    def collective_seconds(self, action: Action) -> float:
        """Return the seconds of a collective."""
        return unit_cost(action, self.shape)
