"""The LLM's last layer: norm, output projection, and the loss of the target tokens."""

import dataclasses
from typing import NamedTuple

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region, gather_from_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from multimodal.model.deferrable_linear import DeferrableColumnParallelLinear
from multimodal.model.norm import Norm
from multimodal.model.vocab_parallel_cross_entropy import vocab_parallel_cross_entropy


class HeadOutput(NamedTuple):
    """What a head returns of a microbatch."""

    loss_sum: Tensor
    """Sum of the losses of the target tokens (LLM) or of all generated values (generator), float32 (float64 in float64 runs)."""
    is_correct: Tensor | None
    """[num_targets]: whether greedy decoding picks the target; LLM only, and only outside of training."""
    conditions: Tensor | None = None
    """[num_generated_items, hidden_size]: what generators are given; LLM only, None where there is nothing to generate."""
    predicted: Tensor | None = None
    """[num_tokens, patch_channels]: what a generator makes of each patch; only outside of training."""


class LanguageHead(torch.nn.Module):
    """Only target tokens reach the output projection: the others have no loss, so their logits are never made."""

    def __init__(
        self, *, config: TransformerConfig, groups: ProcessGroupCollection, vocab_size: int, shares_embedding: bool
    ) -> None:
        super().__init__()
        plain = dataclasses.replace(config, sequence_parallel=False)
        self.is_sequence_sharded = config.sequence_parallel
        self.group = groups.tp
        self.norm = Norm(config, config.hidden_size, eps=config.layernorm_epsilon)
        self.output_layer = DeferrableColumnParallelLinear(
            config.hidden_size,
            vocab_size,
            config=plain,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
            skip_weight_param_allocation=shares_embedding,
            tp_group=groups.tp,
        )

    def forward(
        self,
        hidden: Tensor,
        *,
        target_rows: Tensor,
        targets: Tensor,
        shared_weight: Tensor | None,
        generator_rows: Tensor | None = None,
    ) -> HeadOutput:
        """Score the targets, and hand on what generators are given.

        hidden: [rows, 1, hidden_size] (padded and / tp under sequence parallelism); target_rows, targets: [num_targets];
        generator_rows: [num_generated_items], rows whose normalised hidden states generators are given.
        """
        hidden = self.norm(hidden)
        if self.is_sequence_sharded:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=self.group)
        conditions = None if generator_rows is None else hidden.index_select(0, generator_rows)[:, 0]
        logits, _ = self.output_layer(hidden.index_select(0, target_rows), weight=shared_weight)
        logits = logits[:, 0]
        loss_sum = vocab_parallel_cross_entropy(logits, targets, group=self.group).sum()
        if self.training:
            return HeadOutput(loss_sum, None, conditions)
        all_logits = gather_from_tensor_model_parallel_region(logits.detach(), group=self.group)
        is_correct = all_logits.argmax(-1) == targets if len(targets) else torch.ones_like(targets, dtype=torch.bool)
        return HeadOutput(loss_sum, is_correct, conditions)
