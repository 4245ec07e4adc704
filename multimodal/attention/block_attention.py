"""Attention in plain torch: over visible blocks only, and by its definition.

The block version makes one call of scaled dot product attention per block of queries: exact in every precision, on any device; it
is the backend of the CPU. The backward recomputes the weights of one block of queries at a time, so memory in addition to the
inputs stays within one block's row.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from multimodal.attention.attention_backend import AttentionMask, AttentionShape
from multimodal.attention.device_values import CPU


class _Row(NamedTuple):
    """A block of queries and the keys that it attends to."""

    queries: slice
    keys: slice | Tensor
    """Rows of the keys: a slice if they are consecutive."""
    is_visible: Tensor | None
    """[num_queries, num_keys] of the block, or None if every query attends to every key."""


def attend_by_blocks(query: Tensor, key: Tensor, value: Tensor, *, mask: AttentionMask, softmax_scale: float | None) -> Tensor:
    """Attend; shapes as in `attention_backend.AttentionBackend`. Time in proportion to the visible blocks."""
    scale = 1 / math.sqrt(query.shape[-1]) if softmax_scale is None else softmax_scale
    return _BlockAttention.apply(query, key, value, mask, scale)


def attend_densely(query: Tensor, key: Tensor, value: Tensor, *, mask: AttentionMask, softmax_scale: float | None) -> Tensor:
    """Attend by definition, with O(num_queries x num_keys) memory: the reference that other backends are compared with."""
    scale = 1 / math.sqrt(query.shape[-1]) if softmax_scale is None else softmax_scale
    is_visible = _dense(mask, query.device)
    heads_per_group = query.shape[1] // key.shape[1]
    keys, values = (tensor.repeat_interleave(heads_per_group, dim=1) for tensor in (key, value))
    scores = capped(torch.einsum("qhc,khc->hqk", query, keys) * scale, mask.softcap)
    weights = scores.masked_fill(~is_visible, -math.inf).softmax(dim=-1)
    return torch.einsum("hqk,khc->qhc", weights, values)


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Return scores, or logits, that are smoothly bounded (Gemma 2)."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def prepare_block_mask(mask: AttentionMask, _: AttentionShape) -> None:
    """Derive, on the CPU, the values that `attend_by_blocks` reads from a mask; it also reads lists on the host, row by row."""
    mask.queries_on(CPU), mask.keys_on(CPU), mask.by_query
    for index in range(len(mask.by_query.row_starts) - 1):
        _columns(mask, index, CPU)


def prepare_dense_mask(mask: AttentionMask, _: AttentionShape) -> None:
    """Derive, on the CPU, the dense mask."""
    _dense(mask, CPU)


def _dense(mask: AttentionMask, device: torch.device) -> Tensor:
    return mask.derived.on(device, "dense", lambda: torch.from_numpy(mask.tokens.to_dense()[mask.query_positions]))


class _BlockAttention(torch.autograd.Function):
    """Query heads that share a key head are treated as further queries of it: [groups, heads per group x queries, channels]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, scale: float) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.mask, ctx.scale = mask, scale
        heads_per_group = query.shape[1] // key.shape[1]
        mixed = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
        for row in _rows(mask, query.device):
            queries = _to_groups(query[row.queries], key.shape[1])
            keys, values = (tensor[row.keys].transpose(0, 1) for tensor in (key, value))
            if mask.softcap is None:
                seen, inputs = row.is_visible, (queries[None], keys[None], values[None])
                seen = None if seen is None else seen.repeat(heads_per_group, 1)
                (group_mixed,) = scaled_dot_product_attention(*inputs, attn_mask=seen, scale=scale)
            else:
                wide = torch.promote_types(query.dtype, torch.float32)
                scores = capped(queries.to(wide) @ keys.transpose(1, 2).to(wide) * scale, mask.softcap)
                weights = _weights(scores, row.is_visible, heads_per_group=heads_per_group)
                group_mixed = (weights @ values.to(wide)).to(query.dtype)
            mixed[row.queries] = _from_groups(group_mixed, heads_per_group)
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, mixed_gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value = ctx.saved_tensors
        cap = ctx.mask.softcap
        groups, heads_per_group = key.shape[1], query.shape[1] // key.shape[1]
        dtype = torch.promote_types(query.dtype, torch.float32)
        query_gradient = torch.empty_like(query)
        key_gradient, value_gradient = (torch.zeros(tensor.shape, dtype=dtype, device=tensor.device) for tensor in (key, value))
        for row in _rows(ctx.mask, query.device):
            queries, gradient = (_to_groups(tensor[row.queries], groups).to(dtype) for tensor in (query, mixed_gradient))
            keys, values = (tensor[row.keys].transpose(0, 1).to(dtype) for tensor in (key, value))
            scores = capped(queries @ keys.transpose(1, 2) * ctx.scale, cap)
            weights = _weights(scores, row.is_visible, heads_per_group=heads_per_group)
            weight_gradient = gradient @ values.transpose(1, 2)
            # The gradient of a softmax: weights x (gradient - its mean under the weights).
            score_gradient = weights * (weight_gradient - (weight_gradient * weights).sum(dim=-1, keepdim=True)) * ctx.scale
            if cap is not None:
                score_gradient *= 1 - (scores / cap) ** 2
            query_gradient[row.queries] = _from_groups(score_gradient @ keys, heads_per_group).to(query.dtype)
            key_gradient[row.keys] += (score_gradient.transpose(1, 2) @ queries).transpose(0, 1)
            value_gradient[row.keys] += (weights.transpose(1, 2) @ gradient).transpose(0, 1)
        return query_gradient, key_gradient.to(key.dtype), value_gradient.to(value.dtype), None, None


