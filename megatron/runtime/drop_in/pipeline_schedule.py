"""The schedule of a loop's step: that of one pipeline, or of modules on ranks of their own whose outputs meet in an LLM."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch.distributed as dist

from multimodal.schedule.build_schedule import build_schedule
from multimodal.schedule.builders import BUILDERS
from multimodal.values.action import BACKWARDS, ActionKind
from multimodal.values.assignment import Assignment, Atom, Microbatch
from multimodal.values.errors import ConfigError
from multimodal.values.model_graph import ModelGraph, Role, Transformer, Unit
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan, split_layers
from multimodal.values.schedule import Lane, Schedule
from multimodal.values.shape import StepShape
from multimodal.values.units.items import ImageInput

UNIT = "model"
"""Name of a pipeline that is all of the loop's model."""
_MESSAGES = (ActionKind.SEND_FORWARD, ActionKind.RECEIVE_FORWARD, ActionKind.SEND_BACKWARD, ActionKind.RECEIVE_BACKWARD)
RUNNABLE = frozenset((ActionKind.FORWARD, *BACKWARDS, *_MESSAGES, ActionKind.REDUCE_GRADIENTS))
"""Kinds of action that a loop's own forward step and model allow; split backwards, if its layers can delay weight gradients."""


class LoopModule(NamedTuple):
    """One module of the loop's model, with a pipeline for each replica."""

    name: str
    replicas: tuple[tuple[tuple[int, ...], ...], ...]
    """The tensor parallel ranks of every pipeline rank of every replica."""
    num_chunks: int = 1
    """Model chunks per rank (virtual pipeline parallel size); chunk c of pipeline rank r is virtual stage c x pp + r."""

    @property
    def num_stages(self) -> int:
        """Pipeline parallel size."""
        return len(self.replicas[0])

    @property
    def is_here(self) -> bool:
        """True if this rank is in the module."""
        return any(dist.get_rank() in ranks for replica in self.replicas for ranks in replica)


@dataclass(frozen=True)
class PipelineShape:
    """The inputs of a step's schedule, besides the builder."""

    modules: tuple[LoopModule, ...]
    """The last one computes the loss, from the outputs of all others; each microbatch of theirs goes to that of its number."""
    num_microbatches: int
    forward_only: bool

    @property
    def llm(self) -> LoopModule:
        """The module that computes the loss."""
        return self.modules[-1]

    @property
    def has_messages(self) -> bool:
        """True if a microbatch passes through several ranks."""
        return len(self.modules) > 1 or self.llm.num_stages > 1


@lru_cache(maxsize=64)
def build_pipeline_schedule(name: str, *, shape: PipelineShape) -> Schedule:
    """Build, lower and validate a schedule, alike on all ranks.

    Raises ConfigError for actions beside `RUNNABLE`, ScheduleError and PlanError.
    """
    schedule = build_schedule(BUILDERS[name], step_of_pipeline(shape))
    for lane in schedule.lanes:
        _check_lane(lane, name=name)
    return schedule


def step_of_pipeline(shape: PipelineShape) -> StepShape:
    """Describe a step: one sample per microbatch, with an item of each encoder's replica; all virtual stages equally long."""
    units, plans, placed, width = [], {}, {}, len(shape.llm.replicas)
    for module in shape.modules:
        num_stages, is_llm = module.num_stages * module.num_chunks, module is shape.llm
        transformer = Transformer(num_layers=num_stages, hidden_size=4, num_attention_heads=1, ffn_hidden_size=1)
        unit = Unit(module.name, Role.BACKBONE if is_llm else Role.ENCODER, transformer, None if is_llm else ImageInput())
        ranges = split_layers(unit.layers, num_stages=num_stages)
        plans[module.name] = UnitPlan(
            tuple(
                Replica(tuple(Stage(ranks, ranges[rank :: module.num_stages]) for rank, ranks in enumerate(each)))
                for each in module.replicas
            ),
            tensor_parallel_size=len(module.replicas[0][0]),
        )
        placed[module.name] = tuple(
            tuple(_atoms(index * width, replica, len(module.replicas), width) for index in range(shape.num_microbatches))
            for replica in range(len(module.replicas))
        )
        units.append(unit)
    graph = ModelGraph(tuple(units), tuple((module.name, shape.llm.name) for module in shape.modules[:-1]))
    return Assignment(placed).shape(graph, Plan(plans), forward_only=shape.forward_only)


def _atoms(first: int, replica: int, size: int, width: int) -> Microbatch:
    """Return what one of `size` replicas has of `width` samples: equally many, or equal parts of one."""
    if size > width:
        return (Atom(first + replica // (size // width), replica % (size // width)),)
    return tuple(Atom(first + replica * (width // size) + index) for index in range(width // size))


def _check_lane(lane: Lane, *, name: str) -> None:
    for action in lane.actions:
        if action.kind not in RUNNABLE or action.subset >= 0:
            what = "backwards in sample subsets" if action.subset >= 0 else f"actions of kind {action.kind.name} ({action.kind})"
            raise ConfigError(
                f"schedule '{name}' has {what}, but a training loop written for Megatron runs each microbatch's forward "
                "whole, and its backward in halves at most; give patches.apply(schedule=...) '1f1b', 'zb-h1' or another such one"
            )
    forwards = [action for action in lane.actions if action.kind is ActionKind.FORWARD]
    for unit, stage in sorted({(action.unit, action.stage) for action in forwards}):
        microbatches = [action.microbatch for action in forwards if (action.unit, action.stage) == (unit, stage)]
        if any(first > second for first, second in pairwise(microbatches)):
            raise ConfigError(
                f"schedule '{name}' runs the microbatches of virtual stage {stage} in the order {microbatches}, but the loop's "
                "data iterators give them in ascending order; give patches.apply(schedule=...) a schedule that keeps it"
            )
