"""Turns `--plan auto` into a plan, which rank 0 makes for all, and plans again once the run's own steps are measured.

Measurements are kept for later runs on this machine, and so is the plan, under everything that it depends on.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from itertools import count, islice
from statistics import median
from typing import NamedTuple

import yaml

from megatron.runtime.feed.data_sets import DataSets
from megatron.runtime.flags.configuration import RunConfig
from megatron.runtime.launch.distributed_setup import World
from megatron.runtime.orchestrator.choose_plan import PLAN_NAME, Choice, build_request, choose_plan, planned_config
from megatron.runtime.orchestrator.machine import find_value, keep_value, key_of, place_file
from megatron.runtime.orchestrator.profile_layers import describe_machine, measure_cluster, profile_model
from megatron.runtime.step.step import Step
from multimodal.cost.model_costs import ModelCosts
from multimodal.cost.seconds.layer_profile import LayerProfile
from multimodal.data.global_batches import DataPart, GlobalBatches
from multimodal.model.transformer_config import BuildOptions
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.plan.planners.search.prediction import judge_run
from multimodal.values.action import ACTION_TABLE, Resource
from multimodal.values.errors import BraidError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.sample_lengths import SampleLengths
from multimodal.values.timeline import Timeline

logger = logging.getLogger(__name__)
MOST_SAMPLES = 4096
"""Samples whose lengths a plan is made from: the first of the training."""
CLUSTER_NAME, LAYERS_NAME = "cluster.yaml", "layers.json"
_LINKS = {False: "links as measured now", True: "links as kept"}


@dataclass(frozen=True)
class Inputs:
    """The model that a run trains, and its data."""

    graph: ModelGraph
    data: DataSets
    vocab_size: int
    """Padded."""


class Planned(NamedTuple):
    """The result for one rank."""

    config: RunConfig
    choice: Choice
    request: PlanningRequest | None
    """The request that the plan answers; on rank 0 only."""


def orchestrate(config: RunConfig, world: World, inputs: Inputs, *, build: BuildOptions) -> Planned:
    """Measure what is unknown, plan, and return the run's configuration under the plan; collective.

    Layers are timed before ranks connect. Raises a BraidError on rank 0 if nothing can be planned, RanksLostError on others.

    build: options with which the run builds its layers.
    """
    first = _FirstRank(config, world, inputs) if world.rank == 0 else None
    are_links_known = world.from_first("links", lambda: first.look_at_machine(build) if first else "") == "known"
    if not are_links_known:
        cluster = measure_cluster(config, world, first.cluster if first else None)
        if first:
            first.cluster = cluster
    choice = Choice.from_dict(json.loads(world.from_first("plan", lambda: first.choose() if first else "")))
    with world.in_turn("plan"):
        planned = under_choice(config, choice)
    if first:
        first.tell(planned)
    return Planned(planned, choice, first.request if first else None)


def under_choice(config: RunConfig, choice: Choice) -> RunConfig:
    """Return the configuration of the run under a plan, with the plan's files at a place that this rank can read."""
    place = f"plans/{key_of((choice.text, choice.cluster, choice.profile))}"
    cluster = config.training.cluster or place_file(
        place, CLUSTER_NAME, yaml.safe_dump(choice.cluster.to_dict(), sort_keys=False)
    )
    profile = choice.profile
    layers = None if profile is None else place_file(place, LAYERS_NAME, json.dumps(profile.to_dict()))
    return planned_config(config, choice.run, plan=place_file(place, PLAN_NAME, choice.text), cluster=cluster, layer_costs=layers)


