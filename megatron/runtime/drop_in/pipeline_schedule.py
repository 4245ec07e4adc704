"""The schedule of one Megatron pipeline: one unit with one replica, and a virtual stage for each model chunk of each rank."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from multimodal.schedule.build_schedule import build_schedule
from multimodal.schedule.builders import BUILDERS
from multimodal.values.action import ActionKind
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.errors import ConfigError
from multimodal.values.model_graph import ModelGraph, Role, Transformer, Unit
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan, split_layers
from multimodal.values.schedule import Lane, Schedule
from multimodal.values.shape import StepShape

UNIT = "model"
"""Name of the one unit."""
RUNNABLE = frozenset(
    {
        *(ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.REDUCE_GRADIENTS),
        *(ActionKind.SEND_FORWARD, ActionKind.RECEIVE_FORWARD, ActionKind.SEND_BACKWARD, ActionKind.RECEIVE_BACKWARD),
    }
)
"""Kinds of action that a loop's own forward step and model allow."""


@dataclass(frozen=True)
class PipelineShape:
    """The inputs of a pipeline's schedule, besides the builder."""

    num_stages: int
    """Pipeline parallel size."""
    num_chunks: int
    """Model chunks per rank (virtual pipeline parallel size); 1 without interleaving."""
    num_microbatches: int
    forward_only: bool

    @property
    def num_virtual_stages(self) -> int:
        """Model chunks that a microbatch passes through; chunk c of rank r is virtual stage c x num_stages + r."""
        return self.num_stages * self.num_chunks


@lru_cache(maxsize=64)
def build_pipeline_schedule(name: str, *, shape: PipelineShape) -> Schedule:
    """Build, lower and validate the schedule `name` for one pipeline; lane r is what its r-th rank executes.

    Every rank of a pipeline (one rank per stage: the other tensor, context and data parallel ranks have their own pipelines)
    computes the same schedule. The result is cached, as a training loop asks for the same shape in every step.

    Raises ConfigError if the schedule needs actions beside `RUNNABLE`, ScheduleError or PlanError if it cannot be built.
    """
    schedule = build_schedule(BUILDERS[name], step_of_pipeline(shape))
    for lane in schedule.lanes:
        _check_lane(lane, name=name)
    return schedule


def step_of_pipeline(shape: PipelineShape) -> StepShape:
    """Describe a pipeline: ranks count from 0 inside it, every virtual stage has one layer, every microbatch one sample.

    Layers and sizes of the loop's own model are unknown here; all virtual stages count as equally long.
    """
    transformer = Transformer(num_layers=shape.num_virtual_stages, hidden_size=2, num_attention_heads=1, ffn_hidden_size=1)
    unit = Unit(UNIT, Role.BACKBONE, transformer)
    ranges = split_layers(unit.layers, num_stages=shape.num_virtual_stages)
    stages = tuple(Stage((rank,), ranges[rank :: shape.num_stages]) for rank in range(shape.num_stages))
    microbatches = tuple((Atom(index),) for index in range(shape.num_microbatches))
    plan, assignment = Plan({UNIT: UnitPlan((Replica(stages),))}), Assignment({UNIT: (microbatches,)})
    return assignment.shape(ModelGraph((unit,)), plan, forward_only=shape.forward_only)


def _check_lane(lane: Lane, *, name: str) -> None:
    for action in lane.actions:
        if action.kind not in RUNNABLE or action.subset >= 0:
            what = "backwards in sample subsets" if action.subset >= 0 else f"actions of kind {action.kind.name} ({action.kind})"
            raise ConfigError(
                f"schedule '{name}' has {what}, but a training loop written for Megatron runs each microbatch's forward and "
                "backward whole; give patches.apply(schedule=...) '1f1b', 'gpipe' or another schedule that does"
            )
    forwards = [action for action in lane.actions if action.kind is ActionKind.FORWARD]
    for stage in sorted({action.stage for action in forwards}):
        microbatches = [action.microbatch for action in forwards if action.stage == stage]
        if any(first > second for first, second in pairwise(microbatches)):
            raise ConfigError(
                f"schedule '{name}' runs the microbatches of virtual stage {stage} in the order {microbatches}, but the loop's "
                "data iterators give them in ascending order; give patches.apply(schedule=...) a schedule that keeps it"
            )
