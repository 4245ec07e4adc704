"""Attention of a sequence whose tokens are spread over ranks: keys and values are gathered by groups of heads.

While one group of heads is attended to, the keys and values of the next group are gathered (Llama 3; Cornstarch, thesis 3.4.3).
At most two steps' gathered keys and values are in memory: they are not kept for the backward, which gathers them again and
returns the gradients by reduce-scatter while the next group is computed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from multimodal.attention.attention_backend import AttentionBackend, AttentionMask
from multimodal.cost.layers.collectives import count_groups_at_once
from multimodal.cost.token_shares import BlockShares

_Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""Both under torch's new names, even if torch only has the former ones."""


@dataclass(frozen=True, slots=True)
class ContextGroup:
    """The ranks that a sequence is spread over, and the tokens that each holds."""

    group: dist.ProcessGroup
    shares: BlockShares
    gathered_rows: Tensor
    """[num_tokens]: see `BlockShares.gathered_rows`; on the device."""

    def groups_at_once(self, key: Tensor) -> int:
        """Return the key heads that are gathered at once: more make fewer, larger messages, and take more memory."""
        num_rows = self.shares.num_rows * self.shares.num_ranks
        return count_groups_at_once(key.shape[1], bytes_per_group=num_rows * 2 * key.shape[2] * key.element_size())


def attend_across_ranks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    context: ContextGroup,
    mask: AttentionMask,
    attend: AttentionBackend,
    softmax_scale: float | None = None,
    recompute: bool = False,
) -> Tensor:
    """Attend with this rank's queries to the keys of all ranks; all ranks of the group must call it.

    query: [num_local, heads, channels]; key, value: [num_local, groups, channels], of this rank's tokens in the order of the
    sequence. mask: of the whole sequence, with this rank's `query_blocks`. recompute: attend again in the backward, and keep
    nothing. Returns [num_local, heads, channels].
    """
    attend_to_group = partial(attend, mask=mask, softmax_scale=softmax_scale)
    is_kept = torch.is_grad_enabled() and query.requires_grad and not recompute
    return _ContextAttention.apply(query, key, value, context, attend_to_group, is_kept)


