"""Searches for another balancer, or another schedule, with a clearly shorter predicted step."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from multimodal.balance import BALANCERS, placements_of
from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.placement import as_computed
from multimodal.balance.step_predictor import StepPrediction, StepPredictor
from multimodal.schedule.build_schedule import ScheduleCache
from multimodal.schedule.builders import BUILDERS
from multimodal.values.errors import BraidError
from multimodal.values.sample_lengths import SampleLengths

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
