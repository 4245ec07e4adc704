"""Predicts a planned run by simulating real batches on all its replicas, or on an exact fraction of them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import NamedTuple

import numpy as np

from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.placement import as_computed
from multimodal.cost.model_costs import ModelCosts
from multimodal.cost.pieces.stage_costs import StageCosts
from multimodal.cost.stage_layers import StageLayers
from multimodal.cost.step_costs import StepCosts
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.plan.planners.search.simulated_part import FINAL, WHOLE, Fidelity, choose_part
from multimodal.schedule.build_schedule import build_schedule
from multimodal.schedule.builders import BUILDERS, Builder
from multimodal.schedule.compile_schedule import CompiledSchedule
from multimodal.schedule.passes import Pass, passes_named
from multimodal.schedule.simulate import simulate_schedule
from multimodal.schedule.simulate_events import NodeKind
from multimodal.values.action import Action
from multimodal.values.arrays.rows import Floats
from multimodal.values.assignment import Assignment
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import SampleLengths
from multimodal.values.shape import StepShape
from multimodal.values.validate import validate_assignment

PART_OF_IDEAL = ("tp",)
"""Kinds of idle time that are parts of computations, and so part of the ideal."""


@dataclass(frozen=True)
class Prediction:
    """Means over the simulated batches; memory is the largest peak."""

    iteration_seconds: float
    """Seconds from the step's start to the end of the update, as training reports it."""
    ideal_seconds: float
    mfu: float
    tokens_per_second_per_gpu: float
    peak_memory_bytes: int
    bubble: Mapping[str, float]
    floor_seconds: float = 0.0
    """The ideal time without the additions of plans: waits for tensor parallel collectives, and recomputation."""
    busiest_seconds: float = 0.0
    """The busiest ranks' computations: no order of these is shorter."""
    update_seconds: float = 0.0
    replica_share: int = 1
    """Replicas per simulated replica: one of this number was simulated."""

    @property
    def above_floor(self) -> Mapping[str, float]:
        """Kind -> share of the step's time: idle time, recomputation, and the optimizer; with the floor's share they sum to 1."""
        seconds = self.iteration_seconds
        if not seconds:
            return dict(self.bubble)
        waits = sum(self.bubble.get(kind, 0.0) for kind in PART_OF_IDEAL)
        recomputed = max(0.0, (self.ideal_seconds - self.floor_seconds) / seconds - waits)
        return {**self.bubble, "recomputation": recomputed, "optimizer": self.update_seconds / seconds}


@dataclass(frozen=True)
class ShareCosts(ModelCosts):
    """Costs of a share of a plan's replicas; collectives still span all of them."""

    whole: ModelCosts = field(kw_only=True)
    """The costs of the whole plan, of which only collectives are used."""

    @property
    def peak_flops_per_second(self) -> float:
        """FLOPs per second of the share's ranks."""
        return super().peak_flops_per_second / self.shape.plan.num_ranks * sum(map(len, self.shape.plan.lanes))

    def collective_seconds(self, action: Action) -> float:
        """Seconds of a collective over all replicas."""
        return self.whole.collective_seconds(action)

    def static_bytes(self, lane: int) -> int:
        """Bytes of weights, gradients and optimizer state, which all replicas share, not only the simulated ones."""
        stages = self.stages.of_rank[self.shape.plan.lanes[lane][0]]
        excess = sum(self.memory.weight_bytes(stage) - self.whole.memory.weight_bytes(stage) for stage in stages)
        return round(super().static_bytes(lane) - excess)