class _ContextAttention(torch.autograd.Function):
    """A loop over groups of heads, one collective ahead."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, context: ContextGroup, attend: _Attend, is_kept: bool
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.context, ctx.attend, ctx.kept = context, attend, []
        mixed = []
        for queries, keys_values in zip(_steps(query, key, context), _gather_groups(key, value, context), strict=True):
            if is_kept:
                ctx.kept.append(_AttendedGroup(attend, queries, keys_values))
                mixed.append(ctx.kept[-1].release())
            else:
                mixed.append(attend(queries, *keys_values.chunk(2, dim=1)))
        return torch.cat(mixed, dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, mixed_gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        query, key, value = ctx.saved_tensors
        context: ContextGroup = ctx.context
        kept: list[_AttendedGroup] = ctx.kept[::-1]
        gathered = _gather_groups(key, value, context, rooms=[group.reopen for group in ctx.kept])
        steps = zip(_steps(query, key, context), _steps(mixed_gradient, key, context), gathered, strict=True)
        query_gradients, sent = [], []
        for queries, gradient, keys_values in steps:
            group = kept.pop() if kept else _AttendedGroup(ctx.attend, queries, keys_values)
            of_queries, of_keys, of_values = group.gradients(gradient)
            query_gradients.append(of_queries)
            sent.append(_Reduction(of_keys, of_values, context))
            for earlier in sent[:-1]:
                earlier.finish()
        ctx.kept = []
        key_gradients, value_gradients = zip(*(reduction.finish() for reduction in sent), strict=True)
        gradients = torch.cat(query_gradients, dim=1), torch.cat(key_gradients, dim=1), torch.cat(value_gradients, dim=1)
        return *gradients, None, None, None


class _AttendedGroup:
    """Attention of one step's heads, with all that its backward needs."""

    def __init__(self, attend: _Attend, queries: Tensor, keys_values: Tensor) -> None:
        """keys_values: [num_tokens, 2 x key heads, channels], not used by anything else."""
        self._keys_values = keys_values
        self._leaves = [tensor.detach().requires_grad_() for tensor in (queries, *keys_values.chunk(2, dim=1))]
        with torch.enable_grad(), saved_tensors_hooks(detached, lambda kept: kept):
            self._mixed = attend(*self._leaves)

    def release(self) -> Tensor:
        """Free the memory of the keys and values; returns the output."""
        self._keys_values.untyped_storage().resize_(0)
        return self._mixed.detach()

    def reopen(self) -> Tensor:
        """Return the memory of the keys and values again, to be filled with the same values."""
        buffer = self._keys_values.data  # bypasses autograd's version counter: the values are the same
        buffer.untyped_storage().resize_(buffer.numel() * buffer.element_size())
        return buffer

    def gradients(self, gradient: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of queries, keys and values."""
        return torch.autograd.grad(self._mixed, self._leaves, gradient)


def detached(tensor: Tensor) -> Tensor:
    """Return a tensor for a graph to keep: a hook that returned an operation's own output would create a reference cycle."""
    return tensor if tensor.is_leaf else tensor.detach()


def _steps(tensor: Tensor, key: Tensor, context: ContextGroup) -> tuple[Tensor, ...]:
    """Cut the query heads by the key heads of each step."""
    return tensor.split(tensor.shape[1] // key.shape[1] * context.groups_at_once(key), dim=1)


def _gather_groups(
    key: Tensor, value: Tensor, context: ContextGroup, *, rooms: Sequence[Callable[[], Tensor]] = ()
) -> Iterator[Tensor]:
    """Yield every step's keys beside its values, of all ranks, one gather ahead; rooms: return the memory for each step."""
    size = context.groups_at_once(key)
    steps = list(zip(key.split(size, dim=1), value.split(size, dim=1), strict=True))
    coming = [_start_gather(*steps[0], context)]
    for step, following in enumerate((*steps[1:], None)):
        work, gathered = coming.pop()
        work.wait()
        rows = context.gathered_rows
        in_order = torch.index_select(gathered, 0, rows, out=rooms[step]()) if rooms else gathered.index_select(0, rows)
        del gathered
        if following is not None:
            coming.append(_start_gather(*following, context))
        yield in_order


def _start_gather(key: Tensor, value: Tensor, context: ContextGroup) -> tuple[Any, Tensor]:
    shares = context.shares
    local = key.new_zeros(shares.num_rows, 2 * key.shape[1], key.shape[2])
    torch.cat((key, value), dim=1, out=local[: key.shape[0]])
    gathered = key.new_empty(shares.num_ranks * shares.num_rows, *local.shape[1:])
    return all_gather_single(gathered, local, group=context.group, async_op=True), gathered


class _Reduction:
    """The gradients of gathered keys and values on their way to the ranks that own the tokens."""

    def __init__(self, key_gradient: Tensor, value_gradient: Tensor, context: ContextGroup) -> None:
        shares = context.shares
        both = torch.cat((key_gradient, value_gradient), dim=1)
        self._padded: Tensor | None = both.new_zeros(shares.num_ranks * shares.num_rows, *both.shape[1:])
        self._padded.index_copy_(0, context.gathered_rows, both)
        self._local = both.new_empty(shares.num_rows, *both.shape[1:])
        self._num_local = int(shares.num_tokens_of_rank[dist.get_rank(context.group)])
        self._work: Any = reduce_scatter_single(self._local, self._padded, group=context.group, async_op=True)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Wait; returns the gradients of this rank's keys and values."""
        if self._work is not None:
            self._work.wait()
            self._work = self._padded = None
        keys, values = self._local[: self._num_local].chunk(2, dim=1)
        return keys, values
