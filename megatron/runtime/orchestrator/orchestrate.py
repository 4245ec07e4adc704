"""Turns `--plan auto` into a plan, which rank 0 makes for all; it and the measurements are kept for later runs."""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import count, islice
from typing import NamedTuple

import yaml

from megatron.runtime.feed.data_sets import DataSets
from megatron.runtime.flags.configuration import RunConfig
from megatron.runtime.launch.distributed_setup import World
from megatron.runtime.orchestrator.choose_plan import PLAN_NAME, Choice, build_request, choose_plan, planned_config
from megatron.runtime.orchestrator.machine import find_cluster, find_value, keep_value, key_of, measure_cluster, place_file
from megatron.runtime.orchestrator.profile_layers import profile_model
from multimodal.cost.seconds.layer_profile import LayerProfile
from multimodal.data.global_batches import GlobalBatches
from multimodal.data.length_table import MOST_SAMPLES
from multimodal.model.transformer_config import BuildOptions
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.values.model_graph import ModelGraph
from multimodal.values.sample_lengths import SampleLengths

logger = logging.getLogger(__name__)
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

    Layers, built with `build`, are timed before ranks connect. Raises a BraidError on rank 0, RanksLostError on others.
    """
    first = _FirstRank(config, world, inputs) if world.rank == 0 else None
    if not world.from_first("links", lambda: first and first.look_at_machine(build)):
        cluster = measure_cluster(config, world, first.cluster if first else None)
        if first:
            first.cluster = cluster
    choice = Choice.from_dict(world.from_first("plan", lambda: first and first.choose()))
    with world.in_turn("plan"):
        planned = under_choice(config, choice)
    if first:
        first.tell(planned, choice)
    return Planned(planned, choice, first.request if first else None)


def under_choice(config: RunConfig, choice: Choice) -> RunConfig:
    """Return the configuration of the run under a plan, with the plan's files at a place that this rank can read."""
    room = f"plans/{key_of((choice.text, choice.cluster, choice.profile))}"
    cluster = config.training.cluster or place_file(room, CLUSTER_NAME, yaml.safe_dump(choice.cluster.to_dict(), sort_keys=False))
    profile = choice.profile
    layers = None if profile is None else place_file(room, LAYERS_NAME, json.dumps(profile.to_dict()))
    return planned_config(config, choice.run, plan=place_file(room, PLAN_NAME, choice.text), cluster=cluster, layer_costs=layers)


class _FirstRank:
    """The part of planning that rank 0 does for all ranks."""

    def __init__(self, config: RunConfig, world: World, inputs: Inputs) -> None:
        self._config, self._world_size = config, world.size
        self.cluster, self._are_links_known = find_cluster(config, world_size=world.size)
        lengths, vocab_size = tuple(first_lengths(config, inputs.data)), inputs.vocab_size
        self.request = build_request(
            config, graph=inputs.graph, cluster=self.cluster, lengths=lengths, vocab_size=vocab_size, num_ranks=world.size
        )
        self._layers = ""
        self._is_kept = False

    def look_at_machine(self, build: BuildOptions) -> bool:
        """Profile layers, unless --layer-costs has them, and return whether links are known."""
        given = self._config.training.layer_costs
        if given is None:
            profile, self._layers = profile_model(self.request, build)
        else:
            profile, self._layers = LayerProfile.from_file(given), f"layers of --layer-costs {given}"
        self.request = replace(self.request, profile=profile)
        return self._are_links_known or self._world_size == 1

    def choose(self) -> Choice:
        """Plan, or find the plan of an equal request."""
        self.request = request = replace(self.request, cluster=self.cluster)
        choice = find_value("choices", _key(request), Choice.from_dict)
        self._is_kept = choice is not None
        if choice is None:
            may_share = "data_parallel_sharding_strategy" not in self._config.given
            made_for = {"model": str(self._config.model.model), "data": " ".join(self._config.data.data_path)}
            name = str(self._config.training.cluster or CLUSTER_NAME)
            choice = choose_plan(request, may_share_weights=may_share, made_for=made_for, cluster_name=name)
            keep_choice(request, choice)
        return choice

    def tell(self, config: RunConfig, choice: Choice) -> None:
        cluster = self.cluster
        links = f"--cluster {self._config.training.cluster}" if self._config.training.cluster else _LINKS[self._are_links_known]
        machine = (
            f"machine: {self._world_size} ranks, {cluster.gpus_per_node} on a node, {cluster.peak_tflops:.3g} TFLOP/s, "
            f"{cluster.memory_gb:.3g} GB, {cluster.intra_node.bandwidth_gbytes_per_second:.3g} GB/s inside a node ({links}); "
            f"{self._layers}"
        )
        loads = self.request.loads
        of_units = ((name, loads.mean[name][0], each[:, 0].max()) for name, each in loads.of_samples.items())
        means = ", ".join(f"{name} {mean:.4g} (most {most:.4g})" for name, mean, most in of_units)
        data = f"plan auto: of {len(self.request.lengths)} samples, tokens in each: {means}"
        kept = " (as planned before)" if self._is_kept else ""
        plan, *others = choice.lines
        for line in (data, machine, f"{plan}; {config.parallelism.plan}{kept}", *others):
            logger.info("%s", line)


def keep_choice(request: PlanningRequest, choice: Choice) -> None:
    """Keep a plan for runs with the same request."""
    keep_value("choices", _key(request), choice.to_dict())


def _key(request: PlanningRequest) -> str:
    return key_of(repr(getattr(request, field.name)) for field in fields(request) if field.compare)


def first_lengths(config: RunConfig, data: DataSets, *, most: int | None = MOST_SAMPLES) -> Iterator[SampleLengths]:
    """Yield the first lengths of the training (held-out ones if there are none); most: None: those of the first step."""
    source, parts = data.train if len(data.train.source) else data.valid
    is_shuffled, seed = config.data.sample_program is None, config.training.seed
    batches = GlobalBatches(parts, config.training.global_batch_size, seed, shuffle=is_shuffled)
    drawn = (sample for step in (count() if most is not None else (0,)) for sample in batches.batch(step))
    for number, sample in enumerate(islice(drawn, None if most is None else min(most, len(source)))):
        yield replace(source.lengths(sample.source_index), sample_id=number)