def predict_run(run: PlannedRun, request: PlanningRequest, *, fidelity: Fidelity = WHOLE) -> Prediction:
    """Simulate global batches, or the part of them that `choose_part` leaves.

    From two smaller batches, all seconds are extrapolated linearly: after its warm-up, a pipeline is periodic. Raises
    ScheduleError or AssignmentError if the run is impossible.
    """
    part = choose_part(run, request, fidelity)
    simulate = partial(_simulate, run, request, part.plan, is_checked=fidelity.is_checked)
    count = fidelity.num_batches(request)
    batches = request.loads.drawn_batches(request.global_batch_size, count, part.share)
    keeps_all = math.isinf(BUILDERS[run.schedule].in_flight)
    steps = [_of_batch(batch, part.sample_counts, simulate, keeps_all=keeps_all) for batch in batches]
    layers = StageLayers(request.graph, run.plan, request.vocab_size)
    update = StageCosts(request.layer_costs, layers, request.run_options(run)).update_seconds()
    num_ranks = sum(map(len, part.plan.lanes))
    total = sum(step.seconds for step in steps) + len(steps) * update
    kinds = steps[0].bubble_seconds
    return Prediction(
        iteration_seconds=total / len(steps),
        ideal_seconds=fmean(step.ideal_seconds for step in steps),
        mfu=sum(step.peak_seconds for step in steps) / total if total else 0.0,
        tokens_per_second_per_gpu=sum(step.num_tokens for step in steps) / total / num_ranks if total else 0.0,
        peak_memory_bytes=max(step.peak_memory_bytes for step in steps),
        bubble={kind: sum(step.bubble_seconds[kind] for step in steps) / total if total else 0.0 for kind in kinds},
        floor_seconds=fmean(step.floor_seconds for step in steps),
        busiest_seconds=fmean(step.busiest_seconds for step in steps),
        update_seconds=update,
        replica_share=part.share,
    )


judge_run = partial(predict_run, fidelity=FINAL)
"""Simulates a run as every plan is judged in the end."""


@dataclass(frozen=True)
class _Step:
    """One step's figures; all but the memory's peak grow linearly with the batch once the pipelines are full."""

    seconds: float
    ideal_seconds: float
    floor_seconds: float
    """Seconds of an average rank's computations without waits and recomputation."""
    busiest_seconds: float
    peak_seconds: float
    """Seconds of the model's FLOPs at the GPUs' peak."""
    num_tokens: float
    bubble_seconds: Mapping[str, float]
    """Kind -> seconds of an average rank."""
    peak_memory_bytes: int


def _of_batch(
    lengths: Sequence[SampleLengths],
    sample_counts: Sequence[int],
    simulate: Callable[[Sequence[SampleLengths]], _Step],
    *,
    keeps_all: bool,
) -> _Step:
    """Simulate a batch, or extrapolate from two parts, between the work alone (no more waits) and a step without fixed costs."""
    if len(sample_counts) == 1:
        return simulate(lengths)
    part, half = sample_counts
    larger, smaller = (simulate(_like(lengths, count)) for count in (part, half))
    # By work rather than by samples: with varying lengths, the work of a part is not proportional to its samples.
    work = larger.peak_seconds * _num_tokens(lengths) / larger.num_tokens if larger.num_tokens else 0.0
    step = larger.peak_seconds - smaller.peak_seconds
    weight = (work - larger.peak_seconds) / step if step > 0 else (len(lengths) - part) / (part - half)

    def continued(large: float, small: float) -> float:
        return max(0.0, large + weight * (large - small))

    ideal = continued(larger.ideal_seconds, smaller.ideal_seconds)
    least = larger.seconds + max(0.0, ideal - larger.ideal_seconds)
    most = larger.seconds * (work / larger.peak_seconds if larger.peak_seconds else len(lengths) / part)
    line = continued(larger.seconds, smaller.seconds)
    seconds = min(max(line, least), max(most, least))
    bubbles = {kind: continued(each, smaller.bubble_seconds[kind]) for kind, each in larger.bubble_seconds.items()}
    idle = sum(each for kind, each in bubbles.items() if kind not in PART_OF_IDEAL)
    scale = max(0.0, seconds - ideal) / idle if idle > 0 else 0.0  # corrections of the slope count as waiting
    bubbles = {kind: each if kind in PART_OF_IDEAL else scale * each for kind, each in bubbles.items()}
    floor, peak = continued(larger.floor_seconds, smaller.floor_seconds), continued(larger.peak_seconds, smaller.peak_seconds)
    busiest = min(seconds, continued(larger.busiest_seconds, smaller.busiest_seconds))
    growth = max(0, larger.peak_memory_bytes - smaller.peak_memory_bytes) * keeps_all
    num_bytes = larger.peak_memory_bytes + round(weight * growth)
    return _Step(seconds, ideal, floor, busiest, peak, float(_num_tokens(lengths)), bubbles, num_bytes)


