"""Times what a step takes beside its layers on the device at hand: the executor's own work, and the optimizer's."""

from statistics import median

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.runtime import platform
from megatron.runtime.communication.units import Membership
from megatron.runtime.emulation.emulated_run import emulated_session, emulated_step
from megatron.runtime.gradients.gradients import UnitGradients, clip_gradients, global_gradient_norm
from megatron.runtime.gradients.unit_optimizer import build_optimizer_config, build_unit_optimizer
from megatron.runtime.profiling.profiler import seconds_of
from megatron.runtime.session import Session
from megatron.runtime.step.step import Step
from multimodal.cost.seconds.layer_curves import PackedSize
from multimodal.model.unit_stage import UnitStage
from multimodal.plan.colocated import plan_colocated
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.model_graph import ModelGraph

_FEW, _MANY = 4, 20
"""Microbatches of the two steps whose difference tells what one computation takes."""
_NUM_TOKENS = 8


def time_runtime(graph: ModelGraph, *, num_repetitions: int) -> tuple[float, float]:
    """Return the seconds of a step without computations, and those that each forward or backward adds.

    All units run on this one rank, with the real executor, broker and gradient buffers, and with stages that compute nothing.
    Messages between ranks are the cluster's to say. torch.distributed must be up with one rank; any backend will do.
    """
    session = emulated_session(graph, plan_colocated(graph, sizes={}, world_size=1), seconds=lambda action: 0.0)
    steps = {count: _small_step(session, count) for count in (_FEW, _MANY)}
    seconds = {count: median(_run(session, step) for _ in range(num_repetitions)) for count, step in steps.items()}
    num_more = 2 * len(graph.units) * (_MANY - _FEW)
    slope = max(0.0, seconds[_MANY] - seconds[_FEW]) / num_more
    return max(0.0, seconds[_FEW] - slope * 2 * len(graph.units) * _FEW), slope


def time_update(stage: UnitStage, *, groups: ProcessGroupCollection, num_repetitions: int) -> tuple[PackedSize, float]:
    """Return how many weights a trainable stage has (as the size of a fit), and the seconds of updating them.

    As the trainer does: gradient norm, clipping, AdamW with its state in buffers.
    """
    dtype = stage.options.precision.params_dtype
    membership = Membership(stage.unit.name, 0, 0, 0, 0, groups, None)
    gradients = UnitGradients({0: stage}, membership=membership, is_sharded=dtype != torch.float64)
    config = build_optimizer_config(
        lr=0.0, min_lr=0.0, weight_decay=0.01, betas=(0.9, 0.95), eps=1e-8, clip_grad=1.0, dtype=dtype
    )
    optimizer = build_unit_optimizer(gradients, config=config)
    assert optimizer is not None, "nothing is trained"

    def update() -> None:
        optimizer.prepare_grads()
        global_gradient_norm([(optimizer, True)], device=platform.device())
        clip_gradients(optimizer.get_parameters(), norm=2.0, max_norm=1.0)
        optimizer.step_with_ready_grads()

    seconds_of(update)  # not measured: the optimizer's state is made
    num_weights = sum(parameter.numel() for parameter in stage.parameters())
    return PackedSize(num_weights), median(seconds_of(update) for _ in range(num_repetitions))


def _run(session: Session, step: Step) -> float:
    def run() -> None:
        session.forward_backward(step)
        session.finish_gradients()

    return seconds_of(run)


def _small_step(session: Session, num_microbatches: int) -> Step:
    """One sample per microbatch, with an item of every other unit."""
    graph = session.graph
    encoders = {unit.name: index for index, unit in enumerate(graph.encoders)}
    assignment = Assignment(
        {
            unit.name: (tuple((Atom(sample, encoders.get(unit.name, -1)),) for sample in range(num_microbatches)),)
            for unit in graph.units
        }
    )
    return emulated_step(
        graph, session.plan, assignment, session.schedules().schedule(assignment), num_tokens=_NUM_TOKENS, rank=0
    )
