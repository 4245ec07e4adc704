"""Predicts the duration of a step under an assignment, for a plan and a schedule."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from multimodal.balance.encoder_pipelines import deal_by_idle_time, lane_seconds
from multimodal.balance.placement import even_out_replicas
from multimodal.cost.cluster import Cluster
from multimodal.cost.model_costs import ModelCosts
from multimodal.cost.pieces.computation_seconds import ComputationSeconds
from multimodal.cost.run_options import DEFAULT_OPTIONS, RunOptions
from multimodal.cost.seconds.layer_profile import LayerProfile
from multimodal.schedule.build_schedule import ScheduleCache
from multimodal.schedule.simulate import simulate_seconds
from multimodal.values.assignment import Assignment
from multimodal.values.length_arrays import LengthBatch
from multimodal.values.sample_lengths import SampleLengths

MOST_SIMULATED_COMPUTATIONS = 20_000
"""Most forwards and backwards, over all lanes, of a step that is simulated: about a tenth of a second."""
ORDERING = 10
"""Factor by which this limit is lower for schedules that are ordered anew for every step, by durations."""


@dataclass(frozen=True)
class StepPredictor:
    """Predicts steps of one plan under one schedule; deterministic, as all ranks must choose alike."""

    schedules: ScheduleCache
    cluster: Cluster
    vocab_size: int
    options: RunOptions = DEFAULT_OPTIONS
    profile: LayerProfile | None = None
    """Measured layers, used instead of those that follow from the cluster's description."""
    margin: float = 0.0
    """Share of a step that must be gained over the data's order: what exchanging samples was measured to lose."""
    _first: list[ModelCosts] = field(default_factory=list, init=False, repr=False, compare=False)
    """Costs of the first step; its cached values about the plan are valid for all steps."""
    _latest: "list[StepPrediction]" = field(default_factory=list, init=False, repr=False, compare=False)
    """The predictions of the latest samples: balancers that try assignments may try the same ones."""

    def predict(self, assignment: Assignment, lengths: Sequence[SampleLengths]) -> "StepPrediction":
        """Predict a step of these samples."""
        return self.predict_each((assignment,), lengths)[0]

    def costs(self, assignment: Assignment, lengths: Sequence[SampleLengths]) -> ModelCosts:
        """Return the costs of a step of these samples."""
        return self.predict(assignment, lengths).costs

    def predict_each(self, assignments: Sequence[Assignment], lengths: Sequence[SampleLengths]) -> "list[StepPrediction]":
        """Predict a step of these samples under each of several assignments; common parts are computed once."""
        batch = LengthBatch.of(lengths)
        if self._latest and self._latest[0].costs.lengths is not batch:
            self._latest.clear()
        known = [each.assignment for each in self._latest]
        self._latest.extend(self._predict_new([each for each in assignments if each not in known], batch))
        return [next(each for each in self._latest if each.assignment == assignment) for assignment in assignments]

    def _predict_new(self, assignments: Sequence[Assignment], batch: LengthBatch) -> "list[StepPrediction]":
        evened = [even_out_replicas(each, plan=self.schedules.plan) for each in assignments]
        steps = [(self.schedules.shape(each), each, batch) for each in evened]
        if steps and not self._first:
            self._first.append(ModelCosts(*steps[0], self.cluster, self.vocab_size, self.options, self.profile))
        costs = [self._first[0].of_batch(*step) for step in steps]
        ComputationSeconds.compute_ahead([each.computations for each in costs])
        return [StepPrediction(self.schedules, *each) for each in zip(costs, assignments, strict=True)]


@dataclass(frozen=True)
class StepPrediction:
    """The prediction of one step, computed on demand."""

    schedules: ScheduleCache
    costs: ModelCosts
    """Costs of the assignment as it is executed, with equally many microbatches in replicas that share experts."""
    assignment: Assignment

    @cached_property
    def seconds(self) -> float:
        """Seconds of the step: simulated, or the lower bound if simulating takes long. Raises ScheduleError."""
        if not self.is_simulated:
            return self.least_seconds
        return simulate_seconds(self.schedules.find(self.costs.shape, self.costs).compiled, self.costs)

    @cached_property
    def least_seconds(self) -> float:
        """A lower bound for every schedule: the computations of the busiest lane. O(microbatches x stages)."""
        plan, work_of_lane = self.costs.shape.plan, np.zeros(len(self.costs.shape.plan.lanes))
        for unit, placed in self.costs.assignment.placed.items():
            seconds, _ = self.costs.computations.of_both(unit)
            work_of_lane += lane_seconds(plan, unit, seconds, placed.replica_of_microbatch)
        return float(work_of_lane.max(initial=0.0))

    @property
    def dealt_by_idle_time(self) -> tuple[Assignment, ...]:
        """The same microbatches with the encoders' dealt by the idle time of their ranks, in both ways of `deal_by_idle_time`."""
        fills = self.schedules.builder.runs_segments and not self.costs.options.hides_waits
        dealt = (deal_by_idle_time(self.costs, fills_waits=fills, largest_first=each) for each in (False, True))
        own = {name: self.assignment.placed[name] for name in self.schedules.plan.units_with_shared_experts}
        return tuple(Assignment.of_arrays({**each.placed, **own}) if own else each for each in dealt if each is not None)

    @property
    def is_simulated(self) -> bool:
        """True if the step is not too large to be simulated."""
        num_computations = sum(
            2 * placed.num_microbatches * self.schedules.plan.units[unit].num_virtual_stages
            for unit, placed in self.costs.assignment.placed.items()
        )
        return num_computations * (ORDERING if self.schedules.needs_costs else 1) <= MOST_SIMULATED_COMPUTATIONS
