"""The share of encoder work that a schedule puts into bubbles of the LLM's pipeline (Optimus 5.3)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from multimodal.cost.step_costs import PieceCosts, StepCosts
from multimodal.schedule.build_schedule import build_schedule
from multimodal.schedule.builders import Builder
from multimodal.schedule.list_schedule import place_reductions
from multimodal.schedule.passes import Pass
from multimodal.schedule.simulate import Simulation, simulate_schedule
from multimodal.values.action import ActionKind, Resource
from multimodal.values.arrays.rows import Bools, Integers
from multimodal.values.schedule import Schedule
from multimodal.values.shape import StepShape
from multimodal.values.work.step_work import KIND_NUMBERS, RESOURCE_NUMBERS, StepWork, step_work

_COMPUTE = RESOURCE_NUMBERS[Resource.COMPUTE]


class Filling(NamedTuple):
    """Shares of the encoders' time that lie in bubbles: their seconds in all lanes, less the time that they add to the step."""

    eff_coarse: float
    """With all encoder forwards before the LLM's work, and all encoder backwards after it."""
    eff_fine: float
    """In the order of the schedule."""
    alone: Simulation
    """The step if encoders took no time."""
    filled: Simulation
    """The step in the order of the schedule."""


def measure_filling(builder: Builder, shape: StepShape, costs: StepCosts, *, passes: Sequence[Pass] = ()) -> Filling | None:
    """Simulate a step with encoders that take no time, with encoders around the LLM's work, and as `builder` orders it.

    None if encoders compute nothing. Raises ScheduleError as the builder does.
    """
    ordered = builder(shape)
    coarse = order_coarsely(ordered)
    encoders = frozenset(unit.name for unit in shape.graph.encoders)

    def simulate(schedule: Schedule, costs: StepCosts) -> Simulation:
        return simulate_schedule(build_schedule(lambda _: schedule, shape, passes=passes, is_checked=False), costs)

    alone = simulate(coarse, _WithoutEncoders(costs, encoders))
    filled = simulate(ordered, costs)
    work, pieces = step_work(filled.compiled.schedule.shape), filled.compiled.computed.pieces
    of_pieces = filled.compiled.computed_seconds * np.diff(work.lanes_of(pieces)[0])
    encoding = float(of_pieces[of_units(work, pieces, encoders)].sum())
    if not encoding:
        return None

    def share(found: Simulation) -> float:
        added = found.num_lanes * (found.iteration_seconds - alone.iteration_seconds)
        return min(1.0, max(0.0, 1 - added / encoding))

    return Filling(share(simulate(coarse, costs)), share(filled), alone, filled)


def order_coarsely(schedule: Schedule) -> Schedule:
    """Return a schedule of the compute dialect with the encoders' forwards first in every lane, and their backwards last."""
    work, pieces = schedule.work, schedule.pieces
    encodes = of_units(work, pieces, frozenset(unit.name for unit in schedule.shape.graph.encoders))
    kinds = work.kinds[pieces]
    phases = np.where(encodes, np.where(kinds == KIND_NUMBERS[ActionKind.FORWARD], 0, 2), 1)
    kept = np.flatnonzero(kinds != KIND_NUMBERS[ActionKind.REDUCE_GRADIENTS])
    lanes = schedule.lane_of_slot[kept]
    order = kept[np.lexsort((kept, phases[kept], lanes))]
    rows = np.split(pieces[order], np.cumsum(np.bincount(lanes, minlength=schedule.num_lanes))[:-1])
    return place_reductions(Schedule.of_numbers(schedule.shape, rows))


def of_units(work: StepWork, pieces: Integers, units: frozenset[str]) -> Bools:
    """Return which of these computations belong to the units."""
    return np.array([unit in units for unit, _, _ in work.stages], bool)[work.computed_stages[pieces]]


@dataclass(frozen=True)
class _WithoutEncoders:
    """The costs of a step whose encoders take no time."""

    costs: StepCosts
    encoders: frozenset[str]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.costs, name)

    def of_pieces(self, work: StepWork, pieces: Integers) -> PieceCosts:
        """Costs of pieces of work."""
        found = self.costs.of_pieces(work, pieces)
        is_computed = pieces < work.num_computed
        is_free = np.zeros(len(pieces), bool)
        computed = pieces[is_computed]
        is_free[is_computed] = of_units(work, computed, self.encoders) & (work.resources[computed] == _COMPUTE)
        for seconds in (found.seconds, found.tensor_parallel_seconds):
            seconds[is_free] = 0.0
        return found
