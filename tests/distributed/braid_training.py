"""The text-only case trained by Braid's executor."""

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron.runtime.execution.assembly import RankRuntime, assemble
from megatron.runtime.feed.step_planner import plan_step
from megatron.runtime.gradients.gradients import clip_gradients, global_gradient_norm
from megatron.runtime.gradients.unit_optimizer import build_optimizer_config, build_unit_optimizer
from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.model.transformer_config import BuildOptions, Precision
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.schedule_cache import ScheduleCache
from multimodal.values.plan import Plan
from tests.distributed.gradient_case import SEED, single_rank_plan
from tests.distributed.rank_pool import TIMEOUT
from tests.distributed.text_only_case import (
    BETAS,
    CLIP_GRAD,
    EPSILON,
    GRAPH,
    LEARNING_RATE,
    MICRO_BATCH_SIZE,
    NUM_STEPS,
    VOCAB_SIZE,
    WEIGHT_DECAY,
    batch_of_step,
)


def initial_weights() -> dict[str, np.ndarray]:
    """Every parameter whole, under Braid's names; on one rank."""
    (stage,) = _assemble(single_rank_plan(GRAPH)).stages.values()
    return {name: parameter.detach().numpy().copy() for name, parameter in stage.named_parameters()}


def braid_losses(plan: Plan) -> list[float]:
    """Train 20 steps on this rank; returns its share of the summed losses."""
    runtime = _assemble(plan)
    optimizer = _build_optimizer(runtime)
    schedules = ScheduleCache(GRAPH, plan, BUILDERS["1f1b"])
    losses = []
    for number in range(NUM_STEPS):
        source = batch_of_step(number)
        lengths = [source.lengths(index) for index in range(len(source))]
        assignment = BALANCERS["orchmllm"](
            lengths, graph=GRAPH, plan=plan, options=BalanceOptions(micro_batch_size=MICRO_BATCH_SIZE)
        )
        step = plan_step(
            source,
            lengths=lengths,
            assignment=assignment,
            schedules=schedules,
            rank=dist.get_rank(),
            source_index={index: index for index in range(len(source))},
        )
        runtime.zero_gradients()
        optimizer.zero_grad()
        losses.append(runtime.executor.execute(step, is_training=True).loss_sum / step.num_target_tokens)
        runtime.finish_gradients()
        _update(runtime, optimizer)
    return losses


def _assemble(plan: Plan) -> RankRuntime:
    return assemble(
        GRAPH,
        plan,
        rank=dist.get_rank(),
        world_size=plan.num_ranks,
        options=BuildOptions(Precision(torch.float64)),
        vocab_size=VOCAB_SIZE,
        seed=SEED,
        timeout=TIMEOUT,
    )


def _build_optimizer(runtime: RankRuntime) -> MegatronOptimizer:
    config = build_optimizer_config(
        lr=LEARNING_RATE,
        min_lr=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        betas=BETAS,
        eps=EPSILON,
        clip_grad=CLIP_GRAD,
        dtype=torch.float64,
    )
    optimizer = build_unit_optimizer(runtime.gradients["llm"], config=config)
    assert optimizer is not None
    for group in optimizer.param_groups:  # what the learning rate schedule does in each step
        group["weight_decay"] = WEIGHT_DECAY * group["wd_mult"]
    return optimizer


def _update(runtime: RankRuntime, optimizer: MegatronOptimizer) -> None:
    optimizer.prepare_grads()
    counts = runtime.memberships["llm"].groups.dp_cp.rank() == 0
    norm = global_gradient_norm([(optimizer, counts)], device=torch.device("cpu"))
    clip_gradients(optimizer.get_parameters(), norm=norm, max_norm=CLIP_GRAD)
    optimizer.step_with_ready_grads()