def _like(lengths: Sequence[SampleLengths], count: int) -> list[SampleLengths]:
    """Return `count` samples, in order, spread evenly over all samples by size."""
    by_size = sorted(range(len(lengths)), key=lambda index: lengths[index].num_tokens)
    return [lengths[index] for index in sorted(by_size[len(lengths) * (2 * each + 1) // (2 * count)] for each in range(count))]


def assign(
    run: PlannedRun, request: PlanningRequest, plan: Plan, lengths: Sequence[SampleLengths], *, is_checked: bool = False
) -> Assignment:
    """Place samples as in the run; is_checked: True if it is validated. Raises AssignmentError."""
    options = BalanceOptions(
        micro_batch_size=run.micro_batch_size,
        encoder_micro_batch_sizes=dict(run.encoder_micro_batch_sizes),
        ranks_per_node=request.cluster.gpus_per_node,
        vocab_size=request.vocab_size,
    )
    assignment = BALANCERS[run.balance](lengths, graph=request.graph, plan=plan, options=options)
    if is_checked:
        validate_assignment(assignment, lengths, graph=request.graph, plan=plan)
    return as_computed(assignment, lengths, graph=request.graph, plan=plan)


class PreparedStep(NamedTuple):
    """A step with its builder, ready to be scheduled and simulated."""

    shape: StepShape
    assignment: Assignment
    costs: StepCosts
    builder: Builder
    """The run's schedule; one that uses durations takes the cluster's, as the run does, which has no profile."""
    passes: tuple[Pass, ...]


def prepare_step(
    run: PlannedRun, request: PlanningRequest, plan: Plan, lengths: Sequence[SampleLengths], *, is_checked: bool = False
) -> PreparedStep:
    """Place samples as the run would on its plan, or on a share of its replicas; raises AssignmentError."""
    row, builder = BUILDERS[run.schedule], None
    assignment = assign(run, request, plan, lengths, is_checked=is_checked)
    shape = assignment.shape(request.graph, plan)
    if run.predicted_as is not None:
        assignment, builder = run.predicted_as(shape, assignment)
        shape = assignment.shape(request.graph, plan)
    costs = _step_costs(run, request, shape, assignment, lengths)
    known = costs if request.profile is None else _step_costs(run, replace(request, profile=None), shape, assignment, lengths)
    return PreparedStep(shape, assignment, costs, builder or row.with_costs(known), passes_named(",".join(run.passes)))


def _simulate(
    run: PlannedRun, request: PlanningRequest, plan: Plan, lengths: Sequence[SampleLengths], *, is_checked: bool
) -> _Step:
    shape, assignment, costs, builder, passes = prepare_step(run, request, plan, lengths, is_checked=is_checked)
    found = simulate_schedule(build_schedule(builder, shape, passes=passes, is_checked=is_checked, costs=costs), costs)
    floor_seconds = found.busy_fraction * found.iteration_seconds
    if run.recompute is not None and is_checked:
        plain = found.compiled.with_costs(_step_costs(replace(run, recompute=None), request, shape, assignment, lengths))
        floor_seconds = float(_lane_seconds(plain, plain.arrays.seconds - plain.tensor_parallel_seconds) @ plain.rank_shares)
    ideal, tokens = found.ideal_seconds, float(_num_tokens(lengths))
    seconds = max(found.iteration_seconds, ideal * request.cluster.ranks_per_core(run.plan.num_ranks))
    busiest = float(_lane_seconds(found.compiled, found.compiled.arrays.seconds).max(initial=0.0))
    bubbles = {kind: share * found.iteration_seconds for kind, share in found.bubble.items()}
    bubbles["pp_other"] += seconds - found.iteration_seconds  # ranks wait for cores
    return _Step(
        seconds, ideal, floor_seconds, busiest, found.mfu * found.iteration_seconds, tokens, bubbles, found.peak_memory_bytes
    )


def _lane_seconds(compiled: CompiledSchedule, node_seconds: Floats) -> Floats:
    """Return the seconds of every lane's computations."""
    arrays = compiled.arrays
    work = np.where(arrays.kinds == NodeKind.COMPUTE, node_seconds, 0.0)[arrays.lane_nodes]
    return np.bincount(compiled.lane_of_entry, work, arrays.num_lanes).astype(np.float64)


def _step_costs(
    run: PlannedRun, request: PlanningRequest, shape: StepShape, assignment: Assignment, lengths: Sequence[SampleLengths]
) -> StepCosts:
    given = lengths, request.cluster, request.vocab_size, request.run_options(run), request.profile
    if shape.plan is run.plan:
        return ModelCosts(shape, assignment, *given)
    whole = ModelCosts(replace(shape, plan=run.plan), assignment, *given)
    return ShareCosts(shape, assignment, *given, whole=whole)


def _num_tokens(lengths: Sequence[SampleLengths]) -> int:
    return sum(sample.num_tokens for sample in lengths)
