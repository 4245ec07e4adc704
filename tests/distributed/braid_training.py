"""The text-only case trained by Braid's executor."""

import numpy as np
import torch
import torch.distributed as dist

from megatron.runtime.feed.step_planner import plan_step
from megatron.runtime.gradients.unit_optimizer import build_optimizer_config
from megatron.runtime.session import Session, SessionOptions
from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.model.transformer_config import BuildOptions, Precision
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
    (stage,) = _session(single_rank_plan(GRAPH)).stages.values()
    return {name: parameter.detach().numpy().copy() for name, parameter in stage.named_parameters()}


def braid_losses(plan: Plan) -> list[float]:
    """Train 20 steps on this rank; returns its share of the summed losses."""
    session = _session(plan)
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
            schedules=session.schedules(),
            rank=dist.get_rank(),
            source_index={index: index for index in range(len(source))},
        )
        losses.append(session.forward_backward(step).loss_sum / step.num_target_tokens)
        session.finish_gradients()
        session.update(gathers_later=False)
    return losses


def _session(plan: Plan) -> Session:
    optimizer = build_optimizer_config(
        lr=LEARNING_RATE,
        min_lr=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        betas=BETAS,
        eps=EPSILON,
        clip_grad=CLIP_GRAD,
        dtype=torch.float64,
    )
    build = BuildOptions(Precision(torch.float64))
    session = Session(SessionOptions(GRAPH, build, VOCAB_SIZE, seed=SEED, timeout=TIMEOUT, optimizer=optimizer), plan=plan)
    for group in (group for unit in session.optimizers.values() for group in unit.param_groups):
        group["weight_decay"] = WEIGHT_DECAY * group["wd_mult"]  # what the learning rate schedule does in each step
    return session
