"""Plans a run from measurements: the request from its flags, the planner's answer, and the flags of that answer."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from megatron.runtime.flags.configuration import RunConfig
from multimodal.cost.cluster import Cluster
from multimodal.cost.seconds.layer_profile import LayerProfile
from multimodal.plan.planners import PLANNERS, plan_or_advise
from multimodal.plan.planners.plan_file import plan_text
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import FixedSizes, PlanningRequest
from multimodal.plan.planners.search.plan_to_fit import PredictedRun, describe_kinds, plan_to_fit
from multimodal.plan.planners.search.prediction import judge_run
from multimodal.values.errors import BraidError, PlanError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import SampleLengths

PLANNER, BASELINE = "braid", "megatron"
PLAN_NAME = "plan.yaml"
CLOSE = 1.1
"""A run tries the second best plan if its step is predicted to be at most this many times as long as the best one's."""
_SIZES = [each.name for each in fields(FixedSizes)]
_ONLY_AUTO = {"plan_time_budget", "plan_trial_iters", "plan_review_iters", "replan"}
_FREE = {"context_parallel_distribution", "context_parallel_block_size"}
"""Flags that have no effect under some plans."""
_CHOSEN = {"plan", "schedule", "schedule_passes", "balance", "micro_batch_size", "transformer_impl"}
_IN_CHOICES = [field.name for field in fields(PlannedRun) if field.compare and field.name != "plan"]


@dataclass(frozen=True)
class Choice:
    """A plan with everything that ranks must know of it."""

    run: PlannedRun
    cluster: Cluster
    """The cluster whose durations the run uses."""
    seconds: float
    lines: tuple[str, ...]
    """The choice and the reasons for it, for the log."""
    text: str
    """The content of the plan file."""
    profile: LayerProfile | None = None
    """The layers that it was planned with; steps of the run are predicted by them, too."""
    second: "Choice | None" = None
    """The second best plan, if it is close enough for a trial."""

    def to_dict(self) -> dict[str, Any]:
        """Plain form, read back by `from_dict`."""
        flags = {name: getattr(self.run, name) for name in _IN_CHOICES}
        profile = self.profile and self.profile.to_dict()
        plain = {"plan": self.run.plan.to_dict(), "flags": flags, "cluster": self.cluster.to_dict()}
        second = self.second and self.second.to_dict()
        return {**plain, "seconds": self.seconds, "lines": self.lines, "text": self.text, "profile": profile, "second": second}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "Choice":
        """Build from the plain form; raises KeyError, TypeError or BraidError."""
        given = value["flags"]
        sizes = tuple(map(tuple, given["encoder_micro_batch_sizes"]))
        flags = {**given, "passes": tuple(given["passes"]), "encoder_micro_batch_sizes": sizes}
        run = PlannedRun(Plan.from_dict(value["plan"]), planner=PLANNER, **flags)
        profile = value["profile"] and LayerProfile.from_dict(value["profile"])
        cluster, second = Cluster.from_dict(value["cluster"]), value["second"] and cls.from_dict(value["second"])
        return cls(run, cluster, value["seconds"], tuple(value["lines"]), value["text"], profile, second)


def build_request(
    config: RunConfig, *, graph: ModelGraph, cluster: Cluster, lengths: tuple[SampleLengths, ...], vocab_size: int, num_ranks: int
) -> PlanningRequest:
    """Return the request to a planner; given sizes and options are kept. Raises PlanError."""
    given, is_given = config.given, config.given.__contains__
    fixed = {
        unit: FixedSizes(**{name: getattr(sizes, name) for name in _SIZES if f"{unit}.{name}" in given})
        for unit, sizes in config.parallelism.units.items()
        if any(f"{unit}.{name}" in given for name in _SIZES)
    }
    return PlanningRequest(
        graph,
        cluster,
        num_ranks,
        config.training.global_batch_size,
        lengths,
        micro_batch_size=config.training.micro_batch_size if is_given("micro_batch_size") else None,
        vocab_size=vocab_size,
        fixed_sizes=fixed,
        recompute=config.training.recompute_granularity,
        transformer_impl=config.model.transformer_impl,
        sharding=config.parallelism.data_parallel_sharding_strategy,
        time_budget_seconds=config.parallelism.plan_time_budget,
    )


