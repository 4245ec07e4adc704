"""Trains some steps in FP8 on one rank, and keeps the weights that products were computed with."""

from typing import Any

import numpy as np
import torch

from megatron.runtime.flags.configuration import OptimizerSettings
from megatron.runtime.gradients.unit_optimizer import build_optimizer_config
from megatron.runtime.training.trainer import build_scheduler
from tests.distributed.gradient_case import GradientCase, build_session, plan_case
from tests.engine_on_cpu.compiled import numbers_of

LEARNING_RATE = 0.05
"""Of Adam: by how much every weight changes in a step."""
Weights = dict[str, tuple[np.ndarray, np.ndarray]]
"""Name of a module that multiplies in FP8 -> its weight as a step found it, and as its products multiplied with it."""


def train_in_fp8(case: GradientCase, num_steps: int) -> list[Weights]:
    optimizer = build_optimizer_config(
        lr=LEARNING_RATE, min_lr=LEARNING_RATE, weight_decay=0.0, betas=(0.9, 0.9), eps=1e-8, clip_grad=0.0, dtype=case.dtype
    )
    session = build_session(case, optimizer=optimizer)
    build_scheduler(OptimizerSettings(lr=LEARNING_RATE, min_lr=LEARNING_RATE, weight_decay=0.0), session, train_iters=num_steps)
    found = []
    for _ in range(num_steps):
        session.zero_gradients()
        modules = {name: module for stage in session.stages.values() for name, module in stage.named_modules()}
        multiplies = {name: module for name, module in modules.items() if hasattr(module, "_fp8_workspaces")}
        before = {name: _values(module.weight) for name, module in multiplies.items() if hasattr(module, "weight")}
        session.forward_backward(plan_case(case))
        session.finish_gradients()
        used = {name: weight for name in before if (weight := modules[name]._fp8_workspaces.get("weight")) is not None}
        found.append({name: (before[name], _values(numbers_of(weight))) for name, weight in used.items()})
        session.step_optimizers(session.gradient_norm(), gathers_later=False)
    return found


def _values(weight: Any) -> np.ndarray:
    values: torch.Tensor = weight.detach().float()
    return values.numpy().copy()
