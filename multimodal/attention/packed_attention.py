"""Core attention over packed sequences, by torch's scaled dot product attention, one sequence at a time."""

from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from multimodal.attention.packed_lengths import PackedLengths


class PackedAttention(torch.nn.Module):
    """Tokens attend inside their own sequence only: causally in an LLM, to all of it in an encoder.

    Plugs into a TransformerLayer spec as `core_attention`. Query heads per key head may exceed one (grouped-query attention).
    """

    recompute = False

    def __init__(self, *, config: TransformerConfig, attn_mask_type: AttnMaskType, softmax_scale: float | None = None, **_: Any):
        super().__init__()
        self.is_causal = attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal)
        self.softmax_scale = softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, packed_seq_params: PackedLengths, **_: Any
    ) -> Tensor:
        """Attend.

        query: [num_tokens, 1, heads / tp, head_channels]; key, value: [num_tokens, 1, groups / tp, head_channels].
        Returns [num_tokens, 1, heads x head_channels / tp].
        """
        if self.recompute and torch.is_grad_enabled() and query.requires_grad:
            mixed: Tensor = checkpoint(
                self._attend, query, key, value, packed_seq_params.lengths, use_reentrant=False, preserve_rng_state=False
            )
        else:
            mixed = self._attend(query, key, value, packed_seq_params.lengths)
        return mixed

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...]) -> Tensor:
        groups = query.shape[2] // key.shape[2]
        if groups > 1:
            key, value = key.repeat_interleave(groups, dim=2), value.repeat_interleave(groups, dim=2)
        # [num_tokens, 1, heads, channels] -> per sequence [1, heads, length, channels]
        parts = zip(*(tensor.permute(1, 2, 0, 3).split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
        mixed = [scaled_dot_product_attention(q, k, v, is_causal=self.is_causal, scale=self.softmax_scale) for q, k, v in parts]
        return torch.cat(mixed, dim=2).permute(2, 0, 1, 3).flatten(2)


class RecomputedPackedAttention(PackedAttention):
    """PackedAttention whose inner activations are recomputed in the backward (Megatron's selective recomputation)."""

    recompute = True
