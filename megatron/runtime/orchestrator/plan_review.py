"""Holds a plan that a run made by itself against its steps: in a trial beside the second best, and against its prediction."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NamedTuple

from megatron.runtime.flags.configuration import ParallelismConfig
from megatron.runtime.orchestrator.choose_plan import Choice, choose_plan
from megatron.runtime.orchestrator.orchestrate import Planned, keep_choice
from megatron.runtime.step.step import Step
from multimodal.cost.model_costs import ModelCosts
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.plan.planners.search.prediction import judge_run
from multimodal.values.action import Resource
from multimodal.values.timeline import Timeline

CLEARLY = 1.05
"""Another plan is reported if the current one's steps are predicted to be more than this many times as long."""
MOST_MEASURED = 8
"""Most steps before the review that are measured; the first step sets connections up and is never measured."""


class Verdict(NamedTuple):
    """The result of a review."""

    line: str
    choice: Choice | None
    """The plan to continue under; None: the current one."""


@dataclass
class PlanReview:
    """The steps of one plan up to its review. All ranks have one; rank 0 has the request, and measures."""

    planned: Planned
    num_steps: int
    may_change: bool
    """True if a better plan is taken (--replan)."""
    first_step: int = 0
    """Steps that were done when the plan began."""
    seconds_before: float | None = None
    """Seconds of a step of the previous plan, if there was one: then the review only compares."""
    _seconds: list[float] = field(default_factory=list)
    _measured: dict[str, float] = field(default_factory=dict)
    _predicted: dict[str, float] = field(default_factory=dict)
    """Unit -> seconds of its computations, over all lanes and measured steps."""

    @property
    def measured(self) -> range:
        """Numbers of the steps that are measured; the review is due after the last one."""
        last = self.first_step + self.num_steps
        return range(max(last - MOST_MEASURED, self.first_step + (self.num_steps > 1)) + 1, last + 1)

    def add(self, step: Step, timeline: Timeline, *, seconds: float, tflops: float) -> None:
        """Add a measured step, on rank 0."""
        self._seconds.append(seconds)
        costs = self._costs(step)
        for event in timeline.events:
            if event.action.kind.resource is Resource.COMPUTE:
                unit = event.action.unit
                self._measured[unit] = self._measured.get(unit, 0.0) + event.end_seconds - event.start_seconds
                self._predicted[unit] = self._predicted.get(unit, 0.0) + costs.compute(event.action).seconds

    def _costs(self, step: Step) -> ModelCosts:
        request, options = self._request, self._request.run_options(self.planned.choice.run)
        lengths = tuple(step.lengths.values())
        return ModelCosts(step.shape, step.assignment, lengths, request.cluster, request.vocab_size, options, request.profile)

    @property
    def _request(self) -> PlanningRequest:
        assert self.planned.request is not None, "only rank 0 measures"
        return self.planned.request

    @property
    def factors(self) -> Mapping[str, float]:
        """Unit -> ratio of its measured computations to profiled ones: in training, ranks share resources that one had alone."""
        return {unit: self._measured[unit] / seconds for unit, seconds in self._predicted.items() if seconds > 0}

    def conclude(self, number: int) -> Verdict:
        """Compare, and plan again with the measurements, on rank 0."""
        measured = median(self._seconds)
        factors = ", ".join(f"{factor:.2f} times as long in {unit}" for unit, factor in self.factors.items())
        line = (
            f"plan review after step {number}: a step takes {measured:.4g} s, predicted {self.planned.choice.seconds:.4g} s; "
            f"against the profile, computations take {factors}"
        )
        if self.seconds_before is not None:
            return Verdict(f"{line}; under the plan before it took {self.seconds_before:.4g} s", None)
        current, other = self._plan_again()
        if current <= CLEARLY * other.seconds:
            return Verdict(f"{line}; with these, no plan was found to be more than {CLEARLY - 1:.0%} better", None)
        line += f"; with these, {other.lines[0]} would take {other.seconds:.4g} s a step, the current plan {current:.4g} s"
        if not self.may_change:
            return Verdict(f"{line}; --replan would go on under it", None)
        keep_choice(self._request, other)  # for the next start
        return Verdict(f"{line}; going on under it", other)

    def _plan_again(self) -> tuple[float, Choice]:
        """Return the current plan's step and the best plan for measured layers; the names of weights must not change."""
        run, request = self.planned.choice.run, self._request
        assert request.profile is not None
        cores = request.cluster.cores_per_node and request.cluster.gpus_per_node  # what was measured holds the waits for cores
        cluster = replace(request.cluster, cores_per_node=cores)
        corrected = replace(request, cluster=cluster, profile=request.profile.times(self.factors), sharding=run.sharding)
        current = judge_run(run, corrected)
        made_for = {"what was measured": "times what was profiled, " + str(dict(self.factors))}
        other = choose_plan(corrected, may_share_weights=False, made_for=made_for, cluster_name="cluster.yaml")
        return current.iteration_seconds, other

    def after(self, planned: Planned, *, number: int) -> "PlanReview | None":
        """Return the review of the plan under which the run continues, unless that is this one."""
        if planned is self.planned:
            return None
        before = median(self._seconds) if self._seconds else 0.0
        return PlanReview(planned, self.num_steps, may_change=False, first_step=number, seconds_before=before)


