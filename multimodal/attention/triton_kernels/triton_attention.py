"""Bitfield attention by Triton kernels: partial blocks evaluate the mask, full ones do not, empty ones are never visited.

On a CPU the kernels run only in Triton's interpreter (TRITON_INTERPRET=1), which is for tests.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from multimodal.attention.attention_backend import AttentionMask, AttentionShape, MaskTensors
from multimodal.attention.block_summary import BlockLists
from multimodal.attention.device_values import CPU
from multimodal.attention.triton_kernels.backward import (
    delta_kernel,
    join_gradients_kernel,
    key_value_gradient_kernel,
    query_gradient_kernel,
)
from multimodal.attention.triton_kernels.forward import forward_kernel, join_outputs_kernel
from multimodal.attention.triton_kernels.options import (
    PROGRAMS_PER_MULTIPROCESSOR,
    KernelOptions,
    TileSizes,
    choose_options,
    longest_item,
)
from multimodal.attention.triton_kernels.work_list import WorkList, order_blocks, plan_work_list
from multimodal.values.errors import ConfigError

_IS_INTERPRETED = not isinstance(forward_kernel, triton.JITFunction)
LOG2_E = math.log2(math.e)
DELTA_ROWS = 64


def attend_by_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: AttentionMask,
    softmax_scale: float | None,
    options: KernelOptions | None = None,
) -> Tensor:
    """Attend; shapes as in `attention_backend.AttentionBackend`; heads of at most 256 channels, float16, bfloat16 or float32.

    options: tile sizes and balancing, chosen by head size and mask if not given. Raises ConfigError for other inputs.
    """
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ConfigError(
            f"--attention-backend triton takes float16, bfloat16 and float32, not {query.dtype}; "
            "choose --attention-backend blocks"
        )
    if query.device.type == "cpu" and not _IS_INTERPRETED:
        raise ConfigError("--attention-backend triton needs a CUDA device; choose --attention-backend blocks on a CPU")
    scale = 1 / math.sqrt(query.shape[-1]) if softmax_scale is None else softmax_scale
    chosen = options or _choose_options(query, mask=mask)
    query, key, value = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (query, key, value))
    return _TritonAttention.apply(query, key, value, mask, scale, chosen)


def prepare_triton_mask(mask: AttentionMask, shape: AttentionShape) -> None:
    """Derive, on the CPU, the values that the kernels read from a mask."""
    limit = longest_item(len(mask.by_query.blocks), num_heads=shape.num_heads, num_multiprocessors=shape.num_multiprocessors)
    _mask_arguments(mask, CPU)
    _row_work(mask, limit, CPU)
    _column_work(mask, limit, shape.num_heads // shape.num_groups, CPU)


class _TritonAttention(torch.autograd.Function):
    """Forward and backward as launches of the kernels."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, scale: float, options: KernelOptions
    ) -> Tensor:
        num_queries, heads, channels = query.shape
        work = _row_work(mask, options.max_blocks_per_item, query.device)
        output = query.new_empty(num_queries, heads, channels)
        log_sums = query.new_empty(heads, num_queries, dtype=torch.float32)
        rows, padded = work.num_slots * mask.block_size, triton.next_power_of_2(channels)
        partial = query.new_empty(heads, rows, padded, dtype=torch.float32)
        partial_log_sums = query.new_empty(heads, rows, dtype=torch.float32)
        ctx.mask, ctx.scale, ctx.options = mask, scale, options
        tensors = query, key, value, output, log_sums, partial, partial_log_sums
        _launch(forward_kernel, tensors, ctx, work, options.forward, heads=heads, scales=(scale * LOG2_E,))
        _join(join_outputs_kernel, (partial, partial_log_sums), (output, log_sums), work, mask.block_size)
        ctx.save_for_backward(query, key, value, output, log_sums)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        query, key, value, output, log_sums = ctx.saved_tensors
        mask, options = ctx.mask, ctx.options
        output_gradient = output_gradient.contiguous()
        deltas = torch.empty_like(log_sums)
        num_queries, heads, channels = query.shape
        delta_kernel[(triton.cdiv(num_queries, DELTA_ROWS), heads)](
            output, output_gradient, deltas, num_queries, heads,
            CHANNELS=channels, PADDED_CHANNELS=triton.next_power_of_2(channels), TILE_ROWS=DELTA_ROWS,
        )  # fmt: skip
        shared = (query, key, value, output_gradient, log_sums, deltas)
        rows = _row_work(mask, options.max_blocks_per_item, query.device)
        (query_gradient,) = _gradients(query_gradient_kernel, shared, (query,), ctx, rows, options.query_gradient)
        columns = _column_work(mask, options.max_blocks_per_item, query.shape[1] // key.shape[1], query.device)
        key_gradient, value_gradient = _gradients(
            key_value_gradient_kernel, shared, (key, value), ctx, columns, options.key_value_gradient
        )
        return query_gradient, key_gradient, value_gradient, None, None, None


def _gradients(
    kernel: Any, shared: tuple[Tensor, ...], inputs: tuple[Tensor, ...], ctx: Any, work: WorkList, tiles: TileSizes
) -> list[Tensor]:
    """Return the gradients of these inputs; shared: query, key, value, output's gradient, sums of exponentials, deltas."""
    heads, channels = inputs[0].shape[1:]
    shape = heads, work.num_slots * ctx.mask.block_size, triton.next_power_of_2(channels)
    gradients = [tensor.new_empty(tensor.shape) for tensor in inputs]
    partials = [tensor.new_empty(shape, dtype=torch.float32) for tensor in inputs]
    scales = ctx.scale * LOG2_E, ctx.scale
    _launch(kernel, (*shared, *gradients, *partials), ctx, work, tiles, heads=heads, scales=scales)
    for partial, gradient in zip(partials, gradients, strict=True):
        _join(join_gradients_kernel, (partial,), (gradient,), work, ctx.mask.block_size)
    return gradients


def _launch(
    kernel: Any, tensors: Sequence[Tensor], ctx: Any, work: WorkList, tiles: TileSizes, *, heads: int, scales: tuple[float, ...]
) -> None:
    """Launch programs for the tickets of a work list.

    tensors: query, key, value and the others that only this kernel takes; heads: for each of which there are all tickets.
    """
    query, key, value = tensors[:3]
    mask: AttentionMask = ctx.mask
    num_tickets = len(work.items) * (mask.block_size // tiles.rows) * heads
    is_dynamic = ctx.options.max_blocks_per_item is not None
    num_programs = min(num_tickets, _num_multiprocessors(query.device) * PROGRAMS_PER_MULTIPROCESSOR)
    channels = query.shape[2]
    # Triton's interpreter multiplies bfloat16 as the integers in which it stores them.
    is_interpreted = _IS_INTERPRETED and query.dtype == torch.bfloat16
    types = {torch.float16: triton.language.float16, torch.bfloat16: triton.language.bfloat16}
    kernel[(num_programs if is_dynamic else num_tickets,)](
        *tensors, *_mask_arguments(mask, query.device), work.blocks, work.items,
        torch.zeros(1, dtype=torch.int32, device=query.device), *scales,
        *(stride for tensor in (query, key, value) for stride in tensor.stride()[:2]),
        mask.num_queries, mask.num_keys, num_tickets, heads, work.num_slots * mask.block_size,
        HEADS_PER_GROUP=query.shape[1] // key.shape[1], CHANNELS=channels, PADDED_CHANNELS=triton.next_power_of_2(channels),
        BLOCK=mask.block_size, WINDOW=mask.tokens.window or 0, IS_DYNAMIC=is_dynamic,
        DOT_TYPE=triton.language.float32 if is_interpreted else types.get(query.dtype, triton.language.float32),
        TILE_ROWS=tiles.rows, TILE_COLUMNS=tiles.columns, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


def _join(kernel: Any, parts: Sequence[Tensor], joined: Sequence[Tensor], work: WorkList, block_size: int) -> None:
    """Add up the parts of split rows, if there are any.

    parts: the first one is [heads, num_slot_rows, padded channels]; joined: the first one is [num_tokens, heads, channels].
    """
    if not len(work.split_rows):
        return
    (heads, rows, padded), (num_tokens, _, channels) = parts[0].shape, joined[0].shape
    tile = min(64, block_size)
    kernel[(len(work.split_rows) * (block_size // tile), heads)](
        *parts, work.split_rows, *joined, num_tokens, heads, rows,
        CHANNELS=channels, PADDED_CHANNELS=padded, BLOCK=block_size, TILE_ROWS=tile,
    )  # fmt: skip


def _row_work(mask: AttentionMask, limit: int | None, device: torch.device) -> WorkList:
    sizes = mask.num_queries, mask.num_keys
    return mask.derived.on(device, ("row work", limit), lambda: _plan(mask.by_query, sizes, mask.block_size, limit))


def _column_work(mask: AttentionMask, limit: int | None, heads_per_group: int, device: torch.device) -> WorkList:
    # Every listed block is visited once per head of the group: shorter items keep the length of their work.
    length = None if limit is None else max(1, limit // heads_per_group)
    sizes = mask.num_keys, mask.num_queries
    return mask.derived.on(device, ("column work", length), lambda: _plan(mask.by_key, sizes, mask.block_size, length))


def _plan(lists: BlockLists, sizes: tuple[int, int], block_size: int, limit: int | None) -> WorkList:
    blocks = order_blocks(lists, num_row_tokens=sizes[0], num_column_tokens=sizes[1], block_size=block_size)
    return plan_work_list(blocks, max_blocks_per_item=limit)


def _mask_arguments(mask: AttentionMask, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return bits and ids of queries, then kinds and ids of keys; ids are [3, num_tokens]: samples, items, positions."""
    queries, keys = mask.queries_on(device), mask.keys_on(device)
    query_ids = mask.derived.on(device, "query ids", lambda: _stacked_ids(queries))
    key_ids = query_ids if mask.query_blocks is None else mask.derived.on(device, "key ids", lambda: _stacked_ids(keys))
    return queries.bits, query_ids, keys.key_bits, key_ids


def _stacked_ids(tokens: MaskTensors) -> Tensor:
    return torch.stack((tokens.sample_ids, tokens.item_ids, tokens.positions))


def _choose_options(query: Tensor, *, mask: AttentionMask) -> KernelOptions:
    sizes: dict[str, Any] = {"dtype": query.dtype, "block_size": mask.block_size}
    if query.device.type == "cuda":
        index = torch.cuda.current_device() if query.device.index is None else query.device.index
        sizes["shared_memory_bytes"] = triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]
    chosen = choose_options(query.shape[2], **sizes)
    count = _num_multiprocessors(query.device)
    limit = longest_item(len(mask.by_query.blocks), num_heads=query.shape[1], num_multiprocessors=count)
    return replace(chosen, max_blocks_per_item=limit)


def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
