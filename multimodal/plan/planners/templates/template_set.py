"""Pipeline templates: whole model replicas for every number of nodes, whose sums give any number of nodes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from multimodal.values.arrays.rows import Floats
from multimodal.values.errors import PlanError
from multimodal.values.file_form import FileValue
from multimodal.values.parts.state_copies import EVERY_REPLICA
from multimodal.values.plan import MOST_RANKS
from multimodal.values.typed_reader import Plain
from multimodal.values.units.transformer import MOST_LAYERS

_COUNT = {"minimum": 1, "maximum": MOST_RANKS}
_LAYER = {"minimum": 0, "maximum": 2 * MOST_LAYERS}
_AT_LEAST_ZERO = {"minimum": 0}
MOST_MICROBATCHES = 2**40


@dataclass(frozen=True)
class PipelineTimes:
    """The stages of a pipeline, by the seconds of one microbatch."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]

    def seconds(self, num_microbatches: int) -> float:
        """Return the seconds of a step: the longest path through one of the stages.

        Like the step of `map_stages`, but the wait of a stage is the longest path to any of the stages after it and back, not
        only to the last. It is never more than the simulated step, and nearly always equal to it (docs/elasticity.md). 0
        without microbatches.
        """
        if num_microbatches <= self.num_stages:
            return float(self._few[num_microbatches])
        return float((self._fixed + num_microbatches * self._total).max())

    def most_microbatches(self, seconds: float) -> int:
        """Return the number of microbatches that fit into a step of this many seconds."""
        if seconds < self.seconds(self.num_stages + 1):
            return int(np.searchsorted(self._few, seconds * (1 + 1e-12), side="right")) - 1
        busy = self._total > 0
        counts = (seconds * (1 + 1e-12) - self._fixed[busy]) / self._total[busy]
        return int(min(counts.min(initial=MOST_MICROBATCHES), MOST_MICROBATCHES))

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.forward)

    @cached_property
    def _total(self) -> Floats:
        return np.asarray(np.array(self.forward) + np.array(self.backward))

    @cached_property
    def _few(self) -> Floats:
        """Seconds of steps of 0, 1, ... microbatches, up to the number of stages."""
        steps = [(self._path(count) + count * self._total).max() for count in range(1, self.num_stages + 1)]
        return np.maximum.accumulate(np.array([0.0, *steps]))

    @cached_property
    def _fixed(self) -> Floats:
        """Seconds of the path through each stage without its own microbatches, if these outnumber the stages."""
        return self._path(self.num_stages + 1)

    def _path(self, num_microbatches: int) -> Floats:
        count, total = self.num_stages, self._total
        stages = np.arange(count)
        behind = stages[None, :] - stages[:, None]  # [stage, a stage after it]
        before = np.concatenate(([0.0], np.cumsum(total)))
        way = np.where(behind > 0, before[None, 1:] - before[1:, None], 0.0)
        ahead = np.clip(behind, 0, num_microbatches - 1)
        waits = [(way - ahead * np.array(each)[:, None]).max(axis=1, initial=0.0) for each in (self.forward, self.backward)]
        has_steady_phase = count - 1 - stages < num_microbatches - 1
        return np.asarray(before[:-1] + np.where(has_steady_phase, waits[0] + waits[1], np.maximum(*waits)))


@dataclass(frozen=True, slots=True)
class TemplateStage:
    """Consecutive layers of the chain of all units' layers, on GPUs of one node, which share them by tensor parallelism."""

    first_layer: int = field(metadata=_LAYER)
    last_layer: int = field(metadata=_LAYER)
    gpus: int = field(metadata=_COUNT)
    node: int = field(metadata=_AT_LEAST_ZERO)
    """Index among the template's nodes."""
    forward_seconds: float = field(metadata=_AT_LEAST_ZERO)
    backward_seconds: float = field(metadata=_AT_LEAST_ZERO)

    @property
    def layers(self) -> range:
        """Its layers."""
        return range(self.first_layer, self.last_layer + 1)


@dataclass(frozen=True, slots=True)
class PipelineTemplate:
    """One replica of the whole model on a number of nodes, which uses all of their GPUs."""

    nodes: int = field(metadata=_COUNT)
    num_microbatches: int = field(metadata=_COUNT)
    """Microbatches of the step that it was planned for: its share of the batch by nodes."""
    iteration_seconds: float = field(metadata=_AT_LEAST_ZERO)
    """Seconds of a step of that many microbatches."""
    stages: tuple[TemplateStage, ...] = field(metadata={"min_entries": 1})

    @property
    def times(self) -> PipelineTimes:
        """The seconds of its stages."""
        return PipelineTimes(*zip(*((each.forward_seconds, each.backward_seconds) for each in self.stages), strict=True))


@dataclass(frozen=True, slots=True)
class Instance:
    """One replica that uses a template."""

    nodes: int = field(metadata=_COUNT)
    num_microbatches: int = field(metadata=_COUNT)


