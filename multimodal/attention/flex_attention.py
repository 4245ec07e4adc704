"""Attention by torch's FlexAttention with the same block lists: an alternative on CUDA, and the baseline of benchmarks."""

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from multimodal.attention.attention_backend import AttentionMask, AttentionShape, elementwise_sees
from multimodal.attention.block_summary import BlockLists
from multimodal.attention.device_values import CPU
from multimodal.values.errors import ConfigError


def attend_by_flex_attention(
    query: Tensor, key: Tensor, value: Tensor, *, mask: AttentionMask, softmax_scale: float | None
) -> Tensor:
    """Attend, compiled on CUDA; raises ConfigError on a CPU, where it holds all scores, if a backward is needed."""
    if query.device.type == "cpu" and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value)):
        raise ConfigError(
            "--attention-backend flex cannot train on a CPU: torch's FlexAttention has no backward there; "
            "choose --attention-backend blocks"
        )
    block_mask = mask.derived.keep(("flex", query.device), lambda: build_flex_mask(mask, query.device))
    # [num_tokens, heads, channels] -> [1, heads, num_tokens, channels]
    inputs = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    attend = _compiled() if query.device.type == "cuda" else cast(Callable[..., Any], flex_attention)
    cap = mask.softcap
    change = None if cap is None else lambda score, *_: cap * torch.tanh(score / cap)
    mixed: Tensor = attend(*inputs, score_mod=change, block_mask=block_mask, scale=softmax_scale, enable_gqa=True)
    return mixed[0].transpose(0, 1)


def build_flex_mask(mask: AttentionMask, device: torch.device) -> BlockMask:
    """Return FlexAttention's form of a mask; its index is dense over blocks: [query blocks, key blocks], int32."""
    queries, keys = mask.queries_on(device), mask.keys_on(device)

    def is_visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return elementwise_sees(queries.select(query), keys.select(key))

    partial, full = mask.derived.on(device, "flex", lambda: _block_rows(mask))
    return BlockMask.from_kv_blocks(
        *partial, *full, BLOCK_SIZE=mask.block_size, mask_mod=is_visible, seq_lengths=(mask.num_queries, mask.num_keys)
    )


def prepare_flex_mask(mask: AttentionMask, _: AttentionShape) -> None:
    """Derive, on the CPU, the values that FlexAttention reads from a mask."""
    mask.queries_on(CPU), mask.keys_on(CPU)
    mask.derived.on(CPU, "flex", lambda: _block_rows(mask))


def _block_rows(mask: AttentionMask) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return counts and indices of partial blocks, then of full ones."""
    # A last block that is cut short must be evaluated: FlexAttention reads whole blocks.
    num_columns = -(-mask.num_keys // mask.block_size)
    is_full = torch.from_numpy(mask.by_query.is_full)
    if mask.num_keys % mask.block_size:
        is_full = is_full & (torch.from_numpy(mask.by_query.blocks) != num_columns - 1)
    return _padded_rows(mask.by_query, ~is_full, num_columns), _padded_rows(mask.by_query, is_full, num_columns)


def _padded_rows(lists: BlockLists, is_chosen: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """Return the number of chosen blocks per row [1, 1, rows] and their indices [1, 1, rows, num_columns], both int32."""
    num_rows = len(lists.row_starts) - 1
    row_of_entry = torch.repeat_interleave(torch.arange(num_rows), torch.from_numpy(lists.row_starts).diff())[is_chosen]
    counts = torch.bincount(row_of_entry, minlength=num_rows)
    index_in_row = torch.arange(len(row_of_entry)) - (counts.cumsum(0) - counts)[row_of_entry]
    indices = torch.zeros(num_rows, num_columns, dtype=torch.int32)
    indices[row_of_entry, index_in_row] = torch.from_numpy(lists.blocks)[is_chosen]
    return counts.to(torch.int32)[None, None], indices[None, None]


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True)
