"""Predicts the duration of a step under an assignment, for a plan and a schedule."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from multimodal.cost.cluster import Cluster
from multimodal.cost.model_costs import ModelCosts
from multimodal.cost.run_options import DEFAULT_OPTIONS, RunOptions
from multimodal.schedule.build_schedule import ScheduleCache
from multimodal.schedule.simulate import simulate_seconds
from multimodal.values.arrays.length_arrays import LengthBatch
from multimodal.values.arrays.rows import row_numbers, take_rows
from multimodal.values.assignment import Assignment
from multimodal.values.sample_lengths import SampleLengths

MOST_SIMULATED_COMPUTATIONS = 20_000
"""Forwards and backwards of a step, over all lanes, up to which it is simulated: about a tenth of a second."""


@dataclass(frozen=True)
class StepPredictor:
    """Predicts steps of one plan under one schedule; deterministic, as all ranks must choose alike."""

    schedules: ScheduleCache
    cluster: Cluster
    vocab_size: int
    options: RunOptions = DEFAULT_OPTIONS
    _first: list[ModelCosts] = field(default_factory=list, init=False, repr=False, compare=False)
    """Costs of the first step, whose results about the plan hold for all others."""

    def predict(self, assignment: Assignment, lengths: Sequence[SampleLengths]) -> "StepPrediction":
        """Predict a step of these samples."""
        return self.predict_each((assignment,), lengths)[0]

    def costs(self, assignment: Assignment, lengths: Sequence[SampleLengths]) -> ModelCosts:
        """Return the costs of a step of these samples."""
        return self.predict(assignment, lengths).costs

    def predict_each(self, assignments: Sequence[Assignment], lengths: Sequence[SampleLengths]) -> "list[StepPrediction]":
        """Predict a step of these samples under each of several assignments; their common part is computed once."""
        step = self.schedules.step(assignments[0])
        if not self._first:
            self._first.append(ModelCosts(step, lengths, self.cluster, self.vocab_size, self.options))
        batch = LengthBatch.of(lengths)
        steps = map(self.schedules.step, assignments)
        return [StepPrediction(self.schedules, self._first[0].of_batch(step, batch)) for step in steps]


@dataclass(frozen=True)
class StepPrediction:
    """One step, predicted as far as it is asked for."""

    schedules: ScheduleCache
    costs: ModelCosts

    @cached_property
    def seconds(self) -> float:
        """Seconds of the step: simulated, or where that would take long, the least it can take. Raises ScheduleError."""
        if self._num_computations > MOST_SIMULATED_COMPUTATIONS:
            return self.least_seconds
        return simulate_seconds(self.schedules.find(self.costs.step.assignment, self.costs).compiled, self.costs)

    @cached_property
    def least_seconds(self) -> float:
        """A lower bound for every schedule: the computations of the busiest lane. O(microbatches x stages)."""
        plan = self.costs.step.plan
        work_of_lane = np.zeros(len(plan.lanes))
        for unit in self.costs.step.assignment.placed:
            seconds, table = self.costs.computations.of_replicas(unit), plan.stage_tables[unit]
            by_replica = np.arange(seconds.size).reshape(seconds.shape).T.ravel()
            starts, lanes = take_rows(table.lane_starts, table.lanes, by_replica)
            np.add.at(work_of_lane, lanes, seconds.T.ravel()[row_numbers(starts)])
        return float(work_of_lane.max(initial=0.0))

    @property
    def _num_computations(self) -> int:
        step = self.costs.step
        return sum(
            2 * placed.num_microbatches * step.plan.units[unit].num_virtual_stages
            for unit, placed in step.assignment.placed.items()
        )
