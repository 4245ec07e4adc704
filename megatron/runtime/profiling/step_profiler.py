"""Times what a step takes beside its layers on the device at hand: the executor's own work, and the optimizer's."""

from datetime import timedelta
from statistics import median

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.runtime import platform
from megatron.runtime.communication.units import Membership
from megatron.runtime.emulation.emulated_inputs import with_emulated_inputs
from megatron.runtime.execution.assembly import RankRuntime, assemble
from megatron.runtime.gradients.gradients import UnitGradients, clip_gradients, global_gradient_norm
from megatron.runtime.gradients.unit_optimizer import build_optimizer_config, build_unit_optimizer
from megatron.runtime.profiling.profiler import seconds_of
from megatron.runtime.step.step import Step
from multimodal.cost.packed_size import PackedSize
from multimodal.model.transformer_config import BuildOptions, Precision
from multimodal.model.unit_stage import UnitStage
from multimodal.plan.colocated import plan_colocated
from multimodal.schedule.build_schedule import build_schedule
from multimodal.schedule.builders import BUILDERS
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.model_graph import ModelGraph, Role
from multimodal.values.sample_lengths import ItemLengths, SampleLengths

_FEW, _MANY = 4, 20
"""Microbatches of the two steps whose difference tells what one computation takes."""
_NUM_TOKENS = 8


def time_runtime(graph: ModelGraph, *, num_repetitions: int) -> tuple[float, float]:
    """Return the seconds of a step without computations, and those that each forward or backward adds.

    All units run on this one rank, with the real executor, broker and gradient buffers, and with stages that compute nothing.
    Messages between ranks are the cluster's to say. torch.distributed must be up with one rank; any backend will do.
    """
    plan = plan_colocated(graph, sizes={}, world_size=1)
    runtime = assemble(
        graph,
        plan,
        rank=0,
        world_size=1,
        options=BuildOptions(Precision(torch.float32)),
        vocab_size=128,
        seed=0,
        timeout=timedelta(minutes=1),
        seconds=lambda action: 0.0,
    )
    steps = {count: _empty_step(graph, count) for count in (_FEW, _MANY)}
    seconds = {count: median(_run(runtime, step) for _ in range(num_repetitions)) for count, step in steps.items()}
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


def _run(runtime: RankRuntime, step: Step) -> float:
    def run() -> None:
        runtime.zero_gradients()
        runtime.executor.execute(step, is_training=True)
        runtime.finish_gradients()

    return seconds_of(run)


def _empty_step(graph: ModelGraph, num_microbatches: int) -> Step:
    """One sample per microbatch, with an item of every other unit."""
    items = [
        ItemLengths(unit.name, _NUM_TOKENS, _NUM_TOKENS if unit.role is Role.ENCODER else 0)
        for unit in graph.units
        if unit is not graph.backbone
    ]
    encoders = {item.unit: index for index, item in enumerate(items) if graph.unit(item.unit).role is Role.ENCODER}
    assignment = Assignment(
        {
            unit.name: (tuple((Atom(sample, encoders.get(unit.name, -1)),) for sample in range(num_microbatches)),)
            for unit in graph.units
        }
    )
    plan = plan_colocated(graph, sizes={}, world_size=1)
    step = Step(
        graph=graph,
        assignment=assignment,
        schedule=build_schedule(BUILDERS["1f1b"], graph, plan, assignment),
        routes=assignment.routes(graph),
        lengths={sample: SampleLengths(sample, tuple(items), _NUM_TOKENS, 1) for sample in range(num_microbatches)},
        inputs={},
        context_parallel_sizes=dict.fromkeys(graph.unit_names, 1),
    )
    return with_emulated_inputs(step, plan=plan, rank=0)
