"""Measures a run's layers from its own steps, alike on all ranks, so that schedules and balancers go by these seconds."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron.runtime import platform
from megatron.runtime.communication.gather_objects import gather_objects
from megatron.runtime.feed.step_planner import num_begun
from megatron.runtime.report.reporting import StepReport
from megatron.runtime.step.step import NO_PARCELS, Step
from megatron.runtime.training.judge_balance import TriedStep, Verdict, judge_balance
from megatron.runtime.training.plan_steps import MOST_MEASURED, measured_after, predictor_by
from megatron.runtime.training.prediction import MeasuredCosts, balance_options
from megatron.runtime.training.run import Run
from multimodal.balance import BALANCERS, UNBALANCED
from multimodal.balance.placement import as_computed
from multimodal.balance.step_predictor import StepPredictor
from multimodal.cost.measured_layers import MeasuredLayers
from multimodal.cost.model_costs import ModelCosts
from multimodal.cost.seconds.layer_profile import LayerProfile, StepProfile
from multimodal.schedule.simulate import simulate_schedule
from multimodal.values.sample_lengths import SampleLengths
from multimodal.values.timeline import TimelineEvent

_WARM_UP = 2
"""First steps of a run, which set connections up and are not measured."""
CLEARLY = 1.1
"""Layers measured before are kept while no unit's forwards or backwards are predicted to differ by more than this factor."""


class _Measured(NamedTuple):
    """A step that was measured, without its inputs."""

    step: Step
    lengths: Sequence[SampleLengths]
    events: Sequence[TimelineEvent]
    seconds: float


