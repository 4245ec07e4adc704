"""Core attention under a bitfield mask, by any backend, over one rank or the ranks that share a sequence."""

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from multimodal.attention.attention_backend import load_backend
from multimodal.attention.context_parallel import ContextGroup, attend_across_ranks
from multimodal.attention.packed_lengths import PackedLengths
from multimodal.attention.packed_mask import MaskRule


class MaskedAttention(torch.nn.Module):
    """Tokens attend as the rule says; plugs into a TransformerLayer spec as `core_attention`.

    backend: a name of `attention_backend.py` other than `auto` and `sequences`; recompute: keep no inner activations for the
    backward (Megatron's selective recomputation); pg_collection: its `cp` are the ranks that a sequence is spread over. Raises
    ConfigError when the backend's package is missing.
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
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.rule, self.softmax_scale, self.recompute = rule, softmax_scale, recompute
        self.attend = load_backend(backend)
        self.context_group = getattr(pg_collection, "cp", None)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, packed_seq_params: PackedLengths, **_: Any
    ) -> Tensor:
        """Attend.

        query: [num_tokens, 1, heads / tp, head_channels]; key, value: [num_tokens, 1, groups / tp, head_channels], where tokens
        are spread over ranks: of this rank's share, and whatever rows pad it.
        Returns [num_tokens, 1, heads x head_channels / tp]; zeros for padding.
        """
        if packed_seq_params.share is not None:
            return self._attend_across_ranks(query, key, value, packed_seq_params)
        mask = packed_seq_params.mask(self.rule)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return self.attend(query[:, 0], key[:, 0], value[:, 0], mask=mask, softmax_scale=self.softmax_scale)

        if self.recompute and torch.is_grad_enabled() and query.requires_grad:
            mixed: Tensor = checkpoint(attend, query, key, value, use_reentrant=False, preserve_rng_state=False)
        else:
            mixed = attend(query, key, value)
        return mixed.flatten(1)[:, None]

    def _attend_across_ranks(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedLengths) -> Tensor:
        """Keeps no inner activations of its own accord."""
        share = packed.share
        assert share is not None and self.context_group is not None
        mixed = attend_across_ranks(
            *(tensor[: share.num_tokens, 0] for tensor in (query, key, value)),
            context=ContextGroup(self.context_group, share.shares),
            mask=packed.mask(self.rule),
            attend=self.attend,
            softmax_scale=self.softmax_scale,
        )
        padding = mixed.new_zeros(query.shape[0] - share.num_tokens, *mixed.shape[1:])
        return torch.cat((mixed, padding)).flatten(1)[:, None]
