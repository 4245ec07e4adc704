"""Measures a run's layers from its own steps, alike on all ranks, so that schedules and balancers go by these seconds."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.runtime import platform
from megatron.runtime.report.reporting import StepReport
from megatron.runtime.state.handover import gather_objects
from megatron.runtime.step.step import Step
from megatron.runtime.training.plan_steps import MOST_MEASURED, measured_after, predictor_by, steps_in_order
from megatron.runtime.training.prediction import MeasuredCosts
from megatron.runtime.training.run import Run
from multimodal.cost.measured_layers import MeasuredLayers
from multimodal.cost.model_costs import ModelCosts
from multimodal.cost.seconds.layer_profile import LayerProfile, StepProfile
from multimodal.schedule.simulate import simulate_schedule
from multimodal.values.assignment import Assignment
from multimodal.values.sample_lengths import SampleLengths
from multimodal.values.schedule import Schedule
from multimodal.values.timeline import TimelineEvent

_WARM_UP = 2
"""First steps of a run, which set connections up and are not measured."""
CLEARLY = 1.1
"""Layers measured before are kept while no unit's forwards or backwards are predicted to differ by more than this factor."""


class _Measured(NamedTuple):
    """A step that was measured, without its inputs."""

    schedule: Schedule
    assignment: Assignment
    lengths: Sequence[SampleLengths]
    events: Sequence[TimelineEvent]
    seconds: float
    deciding_seconds: float
    """Seconds in which its assignment was chosen."""
    is_in_order: bool
    """True if its samples were left in the data's order, to be compared with the others."""


@dataclass
class Measuring:
    """The steps of one interval; every rank has one."""

    run: Run
    _steps: list[_Measured] = field(default_factory=list)

    def due(self, number: int) -> int:
        """Return the earliest step, from `number` on, behind which the run may go by other durations."""
        return measured_after(number, first=self.run.done_steps, interval=self.run.config.measuring_interval)

    def add(self, number: int, step: Step, report: StepReport, events: Sequence[TimelineEvent]) -> str | None:
        """Add a step; collective behind those of `measured_after`. Returns a line if the run goes by other costs from now on."""
        done, interval, due = self.run.done_steps, self.run.config.measuring_interval, self.due(number)
        if due - number < MOST_MEASURED and number - done > min(_WARM_UP, interval - 1):
            lengths = tuple(step.lengths.values())
            is_in_order = number - 1 in steps_in_order(self.run)
            seconds = report.step_seconds, step.balance.balance_ms / 1e3
            self._steps.append(_Measured(step.schedule, step.assignment, lengths, events, *seconds, is_in_order))
        if number < due or not self._steps:
            return None
        measured, self._steps = self._steps, []
        return self._conclude(number, measured)

    def _conclude(self, number: int, steps: Sequence[_Measured]) -> str | None:
        run, plan = self.run, self.run.session.plan
        described = predictor_by(run, None)
        costs = [described.costs(step.assignment, step.lengths) for step in steps]
        layers = MeasuredLayers(costs[0].layer_costs, plan)
        is_counted = plan.lanes[plan.lane_of_rank[run.world.rank]][0] == run.world.rank
        timed = [(each, step.events) for each, step in zip(costs, steps, strict=True) if is_counted]
        sums = torch.from_numpy(layers.sums(timed)).to(platform.device())
        dist.all_reduce(sums)
        found = self._fit(number, layers.fit(sums.cpu().numpy()), steps) if run.world.rank == 0 else None
        line, measured = gather_objects(found)[0]
        if line is None:
            return None
        run.measured = MeasuredCosts.from_dict(measured)
        run.session.forget_schedules()
        return str(line)

    def _fit(self, number: int, profile: LayerProfile, steps: Sequence[_Measured]) -> tuple[str | None, dict[str, Any]]:
        """Return the line and the measured costs, with the rest of a step; no line if they are like those the run goes by."""
        fitted, before = predictor_by(self.run, MeasuredCosts(number, profile)), predictor_by(self.run, self.run.measured)
        predictions = [fitted.predict(step.assignment, step.lengths) for step in steps]
        of_simulated = [
            (step.is_in_order, step.seconds / simulate_schedule(step.schedule, each.costs).iteration_seconds)
            for step, each in zip(steps, predictions, strict=True)
            if each.is_simulated
        ]
        in_order, balanced = ([ratio for is_in_order, ratio in of_simulated if is_in_order is wanted] for wanted in (True, False))
        ratio, took = median([*in_order, *balanced] or [1.0]), median(step.seconds for step in steps)
        beside = profile.step or StepProfile()
        # Ranks that share cores compute faster while others wait, so a step may take less than its simulation.
        profile = profile.times(dict.fromkeys(self.run.session.graph.unit_names, min(1.0, ratio)))
        profile = replace(profile, step=replace(beside, seconds=max(0.0, 1 - 1 / ratio) * took))
        fitted = predictor_by(self.run, MeasuredCosts(number, profile))
        margin = self.run.measured.margin if self.run.measured else 0.0
        if in_order and balanced:
            margin = lost_by_exchanging(balanced, in_order) + prediction_error(balanced, in_order)
            if platform.device().type == "cpu":  # who decides takes a core from those who compute
                decided = [step.deciding_seconds for step in steps if not step.is_in_order]
                margin += median(decided) / (took * (os.cpu_count() or 1))
        last = steps[-1]
        now, then = (_unit_seconds(each.costs(last.assignment, last.lengths)) for each in (fitted, before))
        ratios = {unit: [new / old if old else 1.0 for new, old in zip(now[unit], then[unit], strict=True)] for unit in now}
        if self.run.measured and all(1 / CLEARLY < ratio < CLEARLY for pair in ratios.values() for ratio in pair):
            return None, {}
        units = ", ".join(f"{unit} {forward:.2f} and {backward:.2f}" for unit, (forward, backward) in ratios.items())
        what = f"those of step {self.run.measured.step}" if self.run.measured else "the described machine's"
        least = f"; balance keeps the data's order unless it gains {margin:.1%}" if margin else ""
        return (
            f"layers measured up to this step: forwards and backwards take, times {what}, {units}; a step took "
            f"{took:.4g} s; schedule and balance go by these layers now{least}",
            MeasuredCosts(number, profile, margin).to_dict(),
        )


def lost_by_exchanging(balanced: Sequence[float], in_order: Sequence[float]) -> float:
    """Return the share of a step that exchanging samples costs beyond what is predicted; 0 unless all such steps show it.

    balanced, in_order: measured over predicted seconds of steps whose samples were exchanged, and of steps in the data's order.
    """
    return 1 - median(in_order) / median(balanced) if min(balanced) > max(in_order) else 0.0


def prediction_error(*kinds: Sequence[float]) -> float:
    """Return the median distance of measured over predicted seconds, which are given by kind of step, from a kind's median."""
    return median(abs(ratio / median(kind) - 1) for kind in kinds for ratio in kind)


def _unit_seconds(costs: ModelCosts) -> dict[str, tuple[float, float]]:
    """Return the seconds of all forwards, and of all backwards, of each unit."""
    found = {unit: costs.computations.of_unit(unit, of_subsets=False)[0].sum(axis=(1, 2)) for unit in costs.shape.plan.units}
    return {unit: (float(of_kinds[0]), float(of_kinds[1])) for unit, of_kinds in found.items()}