def _weights(scores: Tensor, is_visible: Tensor | None, *, heads_per_group: int) -> Tensor:
    if is_visible is not None:
        scores = scores.masked_fill(~is_visible.repeat(heads_per_group, 1), -math.inf)
    return scores.softmax(dim=-1)


def _rows(mask: AttentionMask, device: torch.device) -> Iterator[_Row]:
    queries, keys = mask.queries_on(device), mask.keys_on(device)
    for index in range(len(mask.by_query.row_starts) - 1):
        _, is_full = mask.by_query.row(index)
        rows = slice(index * mask.block_size, min((index + 1) * mask.block_size, mask.num_queries))
        columns = _columns(mask, index, device)
        seen = None
        if not is_full.all():
            seen = queries.select(rows).sees(keys.select(columns))
        yield _Row(rows, columns, seen)


def _columns(mask: AttentionMask, row: int, device: torch.device) -> slice | Tensor:
    """Return the token indices of the blocks of keys that a block of queries attends to."""
    blocks, _ = mask.by_query.row(row)
    if blocks[-1] - blocks[0] + 1 == len(blocks):
        return slice(int(blocks[0]) * mask.block_size, min((int(blocks[-1]) + 1) * mask.block_size, mask.num_keys))
    indices = (blocks.astype(np.int64)[:, None] * mask.block_size + np.arange(mask.block_size)).reshape(-1)
    return mask.derived.on(device, ("columns", row), lambda: torch.from_numpy(indices[indices < mask.num_keys]))


def _to_groups(tensor: Tensor, groups: int) -> Tensor:
    """[queries, heads, channels] -> [groups, heads per group x queries, channels]."""
    num_queries, heads, channels = tensor.shape
    return tensor.view(num_queries, groups, heads // groups, channels).permute(1, 2, 0, 3).reshape(groups, -1, channels)


def _from_groups(tensor: Tensor, heads_per_group: int) -> Tensor:
    """[groups, heads per group x queries, channels] -> [queries, heads, channels]."""
    groups, rows, channels = tensor.shape
    return tensor.view(groups, heads_per_group, -1, channels).permute(2, 0, 1, 3).reshape(rows // heads_per_group, -1, channels)
