"""Attention by its definition, with a dense mask: the reference that every other backend is compared with."""

import math

import torch
from torch import Tensor

from multimodal.attention.attention_mask import AttentionMask


def attend_densely(query: Tensor, key: Tensor, value: Tensor, *, mask: AttentionMask, softmax_scale: float | None) -> Tensor:
    """Attend; shapes as in `attention_backend.AttentionBackend`. O(num_queries x num_keys) memory per head."""
    scale = 1 / math.sqrt(query.shape[-1]) if softmax_scale is None else softmax_scale
    is_visible = torch.from_numpy(mask.tokens.to_dense()[mask.query_positions]).to(query.device)
    heads_per_group = query.shape[1] // key.shape[1]
    keys, values = (tensor.repeat_interleave(heads_per_group, dim=1) for tensor in (key, value))
    scores = torch.einsum("qhc,khc->hqk", query, keys) * scale
    weights = scores.masked_fill(~is_visible, -math.inf).softmax(dim=-1)
    return torch.einsum("hqk,khc->qhc", weights, values)
