"""Attention of packed sequences on a CPU by torch's kernel, which scaled dot product attention calls there, too.

Under a causal mask the kernel multiplies all keys of a block of 512 if it multiplies any. So sequences that are not much longer
go through it a block of queries at a time, each with the keys up to its last token: a third less time at 512 tokens. All outputs
are written to one tensor, in the order of the tokens, which autograd keeps once for attention and for the product behind it.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

NUM_QUERIES, MOST_KEYS = 64, 1024
"""Queries at a time, and the longest sequence that is cut into such blocks: longer ones gain nothing."""


class _Block(NamedTuple):
    """A block of queries, which sees the keys before it and its own."""

    first: int
    last: int
    """The query behind the block, and the number of its keys."""
    options: dict[str, Any]
    """Keyword arguments of torch's kernel: its mask and the scale of the scores."""

    def queries(self, *sequences: Tensor) -> Iterator[Tensor]:
        """Yield views of the block's queries; sequences: [num_sequences, heads, length, ...]."""
        return (each.narrow(2, self.first, self.last - self.first) for each in sequences)

    def keys(self, *sequences: Tensor) -> Iterator[Tensor]:
        """Yield views of the keys that the block sees."""
        return (each.narrow(2, 0, self.last) for each in sequences)


def attend_by_sequence(
    query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], *, is_causal: bool, scale: float | None
) -> Tensor:
    """Attend within each sequence; query, key, value: [num_tokens, heads, channels]. Returns the same shape.

    lengths: of the sequences, which add up to num_tokens; scale: of the scores, None for 1 / sqrt(channels).
    """
    found: Tensor = _SequenceAttention.apply(query, key, value, lengths, is_causal, scale)
    return found


def _by_sequence(lengths: Sequence[int], *packed: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of [num_sequences, heads, length, ...] of all tensors: one sequence, or all of them if they are of one length.

    packed: [num_tokens, heads, ...].
    """
    if len(set(lengths)) == 1:
        return iter([tuple(each.unflatten(0, (len(lengths), -1)).transpose(1, 2) for each in packed)])
    return zip(*(each.transpose(0, 1)[None].split(tuple(lengths), dim=2) for each in packed), strict=True)


def _blocks(query: Tensor, *, is_causal: bool, scale: float | None) -> Iterator[_Block]:
    """Yield the blocks of sequences, the last one first: it sees all keys."""
    length = query.shape[2]
    # half precision would have to add parts of gradients up in float32, which takes longer than all else saves
    is_cut = is_causal and length <= MOST_KEYS and query.dtype.itemsize > 2
    for first in reversed(range(0, length, NUM_QUERIES if is_cut else max(1, length))):
        last = min(first + NUM_QUERIES, length) if is_cut else length
        options: dict[str, Any] = {"is_causal": is_causal and first == 0, "scale": scale}
        if first > 0:  # the kernel's own causal mask begins at the first key
            options["attn_mask"] = _causal_mask(query.dtype)[: last - first, MOST_KEYS - NUM_QUERIES - first :][:, :last]
        yield _Block(first, last, options)


@cache
def _causal_mask(dtype: torch.dtype) -> Tensor:
    """Return [NUM_QUERIES, MOST_KEYS], which is added to the scores of as many queries and of the keys up to the last of them."""
    return torch.full((NUM_QUERIES, MOST_KEYS), -torch.inf, dtype=dtype).triu(MOST_KEYS - NUM_QUERIES + 1)


class _SequenceAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], is_causal: bool, scale: float | None
    ) -> Tensor:
        mixed = query.new_empty(query.shape)
        sums = query.new_empty(query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32))
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        for queries, keys, values, *results in _by_sequence(lengths, query, key, value, mixed, sums):
            for block in _blocks(queries, is_causal=is_causal, scale=scale):
                found = attend(*block.queries(queries), *block.keys(keys, values), **block.options)
                for result, part in zip(block.queries(*results), found, strict=True):
                    result.copy_(part)
        ctx.save_for_backward(query, key, value, mixed, sums)
        ctx.lengths, ctx.is_causal, ctx.scale = lengths, is_causal, scale
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mixed, sums = ctx.saved_tensors
        of_query, of_key, of_value = query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        packed = query, key, value, mixed, sums, gradient, of_query, of_key, of_value
        for queries, keys, values, out, logarithms, of_out, of_queries, *of_keys in _by_sequence(ctx.lengths, *packed):
            for block in _blocks(queries, is_causal=ctx.is_causal, scale=ctx.scale):
                inputs = *block.queries(of_out, queries), *block.keys(keys, values), *block.queries(out, logarithms)
                part_of_queries, *parts_of_keys = attend(*inputs, 0.0, **block.options)
                next(block.queries(of_queries)).copy_(part_of_queries)
                put = Tensor.copy_ if block.last == queries.shape[2] else Tensor.add_
                for result, part in zip(block.keys(*of_keys), parts_of_keys, strict=True):
                    put(result, part)
        return of_query, of_key, of_value, None, None, None
