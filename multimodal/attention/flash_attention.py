"""Attention inside packed sequences by one FlashAttention kernel for all of them: causal, or to the whole sequence."""

import inspect
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from torch import Tensor

from multimodal.attention.attention_backend import AttentionShape
from multimodal.attention.packed_lengths import PackedLengths

MAX_CHANNELS = 256

VariableLengths = Callable[..., Tensor]
"""Called with query, key, value, starts, longest, is_causal and scale."""


def attend_by_flash(
    query: Tensor, key: Tensor, value: Tensor, *, packed: PackedLengths, is_causal: bool, softmax_scale: float | None
) -> Tensor:
    """Attend, every token inside its own sequence; shapes as in `attention_backend.AttentionBackend`, half precision on CUDA."""
    kernel = find_kernel()
    assert kernel is not None, "`can_flash` says whether there is one"
    longest = max(packed.lengths, default=0)
    return kernel(query, key, value, packed.starts(query.device), longest, is_causal, softmax_scale)


def can_flash(shape: AttentionShape) -> bool:
    """Return True if a kernel for such heads is installed."""
    fits = shape.dtype.itemsize == 2 and shape.channels % 8 == 0 and shape.channels <= MAX_CHANNELS
    return shape.is_cuda and fits and find_kernel() is not None


@cache
def find_kernel() -> VariableLengths | None:
    """Return the first of FlashAttention 3, FlashAttention 2 and torch's own kernel that is installed; None without any."""
    for module, name, adapt in (
        ("flash_attn_interface", "flash_attn_varlen_func", _of_package),
        ("flash_attn", "flash_attn_varlen_func", _of_package),
        ("torch.nn.attention.varlen", "varlen_attn", _of_torch),
    ):
        try:
            return adapt(getattr(import_module(module), name))
        except (ImportError, AttributeError):
            continue
    return None


def _of_package(function: Callable[..., Any]) -> VariableLengths:
    def attend(
        query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, is_causal: bool, scale: float | None
    ) -> Tensor:
        return function(
            query, key, value, starts, starts, longest, longest, softmax_scale=scale, causal=is_causal
        )  # fmt: skip

    return attend


def _of_torch(function: Callable[..., Any]) -> VariableLengths:
    """Adapt torch's kernel, whose arguments (windows for `is_causal`, scale, grouped heads) differ between releases."""
    known = inspect.signature(function).parameters
    if "scale" not in known or not {"window_size", "is_causal"} & set(known):
        raise AttributeError("varlen_attn")

    def attend(
        query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, is_causal: bool, scale: float | None
    ) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        options: dict[str, Any] = {"scale": scale}
        if "is_causal" in known:
            options["is_causal"] = is_causal
        else:
            options["window_size"] = (-1, 0 if is_causal else -1)
        if "enable_gqa" in known:
            options["enable_gqa"] = groups > 1
        elif groups > 1:
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        return function(query, key, value, starts, starts, longest, longest, **options)

    return attend
