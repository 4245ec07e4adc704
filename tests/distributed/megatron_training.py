"""The text-only case trained by megatron-core alone: its GPTModel under its own pipeline schedule, and torch's AdamW."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.runtime.platform import CpuTorch
from tests.distributed.random_source import RandomSource
from tests.distributed.text_only_case import (
    BETAS,
    CLIP_GRAD,
    EPSILON,
    GRAPH,
    LEARNING_RATE,
    MICRO_BATCH_SIZE,
    NUM_STEPS,
    SEQUENCE_LENGTH,
    VOCAB_SIZE,
    WEIGHT_DECAY,
    batch_of_step,
)


def megatron_losses(weights: Mapping[str, np.ndarray]) -> list[float]:
    """Train 20 steps on this rank, one pipeline stage of as many as there are ranks; returns the summed losses (last stage only).

    Replaced are: tensors that the schedule makes on device "cuda", the CUDA random states for a dropout of zero, and the cross
    entropy's cast to float32.
    """
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=dist.get_world_size())
    uncast = staticmethod(lambda logits: (logits.clone(), logits.max(dim=-1)[0]))
    try:
        with (
            patch.object(schedules, "torch", CpuTorch(torch)),
            patch.object(CudaRNGStatesTracker, "fork", lambda *_: nullcontext()),
            patch.object(VocabParallelCrossEntropy, "calculate_logits_max", uncast),
        ):
            return _train(weights)
    finally:
        parallel_state.destroy_model_parallel()


def _train(weights: Mapping[str, np.ndarray]) -> list[float]:
    model = _build_model(weights)
    optimizer = _build_optimizer(model)
    losses = []
    for number in range(NUM_STEPS):
        source = batch_of_step(number)
        num_targets = sum(shape.num_target_tokens for shape in source.shapes)
        optimizer.zero_grad()
        found = schedules.forward_backward_pipelining_without_interleaving(
            forward_step_func=_forward_step,
            data_iterator=_microbatches(source),
            model=model,
            num_microbatches=len(source) // MICRO_BATCH_SIZE,
            seq_length=SEQUENCE_LENGTH,
            micro_batch_size=MICRO_BATCH_SIZE,
        )
        losses.append(sum(found) / num_targets)
        _scale_gradients(model, num_targets=num_targets)
        optimizer.step()
    return losses


def _build_model(weights: Mapping[str, np.ndarray]) -> GPTModel:
    shape = GRAPH.backbone.transformer
    config = TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        ffn_hidden_size=shape.ffn_hidden_size,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        pipeline_model_parallel_size=dist.get_world_size(),
        pipeline_dtype=torch.float64,
        params_dtype=torch.float64,
        perform_initialization=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        calculate_per_token_loss=True,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCAB_SIZE,
        max_sequence_length=SEQUENCE_LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        rotary_base=int(shape.rotary_base),
    ).double()
    channels = torch.arange(0, shape.head_channels, 2, dtype=torch.float64)
    model.rotary_pos_emb.inv_freq = 1.0 / shape.rotary_base ** (channels / shape.head_channels)
    first_layer = dist.get_rank() * shape.num_layers // dist.get_world_size()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(weights[_braid_name(name, first_layer=first_layer)]))
    return model


def _braid_name(name: str, *, first_layer: int) -> str:
    head = f"layers.{GRAPH.backbone.transformer.num_layers + 1}"
    parts = name.split(".")
    if parts[0] == "embedding":
        return ".".join(["layers.0", *parts[1:]])
    if parts[:2] == ["decoder", "layers"]:
        return ".".join([f"layers.{first_layer + int(parts[2]) + 1}", *parts[3:]])
    if parts[:2] == ["decoder", "final_layernorm"]:
        return ".".join([head, "norm", *parts[2:]])
    return ".".join([head, *parts])


def _build_optimizer(model: GPTModel) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in model.parameters() if (p.dim() > 1) == decays], "weight_decay": WEIGHT_DECAY * decays}
        for decays in (True, False)
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON)


def _microbatches(source: RandomSource) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for first in range(0, len(source), MICRO_BATCH_SIZE):
        texts = [source.text(index) for index in range(first, first + MICRO_BATCH_SIZE)]
        columns = ("token_ids", "labels", "is_target")
        token_ids, labels, is_target = (torch.from_numpy(np.stack([getattr(t, column) for t in texts])) for column in columns)
        yield token_ids, labels, is_target


def _forward_step(batches: Iterator[tuple[Tensor, Tensor, Tensor]], model: GPTModel) -> tuple[Tensor, Callable[..., Any]]:
    token_ids, labels, is_target = next(batches)
    positions = torch.arange(SEQUENCE_LENGTH).expand_as(token_ids)
    is_hidden = torch.ones(1, 1, SEQUENCE_LENGTH, SEQUENCE_LENGTH, dtype=torch.bool).triu(1)
    return model(token_ids, positions, is_hidden, labels=labels), partial(_loss, is_target)


def _loss(is_target: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, float]:
    loss_sum = (losses * is_target).sum()
    return loss_sum, is_target.sum().int(), float(loss_sum)


def _scale_gradients(model: GPTModel, *, num_targets: int) -> None:
    """Divide by the number of target tokens, as megatron-core's `finalize_model_grads` does; clip by the norm over all stages."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(gradients) == len(list(model.parameters()))
    for gradient in gradients:
        gradient.div_(num_targets)
    square = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
    dist.all_reduce(square)
    coefficient = CLIP_GRAD / (float(square.sqrt()) + 1e-6)
    assert coefficient < 1, "clipping must matter, or it is not compared"
    for gradient in gradients:
        gradient.mul_(coefficient)
