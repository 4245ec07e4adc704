"""Predicts the duration of a step under an assignment, for a plan and a schedule."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from multimodal.cost.cluster import Cluster
from multimodal.cost.model_costs import ModelCosts
from multimodal.cost.run_options import DEFAULT_OPTIONS, RunOptions
from multimodal.schedule.build_schedule import ScheduleCache
from multimodal.schedule.simulate import simulate_seconds
from multimodal.values.action import ActionKind
from multimodal.values.assignment import Assignment
from multimodal.values.sample_lengths import SampleLengths

MOST_SIMULATED_COMPUTATIONS = 20_000
"""Forwards and backwards of a step, over all lanes, up to which it is simulated: about a second."""


@dataclass(frozen=True)
class StepPredictor:
    """Predicts steps of one plan under one schedule; deterministic, as all ranks must choose alike."""

    schedules: ScheduleCache
    cluster: Cluster
    vocab_size: int
    options: RunOptions = DEFAULT_OPTIONS

    def predict(self, assignment: Assignment, lengths: Sequence[SampleLengths]) -> "StepPrediction":
        """Predict a step of these samples."""
        return self.predict_each((assignment,), lengths)[0]

    def predict_each(self, assignments: Sequence[Assignment], lengths: Sequence[SampleLengths]) -> "list[StepPrediction]":
        """Predict a step of these samples under each of several assignments; their common part is computed once."""
        first = ModelCosts(self.schedules.step(assignments[0]), lengths, self.cluster, self.vocab_size, self.options)
        return [StepPrediction(self.schedules, first.of_step(self.schedules.step(assignment))) for assignment in assignments]


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
        return simulate_seconds(self.schedules.compiled(self.costs.step.assignment), self.costs)

    @cached_property
    def least_seconds(self) -> float:
        """A lower bound for every schedule: the computations of the busiest lane. O(microbatches x stages)."""
        step = self.costs.step
        work_of_lane: dict[int, float] = defaultdict(float)
        for unit, replicas in step.assignment.units.items():
            for replica in range(len(replicas)):
                for stage in range(step.plan.units[unit].num_virtual_stages):
                    has_backward = step.backward_need(unit, replica, stage).has_backward
                    kinds = (ActionKind.FORWARD, *((ActionKind.BACKWARD,) if has_backward else ()))
                    work = self.costs.stage_seconds(unit, replica, stage, kinds=kinds)
                    for lane in step.lanes_of(unit, replica, stage):
                        work_of_lane[lane] += work
        return max(work_of_lane.values(), default=0.0)

    @property
    def _num_computations(self) -> int:
        step = self.costs.step
        return sum(
            2 * sum(map(len, replicas)) * step.plan.units[unit].num_virtual_stages
            for unit, replicas in step.assignment.units.items()
        )
