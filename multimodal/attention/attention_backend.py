"""The backends of attention, by name; all take the same mask and compute the same result."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from multimodal.attention.attention_mask import AttentionMask
from multimodal.values.errors import ConfigError

AUTO = "auto"
"""Whole sequences if the mask has no items and no window and ranks share no sequence, else blocks; the fastest that runs here."""
SEQUENCES = "sequences"
"""Torch's scaled dot product attention, one packed sequence at a time; without items: `causal` masks and encoders only."""
FLASH = "flash"
"""The same by one FlashAttention kernel for all sequences (`flash_attention.py`)."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of one rank, and the device that computes them."""

    num_heads: int = 1
    num_groups: int = 1
    """Key heads."""
    channels: int = 64
    """Channels of a head."""
    dtype: torch.dtype = torch.float32
    num_multiprocessors: int = 0
    """Multiprocessors of the CUDA device; 0: it computes on a CPU."""

    @property
    def is_cuda(self) -> bool:
        """True if a CUDA device computes."""
        return self.num_multiprocessors > 0


class AttentionBackend(Protocol):
    """Softmax attention under a mask."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, mask: AttentionMask, softmax_scale: float | None) -> Tensor:
        """Attend.

        query: [num_queries, heads, channels]; key, value: [num_keys, groups, channels], groups dividing heads (grouped-query
        attention). softmax_scale: None for 1 / sqrt(channels). Returns [num_queries, heads, channels].
        """


_FUNCTIONS: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "blocks": ("block_attention", "attend_by_blocks", "prepare_block_mask"),
        "flex": ("flex_attention", "attend_by_flex_attention", "prepare_flex_mask"),
        "triton": ("triton_kernels.triton_attention", "attend_by_triton", "prepare_triton_mask"),
        "dense": ("block_attention", "attend_densely", "prepare_dense_mask"),
    }
)
"""Backend -> its module (imported only when chosen), its function, and the function that prepares a mask for it."""

BACKEND_NAMES = (AUTO, SEQUENCES, FLASH, *_FUNCTIONS)


def load_backend(name: str) -> AttentionBackend:
    """Return the function of a backend that takes a mask; raises ConfigError when its package is missing."""
    return _load(name, 1)


def load_preparation(name: str) -> Callable[[AttentionMask, AttentionShape], None]:
    """Return the function that derives, on the CPU, all that a backend reads from a mask; raises as `load_backend` does."""
    return _load(name, 2)


def _load(name: str, which: int) -> Any:
    try:
        return getattr(import_module(f"multimodal.attention.{_FUNCTIONS[name][0]}"), _FUNCTIONS[name][which])
    except ModuleNotFoundError as problem:
        raise ConfigError(
            f"--attention-backend {name}: {problem.name} is not installed; install it (pip install 'braid[triton]' brings "
            "Triton), or choose --attention-backend blocks"
        ) from problem
