"""Predicts the duration of a step under an assignment, and looks for a clearly better balancer or schedule."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from multimodal.balance import BALANCERS, placements_of
from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.encoder_pipelines import deal_by_idle_time, lane_seconds
from multimodal.balance.placement import as_computed, even_out_replicas
from multimodal.cost.cluster import Cluster
from multimodal.cost.model_costs import ModelCosts
from multimodal.cost.pieces.computation_seconds import ComputationSeconds
from multimodal.cost.run_options import DEFAULT_OPTIONS, RunOptions
from multimodal.cost.seconds.layer_profile import LayerProfile
from multimodal.schedule.build_schedule import ScheduleCache
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.simulate import simulate_seconds
from multimodal.values.assignment import Assignment
from multimodal.values.errors import BraidError
from multimodal.values.sample_lengths import LengthBatch, SampleLengths

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
    """Share of a step that must be gained over the data's order: what deciding and exchanging cost, and predictions are off."""
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
        new = [each for each in assignments if each not in known]
        evened = [even_out_replicas(each, plan=self.schedules.plan) for each in new]
        steps = [(self.schedules.shape(each), each, batch) for each in evened]
        if steps and not self._first:
            self._first.append(ModelCosts(*steps[0], self.cluster, self.vocab_size, self.options, self.profile))
        costs = [self._first[0].of_batch(*step) for step in steps]
        ComputationSeconds.compute_ahead([each.computations for each in costs])
        self._latest.extend(StepPrediction(self.schedules, *each) for each in zip(costs, new, strict=True))
        return [next(each for each in self._latest if each.assignment == assignment) for assignment in assignments]


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
        return tuple(Assignment({**each.placed, **own}) if own else each for each in dealt if each is not None)

    @property
    def is_simulated(self) -> bool:
        """True if the step is not too large to be simulated."""
        num_computations = sum(
            2 * placed.num_microbatches * self.schedules.plan.units[unit].num_virtual_stages
            for unit, placed in self.costs.assignment.placed.items()
        )
        return num_computations * (ORDERING if self.schedules.builder.needs_costs else 1) <= MOST_SIMULATED_COMPUTATIONS


CLEARLY = 1.2
"""Predictions that differ by a smaller factor are inconclusive."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A balancer and a schedule by name."""

    balance: str
    schedule: str
    seconds: float = math.inf
    keeps_more: bool = False
    """True if the schedule keeps more activations than the chosen one."""


def find_better_pair(
    lengths: Sequence[SampleLengths], *, balance: str, schedule: str, predictor: StepPredictor, options: BalanceOptions
) -> tuple[Pair, Pair] | None:
    """Return the chosen pair and a clearly better one that differs in its balancer or its schedule; None if there is none.

    That is the pair with the shortest step among those that keep no more activations, or else among those that do. There is none
    for `auto`, nor for steps that are not simulated (more than `MOST_SIMULATED_COMPUTATIONS`); and only pairs whose busiest lane
    has clearly less work are simulated. predictor: of the run's plan and schedule.
    """
    if BALANCERS[balance].needs_costs:
        return None
    prediction = _predict(lengths, Pair(balance, schedule), predictor=predictor, options=options)
    if prediction is None or not prediction.is_simulated:
        return None
    chosen = Pair(balance, schedule, prediction.seconds)
    most = chosen.seconds / CLEARLY

    def predicted(pair: Pair) -> Pair:
        return replace(pair, seconds=_seconds(_predict(lengths, pair, predictor=predictor, options=options), most))

    others = list(_alternatives(chosen, predictor))
    for keeps_more in (False, True):
        pairs = (predicted(pair) for pair in others if pair.keeps_more is keeps_more)
        better = min(pairs, key=lambda pair: pair.seconds, default=chosen)
        if better.seconds < most:
            return chosen, better
    return None


def _alternatives(chosen: Pair, predictor: StepPredictor) -> Iterator[Pair]:
    """Yield the balancers that `auto` would try, those for such plans first, and the schedules that plan and layers allow."""
    graph, plan = predictor.schedules.graph, predictor.schedules.plan
    placements, given = placements_of(tuple(plan.units.values())), BUILDERS[chosen.schedule]
    for name, balancer in sorted(BALANCERS.items(), key=lambda entry: entry[1].tried_first_on.isdisjoint(placements)):
        if name != chosen.balance and balancer.suits(placements):
            yield Pair(name, chosen.schedule)
    has_virtual_stages = any(unit.has_virtual_stages for unit in plan.units.values())
    for name, row in BUILDERS.items():
        is_allowed = row.splits_backwards <= given.splits_backwards
        is_met = row.layout is None or row.layout.is_met(graph, plan)
        if name != chosen.schedule and is_allowed and is_met and row.is_for(graph, has_virtual_stages=has_virtual_stages):
            yield Pair(chosen.balance, name, keeps_more=row.in_flight > given.in_flight)


def _predict(
    lengths: Sequence[SampleLengths], pair: Pair, *, predictor: StepPredictor, options: BalanceOptions
) -> StepPrediction | None:
    """Return the prediction for a pair; None if the balancer does not accept the options."""
    given = predictor.schedules
    if BUILDERS[pair.schedule] is not given.builder:
        schedules = ScheduleCache(given.graph, given.plan, BUILDERS[pair.schedule], given.passes)
        predictor = replace(predictor, schedules=schedules)
    try:
        assignment = BALANCERS[pair.balance](lengths, graph=given.graph, plan=given.plan, options=options)
    except BraidError:
        return None
    return predictor.predict(as_computed(assignment, lengths, graph=given.graph, plan=given.plan), lengths)


def _seconds(prediction: StepPrediction | None, most: float) -> float:
    """Return the simulated step; infinite if it must be longer than `most`, or the schedule does not suit the plan."""
    try:
        is_promising = prediction is not None and prediction.is_simulated and prediction.least_seconds < most
        return prediction.seconds if prediction is not None and is_promising else math.inf
    except BraidError:
        return math.inf
