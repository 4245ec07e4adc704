"""Eager 1F1B: as many warm-up forwards as memory allows before the steady phase (Entrain 4.5.3)."""

import math
from collections.abc import Mapping

from multimodal.cost.step_costs import StepCosts
from multimodal.schedule.builders.one_f_one_b import forward_floors, forward_limits
from multimodal.schedule.builders.room_ahead import build_within_memory
from multimodal.schedule.list_schedule import Policy, list_schedule
from multimodal.values.errors import ScheduleError
from multimodal.values.parts.cuts import StageKey
from multimodal.values.schedule import Schedule
from multimodal.values.shape import StepShape


def build_eager_1f1b(shape: StepShape, *, memory_factor: float = 2.0) -> Schedule:
    """Build 1F1B with forwards that run ahead, in the compute dialect.

    A stage may have `memory_factor` times as many microbatches in flight as in 1F1B (rounded down), and runs a forward whenever
    no backward is ready; before a backward it has as many in flight as 1F1B. If deferred samples make backwards late, the
    forwards of the steady phase are already done, and their slots are free. With uniform work the step is as long as with 1F1B.

    Raises ScheduleError for a factor below 1.
    """
    if not memory_factor >= 1:
        raise ScheduleError(f"eager-1f1b: memory_factor must be at least 1 (1 is 1F1B), found {memory_factor}")
    limits = forward_limits(shape)
    return _build(shape, limits, {stage: math.floor(memory_factor * limit) for stage, limit in limits.items()})


def build_eagerest_1f1b(shape: StepShape, *, costs: StepCosts) -> Schedule:
    """Build eager 1F1B with as many microbatches in flight as memory has room for, in the compute dialect.

    `costs` gives the bytes that microbatches keep and the memory of a rank. Of several depths that fit, including that of 1F1B,
    the one with the shortest step is taken (`build_within_memory`).
    """
    limits = forward_limits(shape)
    return build_within_memory(
        shape,
        limits,
        costs=costs,
        build=lambda scaled: _build(shape, limits, {stage: scaled(stage, limit) for stage, limit in limits.items()}),
    )


def _build(shape: StepShape, limits: Mapping[StageKey, int], eager: Mapping[StageKey, int]) -> Schedule:
    return list_schedule(shape, Policy(forward_limits=eager, forward_floors=forward_floors(shape.plan, limits)))