@dataclass(frozen=True, slots=True)
class ChainUnit:
    """The layers of one unit in the chain, in which the units follow each other."""

    name: str
    num_layers: int = field(metadata=_COUNT)
    """Including embedding, projector and head."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The number of nodes that may be lost at once, and the replicas that share each copy of the optimizer state."""

    fault_tolerance: int = field(metadata=_AT_LEAST_ZERO)
    """f: f + 1 copies of the state are kept, on different nodes."""
    replicas_per_copy: int = field(default=1, metadata=_COUNT)
    """Fewest replicas that share a copy; 1: every replica has all of the state."""

    @property
    def fewest_replicas(self) -> int:
        """Fewest replicas at any time."""
        return (self.fault_tolerance + 1) * self.replicas_per_copy

    def __str__(self) -> str:
        shared = f" with {self.replicas_per_copy} replicas to a copy of the state" if self.replicas_per_copy > 1 else ""
        return f"fault tolerance {self.fault_tolerance}{shared}"


@dataclass(frozen=True)
class TemplateSet(FileValue):
    """Templates for consecutive numbers of nodes, and their instances at the start."""

    file_error: ClassVar = PlanError
    has_short_lists: ClassVar = True
    num_nodes: int = field(metadata=_COUNT)
    gpus_per_node: int = field(metadata=_COUNT)
    tolerance: Tolerance = field(metadata={"inline": True})
    """The losses that the run survives."""
    micro_batch_size: int = field(metadata=_COUNT)
    num_microbatches: int = field(metadata=_COUNT)
    recompute_granularity: str | None
    chain: tuple[ChainUnit, ...] = field(metadata={"min_entries": 1})
    layer_bytes: tuple[int, ...] = field(metadata={"min_entries": 1, "minimum": 0})
    """Bytes of weights and optimizer state of each layer of the chain, which nodes copy."""
    instances: tuple[Instance, ...] = field(metadata={"min_entries": 1})
    templates: tuple[PipelineTemplate, ...] = field(metadata={"min_entries": 1})

    def __post_init__(self) -> None:
        sizes = [template.nodes for template in self.templates]
        if sizes != list(range(sizes[0], sizes[0] + len(sizes))):
            raise PlanError(f"templates must be of consecutive numbers of nodes, found {sizes}; plan the set anew")
        num_layers = sum(unit.num_layers for unit in self.chain)
        if len(self.layer_bytes) != num_layers:
            raise PlanError(f"layer_bytes has {len(self.layer_bytes)} entries for {num_layers} layers; plan the set anew")
        for index, template in enumerate(self.templates):
            self._check(template, index, num_layers)
        if unknown := [each.nodes for each in self.instances if each.nodes not in sizes]:
            raise PlanError(f"an instance has {unknown[0]} nodes, but templates have {sizes[0]} to {sizes[-1]}; correct it")
        if len(self.instances) < self.fewest_replicas or sum(each.nodes for each in self.instances) != self.num_nodes:
            raise PlanError(
                f"the instances must be at least {self.fewest_replicas} ({self.tolerance}) and have "
                f"{self.num_nodes} nodes together, found {[each.nodes for each in self.instances]}; plan the set anew"
            )

    def _check(self, template: PipelineTemplate, index: int, num_layers: int) -> None:
        where, place = f"template of {template.nodes} nodes", ("templates", index)
        bounds = [0, *(stage.last_layer + 1 for stage in template.stages)]
        if bounds[-1] != num_layers or any(
            stage.first_layer != first or stage.last_layer < first for stage, first in zip(template.stages, bounds, strict=False)
        ):
            raise PlanError(f"{where}: its stages must hold layers 0 to {num_layers - 1} once each, in order", place=place)
        used = [sum(stage.gpus for stage in template.stages if stage.node == node) for node in range(template.nodes)]
        if any(each != self.gpus_per_node for each in used) or any(each.node >= template.nodes for each in template.stages):
            raise PlanError(f"{where}: its stages must use the {self.gpus_per_node} GPUs of each node, found {used}", place=place)

    @property
    def least_nodes(self) -> int:
        """Nodes of the smallest template: n_0."""
        return self.templates[0].nodes

    @property
    def most_nodes(self) -> int:
        """Nodes of the largest template."""
        return self.templates[-1].nodes

    @property
    def fewest_replicas(self) -> int:
        """Fewest replicas at any time: those of f + 1 copies of the state."""
        return self.tolerance.fewest_replicas

    @property
    def num_state_copies(self) -> int:
        """Copies of the optimizer state that are kept: f + 1, or one on every replica."""
        return self.tolerance.fault_tolerance + 1 if self.tolerance.replicas_per_copy > 1 else EVERY_REPLICA

    @property
    def fewest_nodes(self) -> int:
        """Fewest nodes for all these replicas: (f + 1) n_0 if they do not share state."""
        return self.fewest_replicas * self.least_nodes

    @cached_property
    def times(self) -> Mapping[int, PipelineTimes]:
        """Nodes -> the pipeline of the template for that number."""
        return {template.nodes: template.times for template in self.templates}

    @property
    def step_seconds(self) -> float:
        """Seconds of a step of the slowest instance at the start."""
        return max(self.times[each.nodes].seconds(each.num_microbatches) for each in self.instances)

    @cached_property
    def layers_of_node(self) -> Mapping[tuple[int, int], tuple[int, ...]]:
        """(nodes of a template, index of one of them) -> the layers that it holds."""
        held: dict[tuple[int, int], list[int]] = {}
        for template in self.templates:
            for stage in template.stages:
                held.setdefault((template.nodes, stage.node), []).extend(stage.layers)
        return {place: tuple(layers) for place, layers in held.items()}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "TemplateSet":
        """Build from the plain form; raises PlanError naming the offending place."""
        return Plain(value, "templates", PlanError).build(cls)