def choose_plan(request: PlanningRequest, *, may_share_weights: bool, made_for: Mapping[str, str], cluster_name: str) -> Choice:
    """Plan for all ranks; may_share_weights: if nothing fits otherwise; the rest: as in `plan_text`. Raises PlanError."""
    planned = _plan(request, may_share_weights=may_share_weights)

    def chosen(found: PredictedRun, reason: str, second: Choice | None = None) -> Choice:
        text = plan_text(PLAN_NAME, found.run, found.prediction, made_for=made_for, cluster=cluster_name)
        lines = (*_describe(found, request), f"why: {reason}")
        return Choice(found.run, request.cluster, found.prediction.iteration_seconds, lines, text, request.profile, second)

    reason = _compare_with_one_grid(planned, request)
    if planned.run.second is None:
        return chosen(planned, reason)
    second = PredictedRun(planned.run.second, judge_run(planned.run.second, request))
    is_close = second.prediction.iteration_seconds <= CLOSE * planned.prediction.iteration_seconds
    fits = second.prediction.peak_memory_bytes <= request.memory_bytes
    return chosen(planned, reason, chosen(second, "faster in a trial than the best of the search") if is_close and fits else None)


def _plan(request: PlanningRequest, *, may_share_weights: bool) -> PredictedRun:
    try:
        found = plan_or_advise(PLANNERS[PLANNER], request)
    except PlanError:
        if not may_share_weights or request.sharding != "optim" or request.transformer_impl != "local":
            raise
        return _plan(request.changed(sharding="optim_grads_params"), may_share_weights=False)
    return found if found.run.num_gpus == request.num_gpus else _plan_with_all(request, found)


def _plan_with_all(request: PlanningRequest, best: PredictedRun) -> PredictedRun:
    """Return the best plan that leaves no rank idle, as runs require; raises PlanError."""
    try:
        return plan_to_fit(PLANNERS[PLANNER], request.changed(uses_all_gpus=True))
    except BraidError:
        raise PlanError(
            f"--plan auto: the best plan for {request.num_gpus} processes uses {best.run.num_gpus} of them "
            f"({best.run.plan.describe_sizes()}), and none was found that uses all; start {best.run.num_gpus} processes"
        ) from None


def _describe(planned: PredictedRun, request: PlanningRequest) -> Iterator[str]:
    run, prediction = planned
    yield f"plan: {run.plan.describe_sizes()}; {' '.join((run.flags, *run.encoder_flags))}"
    yield (
        f"predicted: {prediction.iteration_seconds:.4g} s a step, of which {prediction.ideal_seconds:.4g} s are the same "
        f"computations without idle time ({describe_kinds(prediction)}); {prediction.peak_memory_bytes / 1e9:.3g} GB of "
        f"{request.cluster.memory_gb:.3g} GB"
    )


def _compare_with_one_grid(planned: PredictedRun, request: PlanningRequest) -> str:
    looked_at = planned.run.notes[0] if planned.run.notes else "one plan of each planner"
    try:
        other = PLANNERS[BASELINE].plan_best(request)
    except BraidError as problem:
        return f"the shortest step of {looked_at}; there is no plan of one grid ({problem})"
    ratio = other.prediction.iteration_seconds / planned.prediction.iteration_seconds
    return (
        f"the shortest step of {looked_at}; one grid for all units, {other.run.plan.describe_sizes()} on {other.run.num_gpus} "
        f"ranks, would take {ratio:.3g} times as long"
    )


def planned_config(config: RunConfig, run: PlannedRun, *, plan: Path, cluster: Path, layer_costs: Path | None) -> RunConfig:
    """Return the configuration of a run with this plan; the paths are those of the files that describe it."""
    training = replace(
        config.training,
        schedule=run.schedule,
        schedule_passes=",".join(run.passes),
        balance=run.balance,
        micro_batch_size=run.micro_batch_size,
        encoder_micro_batch_sizes=dict(run.encoder_micro_batch_sizes),
        recompute_granularity=run.recompute,
        cluster=cluster,
        layer_costs=layer_costs,
    )
    shares = any(unit.data_parallel_size * unit.context_parallel_size > 1 for unit in run.plan.units.values())
    parallelism = replace(
        config.parallelism,
        plan=plan,
        sequence_parallel=run.has_tensor_parallelism,
        tp_comm_overlap=run.tp_comm_overlap,
        data_parallel_sharding_strategy=run.sharding if shares else "optim",
    )
    model = replace(config.model, transformer_impl=run.transformer_impl)
    given = (config.given - _ONLY_AUTO - _FREE) | _CHOSEN
    planned = replace(config, model=model, parallelism=parallelism, training=training, given=given)
    if planned.goes_by_durations:
        return planned
    return replace(planned, training=replace(training, cluster=None, layer_costs=None), given=given - {"cluster", "layer_costs"})