@dataclass
class Measuring:
    """The steps of one interval, and what was found in those before; every rank has one."""

    run: Run
    _steps: list[_Measured] = field(default_factory=list)
    _known: list[tuple[int, MeasuredCosts | None]] = field(default_factory=list)
    """The first step, from 0, that goes by these costs, and the costs."""

    def __post_init__(self) -> None:
        self._known.append((0, self.run.measured))

    def known_at(self, step: int) -> MeasuredCosts | None:
        """Return what a step, from 0, goes by: the newest that was known before any rank's loader began it."""
        return next(known for first, known in reversed(self._known) if first <= step)

    def add(self, number: int, step: Step, report: StepReport, events: Sequence[TimelineEvent]) -> str | None:
        """Add a step; collective behind those of `measured_after`. Returns a line if the run goes by other costs from now on."""
        done, interval = self.run.done_steps, self.run.config.measuring_interval
        due = measured_after(number, first=done, interval=interval)
        if due - number < MOST_MEASURED and number - done > min(_WARM_UP, interval - 1):
            kept = replace(step, parcels=NO_PARCELS)
            self._steps.append(_Measured(kept, tuple(step.lengths.values()), events, report.step_seconds))
        if number < due or not self._steps:
            return None
        steps, self._steps = self._steps, []
        return self._conclude(number, steps)

    def _conclude(self, number: int, steps: Sequence[_Measured]) -> str | None:
        run, found = self.run, None
        given = predictor_by(run, None).profile
        profile = given or self._measure_layers(steps)
        if profile is not None and run.world.rank == 0:
            found = self._conclusion(number, profile, steps, is_measured=given is None)
        line, measured = gather_objects(found)[0]
        if line is None:
            return None
        run.measured = measured
        num_workers = run.config.data.num_workers if run.exchanges is None else None
        self._known.append((number + num_begun(num_workers), run.measured))
        return str(line)

    def _measure_layers(self, steps: Sequence[_Measured]) -> LayerProfile | None:
        """Return the layers' seconds in the steps of all ranks, on rank 0 alone; collective."""
        rank, plan, described = self.run.world.rank, self.run.session.plan, predictor_by(self.run, None)
        costs = [described.costs(each.step.assignment, each.lengths) for each in steps]
        layers = MeasuredLayers(costs[0].layer_costs, plan)
        is_counted = plan.lanes[plan.lane_of_rank[rank]][0] == rank
        timed = [(of_step, each.events) for of_step, each in zip(costs, steps, strict=True) if is_counted]
        sums = torch.from_numpy(layers.sums(timed)).to(platform.device())
        dist.all_reduce(sums)
        return layers.fit(sums.cpu().numpy()) if rank == 0 else None

    def _conclusion(
        self, number: int, profile: LayerProfile, steps: Sequence[_Measured], *, is_measured: bool
    ) -> tuple[str | None, MeasuredCosts | None]:
        """Return the line and the costs that steps go by from now on; no line if they are like those before.

        is_measured: False if the profile was given, and only what balancing gains is new.
        """
        known = self.run.measured
        fitted, before = predictor_by(self.run, MeasuredCosts(number, profile)), predictor_by(self.run, known)
        predictions = [fitted.predict(each.step.assignment, each.lengths) for each in steps]
        predicted = [
            simulate_schedule(each.step.schedule, found.costs).iteration_seconds if found.is_simulated else found.least_seconds
            for each, found in zip(steps, predictions, strict=True)
        ]
        verdict = self._judge(steps, predicted, fitted)
        whole = zip(steps, predicted, predictions, strict=True)
        ratio = median([step.seconds / seconds for step, seconds, each in whole if each.is_simulated] or [1.0])
        took, beside = median(step.seconds for step in steps), profile.step or StepProfile()
        if is_measured:
            # Ranks that share cores compute faster while others wait, so a step may take less than its simulation.
            profile = profile.times(dict.fromkeys(self.run.session.graph.unit_names, min(1.0, ratio)))
            profile = replace(profile, step=replace(beside, seconds=max(0.0, 1 - 1 / ratio) * took))
        found = MeasuredCosts(number, profile)
        if judged := verdict or known:
            found = found._replace(margin=judged.margin, keeps_order=judged.keeps_order)
        last = steps[-1]
        now, then = (
            _unit_seconds(each.costs(last.step.assignment, last.lengths)) for each in (predictor_by(self.run, found), before)
        )
        ratios = {unit: [new / old if old else 1.0 for new, old in zip(now[unit], then[unit], strict=True)] for unit in now}
        are_alike = all(1 / CLEARLY < ratio < CLEARLY for pair in ratios.values() for ratio in pair)
        if known and are_alike and known.keeps_order == found.keeps_order and abs(known.margin - found.margin) < CLEARLY - 1:
            return None, None
        said = f"; {verdict.said}" if verdict else ""
        if not is_measured:
            return f"steps measured up to this one: a step took {took:.4g} s{said}", found
        units = ", ".join(f"{unit} {forward:.2f} and {backward:.2f}" for unit, (forward, backward) in ratios.items())
        what = f"those of step {known.step}" if known else "the described machine's"
        return (
            f"layers measured up to this step: forwards and backwards take, times {what}, {units}; a step took "
            f"{took:.4g} s; schedule and balance go by these layers now{said}",
            found,
        )

    def _judge(self, steps: Sequence[_Measured], predicted: Sequence[float], predictor: StepPredictor) -> Verdict | None:
        """Judge --balance auto by steps whose seconds are predicted as they ran; their samples' are, too, in the data's order."""
        graph, plan = self.run.session.graph, self.run.session.plan
        options = balance_options(self.run.config.training, vocab_size=predictor.vocab_size, predictor=predictor)

        def seconds_in_order(lengths: Sequence[SampleLengths]) -> float:
            assignment = BALANCERS[UNBALANCED](lengths, graph=graph, plan=plan, options=options)
            return predictor.predict(as_computed(assignment, lengths, graph=graph, plan=plan), lengths).seconds

        tried = []
        for each, seconds in zip(steps, predicted, strict=True):
            found, deciding_seconds = each.step.balance.predicted_seconds, each.step.balance.balance_ms / 1e3
            is_balanced = found is not None and found[1] < found[0]
            in_order_seconds = seconds_in_order(each.lengths) if is_balanced else seconds
            tried.append(TriedStep(each.seconds, seconds, in_order_seconds, deciding_seconds if found else None, is_balanced))
        # On a GPU's node, deciding takes no core that computes.
        return judge_balance(tried, num_cores=(os.cpu_count() or 1) if platform.device().type == "cpu" else 0)


def _unit_seconds(costs: ModelCosts) -> dict[str, tuple[float, float]]:
    """Return the seconds of all forwards, and of all backwards, of each unit."""
    found = {unit: costs.computations.of_unit(unit, of_subsets=False)[0].sum(axis=(1, 2)) for unit in costs.shape.plan.units}
    return {unit: (float(of_kinds[0]), float(of_kinds[1])) for unit, of_kinds in found.items()}