class _FirstRank:
    """The part of planning that rank 0 does for all ranks."""

    def __init__(self, config: RunConfig, world: World, inputs: Inputs) -> None:
        self._config, self._world_size = config, world.size
        self.cluster, self._are_links_known = describe_machine(config, world_size=world.size)
        self.request = build_request(
            config,
            graph=inputs.graph,
            cluster=self.cluster,
            lengths=tuple(first_lengths(config, inputs.data)),
            vocab_size=inputs.vocab_size,
            num_ranks=world.size,
        )
        self._layers = ""
        self._is_kept = False
        self._lines: tuple[str, ...] = ()

    def look_at_machine(self, build: BuildOptions) -> str:
        """Profile layers, unless --layer-costs has them, and return whether links are known."""
        given = self._config.training.layer_costs
        if given is None:
            profile, self._layers = profile_model(self.request, build)
        else:
            profile, self._layers = LayerProfile.from_file(given), f"layers of --layer-costs {given}"
        self.request = replace(self.request, profile=profile)
        return "known" if self._are_links_known or self._world_size == 1 else "measure"

    def choose(self) -> str:
        """Plan, or find the plan of an equal request."""
        self.request = request = replace(self.request, cluster=self.cluster)
        choice: Choice | None = None
        with suppress(BraidError, KeyError, TypeError, ValueError, AttributeError):
            choice = Choice.from_dict(find_value("choices", _key(request)) or {})
        self._is_kept = choice is not None
        if choice is None:
            may_share = "data_parallel_sharding_strategy" not in self._config.given
            made_for = {"model": str(self._config.model.model), "data": " ".join(self._config.data.data_path)}
            name = str(self._config.training.cluster or CLUSTER_NAME)
            choice = choose_plan(request, may_share_weights=may_share, made_for=made_for, cluster_name=name)
            keep_choice(request, choice)
        self._lines = choice.lines
        return json.dumps(choice.to_dict())

    def tell(self, config: RunConfig) -> None:
        """Report the choice and its reasons in five lines."""
        cluster = self.cluster
        links = f"--cluster {self._config.training.cluster}" if self._config.training.cluster else _LINKS[self._are_links_known]
        machine = (
            f"machine: {self._world_size} ranks, {cluster.gpus_per_node} on a node, {cluster.peak_tflops:.3g} TFLOP/s, "
            f"{cluster.memory_gb:.3g} GB, {cluster.intra_node.bandwidth_gbytes_per_second:.3g} GB/s inside a node ({links}); "
            f"{self._layers}"
        )
        means = ", ".join(
            f"{name} {self.request.loads.mean[name][0]:.4g} (most {loads[:, 0].max():.4g})"
            for name, loads in self.request.loads.of_samples.items()
        )
        data = f"plan auto: of {len(self.request.lengths)} samples, tokens in each: {means}"
        kept = " (as planned before)" if self._is_kept else ""
        plan, *others = self._lines
        for line in (data, machine, f"{plan}; {config.parallelism.plan}{kept}", *others):
            logger.info("%s", line)


def keep_choice(request: PlanningRequest, choice: Choice) -> None:
    """Keep a plan for runs with the same request."""
    keep_value("choices", _key(request), choice.to_dict())


def _key(request: PlanningRequest) -> str:
    return key_of(repr(getattr(request, field.name)) for field in fields(request) if field.compare)


def first_lengths(config: RunConfig, data: DataSets, *, most: int = MOST_SAMPLES) -> Iterator[SampleLengths]:
    """Yield the lengths of the first samples of the training, up to the given number or all of them.

    Where --split leaves nothing to train on (--skip-train), those of the held-out samples.
    """
    source, parts = (data.train, data.train_parts) if len(data.train) else (data.valid, data.valid_parts)
    parts = parts or (DataPart(len(source)),)
    is_shuffled, seed = config.data.sample_program is None, config.training.seed
    batches = GlobalBatches(parts, config.training.global_batch_size, seed, shuffle=is_shuffled)
    drawn = (sample for step in count() for sample in batches.batch(step))
    for number, sample in enumerate(islice(drawn, min(most, len(source)))):
        yield replace(source.lengths(sample.source_index), sample_id=number)


CLEARLY = 1.05
"""Another plan is reported if the current one's steps are predicted to be more than this many times as long."""
MOST_MEASURED = 8
"""Most steps before the review that are measured; the first step sets connections up and is never measured."""


class Verdict(NamedTuple):
    """The result of a review."""

    line: str
    choice: Choice | None
    """The plan to continue under; None: the current one."""

    def to_text(self) -> str:
        """Return the text form, read by `from_text`."""
        return json.dumps([self.line, self.choice and self.choice.to_dict()])

    @classmethod
    def from_text(cls, text: str) -> "Verdict":
        """Parse the text form."""
        line, choice = json.loads(text)
        return cls(line, choice and Choice.from_dict(choice))


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

    def measures(self, number: int) -> bool:
        """Return True for the steps that are measured."""
        last = self.first_step + self.num_steps
        return max(last - MOST_MEASURED, self.first_step + (self.num_steps > 1)) < number <= last

    def is_due(self, number: int) -> bool:
        """Return True after the last of these steps."""
        return number == self.first_step + self.num_steps

    def add(self, step: Step, timeline: Timeline, *, seconds: float) -> None:
        """Add a measured step, on rank 0."""
        self._seconds.append(seconds)
        costs = self._costs(step)
        for event in timeline.events:
            if ACTION_TABLE[event.action.kind].resource is Resource.COMPUTE:
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
        corrected = replace(request, profile=request.profile.times(self.factors), sharding=run.sharding)
        current = judge_run(run, corrected)
        made_for = {"what was measured": "times what was profiled, " + str(dict(self.factors))}
        other = choose_plan(corrected, may_share_weights=False, made_for=made_for, cluster_name="cluster.yaml")
        return current.iteration_seconds, other

    def after_change(self, planned: Planned, *, number: int) -> "PlanReview":
        """Return the review of the plan under which the run continues."""
        before = median(self._seconds) if self._seconds else 0.0
        return PlanReview(planned, self.num_steps, may_change=False, first_step=number, seconds_before=before)
