"""Predicts the duration of a step under an assignment, for a plan and a schedule."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from multimodal.cost.cluster import Cluster
from multimodal.cost.model_costs import ModelCosts
from multimodal.cost.run_options import DEFAULT_OPTIONS, RunOptions
from multimodal.schedule.schedule_cache import ScheduleCache
from multimodal.schedule.simulate import simulate_seconds
from multimodal.values.assignment import Assignment
from multimodal.values.backward_need import stage_backward_need
from multimodal.values.sample_lengths import SampleLengths
from multimodal.values.schedule import ActionKind

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
        """Predict a step of these samples under each of several assignments; what they have in common is computed once."""
        graph, plan = self.schedules.graph, self.schedules.plan
        first = ModelCosts(graph, plan, assignments[0], lengths, self.cluster, self.vocab_size, self.options)
        return [StepPrediction(self.schedules, first.of_assignment(assignment)) for assignment in assignments]


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
        return simulate_seconds(self.schedules.structure(self.costs.assignment), self.costs)

    @cached_property
    def least_seconds(self) -> float:
        """A lower bound for every schedule: the computations of the busiest lane. O(microbatches x stages)."""
        graph, plan = self.costs.graph, self.costs.plan
        work_of_lane: dict[int, float] = defaultdict(float)
        for unit, replicas in self.costs.assignment.units.items():
            for replica in range(len(replicas)):
                for stage in range(plan.units[unit].num_virtual_stages):
                    has_backward = stage_backward_need(graph, plan, unit, replica, stage).has_backward
                    kinds = (ActionKind.FORWARD, *((ActionKind.BACKWARD,) if has_backward else ()))
                    work = self.costs.stage_seconds(unit, replica, stage, kinds=kinds)
                    for lane in plan.lanes_of_stage(unit, replica, stage):
                        work_of_lane[lane] += work
        return max(work_of_lane.values(), default=0.0)

    @property
    def _num_computations(self) -> int:
        plan = self.costs.plan
        return sum(
            2 * sum(map(len, replicas)) * plan.units[unit].num_virtual_stages
            for unit, replicas in self.costs.assignment.units.items()
        )
