"""A compared case without images trained by megatron-core alone: GPTModel, its own pipeline schedule, and torch's AdamW."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
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
from megatron.core.transformer import utils as transformer_utils
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Module

from megatron.runtime.platform import CpuTorch
from tests.distributed import braid_training
from tests.distributed.drop_in_training import PLAIN, megatron_groups
from tests.distributed.random_source import RandomSource


def megatron_losses(case: braid_training.ComparedCase, weights: Mapping[str, np.ndarray]) -> list[float]:
    """Train 20 steps on this rank, a pipeline stage of as many as there are ranks; returns the losses that it has summed up."""
    with megatron_groups(1, dist.get_world_size()), megatron_without_cuda():
        training = MegatronTraining(case, weights)
        return [training.train_step(training.prepare(case.batch_of_step(number))) for number in range(braid_training.NUM_STEPS)]


@contextmanager
def megatron_without_cuda() -> Iterator[None]:
    """Replace, beside what a run replaces, what Megatron's own loops and models need CUDA or float32 for.

    That is: tensors that schedule and masks make on device "cuda", the CUDA random states for a dropout of zero, and the cross
    entropy's cast to float32.
    """
    uncast = staticmethod(lambda logits: (logits.clone(), logits.max(dim=-1)[0]))
    with ExitStack() as stack:
        stack.enter_context(patch.object(schedules, "torch", CpuTorch(torch)))
        stack.enter_context(patch.object(transformer_utils, "torch", CpuTorch(torch)))
        stack.enter_context(patch.object(CudaRNGStatesTracker, "fork", lambda *_: nullcontext()))
        stack.enter_context(patch.object(VocabParallelCrossEntropy, "calculate_logits_max", uncast))
        yield


class MegatronTraining:
    """One rank of a run, whose pipeline stages are all ranks; `parallel_state` is set up for it."""

    def __init__(self, case: braid_training.ComparedCase, weights: Mapping[str, np.ndarray]) -> None:
        self.case, self.model = case, _build_model(case, weights)
        self.optimizer = build_optimizer(self.model)

    def prepare(self, source: RandomSource) -> list[tuple[Tensor, Tensor, Tensor]]:
        return list(_microbatches(source))

    def train_step(self, microbatches: Sequence[tuple[Tensor, Tensor, Tensor]]) -> float:
        """Train on a global batch; returns the loss that this rank has summed up, 0 but on the last stage."""
        num_targets = sum(shape.num_target_tokens for shape in self.case.shapes)
        self.optimizer.zero_grad()
        found = schedules.forward_backward_pipelining_without_interleaving(
            forward_step_func=_forward_step,
            data_iterator=iter(microbatches),
            model=self.model,
            num_microbatches=len(microbatches),
            seq_length=self.case.sequence_length,
            micro_batch_size=braid_training.MICRO_BATCH_SIZE,
        )
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        assert len(gradients) == len(list(self.model.parameters()))
        scale_gradients([(gradients, 1)], num_targets=num_targets)
        self.optimizer.step()
        return sum(found) / num_targets


def language_config(case: braid_training.ComparedCase, *, num_stages: int, **more: Any) -> TransformerConfig:
    shape = case.graph.backbone.transformer
    names = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size")
    sizes = {name: getattr(shape, name) for name in names}
    kind = {"normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    kind |= {"add_bias_linear": False, "add_qkv_bias": True}
    how = {**PLAIN, "pipeline_dtype": torch.float64, "params_dtype": torch.float64, "calculate_per_token_loss": True}
    return TransformerConfig(pipeline_model_parallel_size=num_stages, **sizes, **kind, **how, **more)


def language_arguments(case: braid_training.ComparedCase) -> dict[str, Any]:
    return {
        "transformer_layer_spec": get_gpt_layer_local_spec(normalization="RMSNorm"),
        "vocab_size": braid_training.VOCAB_SIZE,
        "max_sequence_length": case.sequence_length,
        "position_embedding_type": "rope",
        "rotary_base": int(case.graph.backbone.transformer.rotary_base),
    }


def load_language_weights(model: GPTModel, case: braid_training.ComparedCase, weights: Mapping[str, np.ndarray]) -> None:
    """Give a pipeline stage the weights that Braid's LLM begins with, and rotary angles in float64.

    Tensor parallel ranks all get the first of them.
    """
    shape = case.graph.backbone.transformer
    channels = torch.arange(0, shape.head_channels, 2, dtype=torch.float64)
    model.rotary_pos_emb.inv_freq = 1.0 / shape.rotary_base ** (channels / shape.head_channels)
    first_layer = model.decoder.layers[0].layer_number - 1
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = torch.from_numpy(weights[_braid_name(name, case, first_layer=first_layer)])
            parameter.copy_(whole[tuple(map(slice, parameter.shape))])


def _build_model(case: braid_training.ComparedCase, weights: Mapping[str, np.ndarray]) -> GPTModel:
    model = GPTModel(
        language_config(case, num_stages=dist.get_world_size()),
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        **language_arguments(case),
    ).double()
    load_language_weights(model, case, weights)
    return model


def _braid_name(name: str, case: braid_training.ComparedCase, *, first_layer: int) -> str:
    head = f"layers.{case.graph.backbone.transformer.num_layers + 1}"
    parts = name.split(".")
    if parts[0] == "embedding":
        return ".".join(["layers.0", *parts[1:]])
    if parts[:2] == ["decoder", "layers"]:
        return ".".join([f"layers.{first_layer + int(parts[2]) + 1}", *parts[3:]])
    if parts[:2] == ["decoder", "final_layernorm"]:
        return ".".join([head, "norm", *parts[2:]])
    return ".".join([head, *parts])


def build_optimizer(model: Module) -> torch.optim.Optimizer:
    """Return AdamW, with weight decay for matrices."""
    groups = [
        {
            "params": [p for p in model.parameters() if (p.dim() > 1) == decays],
            "weight_decay": braid_training.WEIGHT_DECAY * decays,
        }
        for decays in (True, False)
    ]
    return torch.optim.AdamW(groups, lr=braid_training.LEARNING_RATE, betas=braid_training.BETAS, eps=braid_training.EPSILON)


def _microbatches(source: RandomSource) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for first in range(0, len(source), braid_training.MICRO_BATCH_SIZE):
        texts = [source.text(index) for index in range(first, first + braid_training.MICRO_BATCH_SIZE)]
        columns = ("token_ids", "labels", "is_target")
        token_ids, labels, is_target = (torch.from_numpy(np.stack([getattr(t, column) for t in texts])) for column in columns)
        yield token_ids, labels, is_target


def _forward_step(batches: Iterator[tuple[Tensor, Tensor, Tensor]], model: GPTModel) -> tuple[Tensor, Callable[..., Any]]:
    token_ids, labels, is_target = next(batches)
    positions = torch.arange(token_ids.shape[1]).expand_as(token_ids)
    is_hidden = torch.ones(1, 1, *positions.shape[1:] * 2, dtype=torch.bool).triu(1)
    return model(token_ids, positions, is_hidden, labels=labels), partial(summed_loss, is_target)


def summed_loss(is_target: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, float]:
    """Return the sum over target tokens, their number and the sum to report, as Megatron asks of a loss function."""
    loss_sum = (losses * is_target).sum()
    return loss_sum, is_target.sum().int(), float(loss_sum)


def scale_gradients(gradients: Sequence[tuple[Sequence[Tensor], int]], *, num_targets: int) -> None:
    """Divide by the number of target tokens, as megatron-core's `finalize_model_grads` does; clip by the norm over all ranks.

    gradients: of this rank's modules, each with the number of ranks that have the same ones.
    """
    square = torch.zeros((), dtype=torch.float64)
    for each, num_copies in gradients:
        for gradient in each:
            gradient.div_(num_targets)
            square += gradient.square().sum() / num_copies
    dist.all_reduce(square)
    coefficient = braid_training.CLIP_GRAD / (float(square.sqrt()) + 1e-6)
    assert coefficient < 1, "clipping must matter, or it is not compared"
    for each, _ in gradients:
        for gradient in each:
            gradient.mul_(coefficient)
