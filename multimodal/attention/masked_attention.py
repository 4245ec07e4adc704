"""Core attention under a bitfield mask, by any backend."""

from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from multimodal.attention.attention_backend import load_backend
from multimodal.attention.packed_lengths import PackedLengths
from multimodal.attention.packed_mask import MaskRule


class MaskedAttention(torch.nn.Module):
    """Tokens attend as the rule says; plugs into a TransformerLayer spec as `core_attention`.

    backend: a name of `attention_backend.py` other than `auto` and `sequences`; recompute: keep no inner activations for the
    backward (Megatron's selective recomputation). Raises ConfigError when the backend's package is missing.
    """

    def __init__(
        self,
        *,
        config: TransformerConfig,
        attn_mask_type: AttnMaskType,
        rule: MaskRule,
        backend: str,
        recompute: bool = False,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.rule, self.softmax_scale, self.recompute = rule, softmax_scale, recompute
        self.attend = load_backend(backend)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, packed_seq_params: PackedLengths, **_: Any
    ) -> Tensor:
        """Attend.

        query: [num_tokens, 1, heads / tp, head_channels]; key, value: [num_tokens, 1, groups / tp, head_channels].
        Returns [num_tokens, 1, heads x head_channels / tp].
        """
        mask = packed_seq_params.mask(self.rule)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return self.attend(query[:, 0], key[:, 0], value[:, 0], mask=mask, softmax_scale=self.softmax_scale)

        if self.recompute and torch.is_grad_enabled() and query.requires_grad:
            mixed: Tensor = checkpoint(attend, query, key, value, use_reentrant=False, preserve_rng_state=False)
        else:
            mixed = attend(query, key, value)
        return mixed.flatten(1)[:, None]