@dataclass
class PlanTrial:
    """The first steps of a run, as many under the best plan as under the second best; it goes on under the faster (DistTrain)."""

    planned: Planned
    """The plan of the current half."""
    num_steps: int
    """Steps of each half that are measured; one before them sets connections up."""
    review: PlanReview | None
    """The review of the plan that the run settles on."""
    first_step: int = 0
    """Steps that were done when the half began."""
    before: "PlanTrial | None" = None
    """The first half, in the second."""
    _rates: list[float] = field(default_factory=list)
    """TFLOP/s of the measured steps, as batches differ in work."""

    @property
    def measured(self) -> range:
        """Numbers of the steps that are measured; the half ends with the last one."""
        return range(self.first_step + 2, self.first_step + self.num_steps + 2)

    def add(self, step: Step, timeline: Timeline, *, seconds: float, tflops: float) -> None:
        """Add a measured step, on rank 0."""
        self._rates.append(tflops)

    def conclude(self, number: int) -> Verdict:
        """Go on to the second plan, or compare, on rank 0."""
        if self.before is None:
            second = self.planned.choice.second
            assert second is not None
            return Verdict(f"plan trial: {self.num_steps} steps are done; as many under {second.lines[0]}", second)
        rates, before = median(self._rates), median(self.before._rates)
        line = f"plan trial: {before:.3g} TFLOP/s on each rank under the first plan, {rates:.3g} under the second"
        first, second = (replace(each.planned.choice, second=None) for each in (self.before, self))
        assert self.before.planned.request is not None
        keep_choice(self.before.planned.request, second if rates > before else first)  # for the next start
        if rates > before:
            return Verdict(f"{line}; going on under the second", None)
        return Verdict(f"{line}; going on under the first", first)

    def after(self, planned: Planned, *, number: int) -> "PlanTrial | PlanReview | None":
        """Return the second half, or the review of the plan on which the run has settled."""
        if self.before is None:
            return PlanTrial(planned, self.num_steps, self.review, first_step=number, before=self)
        return self.review and replace(self.review, planned=planned, first_step=number)


def watch_plan(planned: Planned, flags: ParallelismConfig) -> PlanTrial | PlanReview | None:
    """Return what the steps of a run are watched for at first: a trial if there is a second plan, else the review."""
    review = PlanReview(planned, flags.plan_review_iters, may_change=flags.replan) if flags.plan_review_iters else None
    if planned.choice.second is None or not flags.plan_trial_iters:
        return review
    return PlanTrial(planned, flags.plan_trial_iters, review)
