"""The backends of attention, by name; all take the same mask and give the same result."""

from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from multimodal.attention.attention_mask import AttentionMask
from multimodal.attention.bitfield import MaskMode
from multimodal.attention.packed_lengths import MaskRule
from multimodal.values.errors import ConfigError

AUTO = "auto"
"""`sequences` where it can evaluate the mask and has whole sequences or items, else `blocks`."""
SEQUENCES = "sequences"
"""Torch's scaled dot product attention, one packed sequence at a time; knows no items, so `causal` masks and encoders only."""


class AttentionBackend(Protocol):
    """Softmax attention under a mask."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, mask: AttentionMask, softmax_scale: float | None) -> Tensor:
        """Attend.

        query: [num_queries, heads, channels]; key, value: [num_keys, groups, channels], groups dividing heads (grouped-query
        attention). softmax_scale: None for 1 / sqrt(channels). Returns [num_queries, heads, channels].
        """


_FUNCTIONS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "blocks": ("block_attention", "attend_by_blocks"),
        "flex": ("flex_attention", "attend_by_flex_attention"),
        "triton": ("triton_kernels.triton_attention", "attend_by_triton"),
        "dense": ("block_attention", "attend_densely"),
    }
)
"""Backend -> its module, imported only when it is chosen, and function."""

BACKEND_NAMES = (AUTO, SEQUENCES, *_FUNCTIONS)


def choose_backend(name: str, *, rule: MaskRule, is_shared: bool = False) -> str:
    """Resolve `auto`; raises ConfigError when `sequences` cannot evaluate the mask.

    is_shared: a sequence's tokens are spread over ranks (context parallelism).
    """
    needs_items = rule.is_causal and rule.mode is not MaskMode.CAUSAL
    if name == AUTO:
        return "blocks" if needs_items or is_shared else SEQUENCES
    if name == SEQUENCES and is_shared:
        raise ConfigError(
            "--attention-backend sequences needs whole sequences, which context parallelism spreads over ranks; choose "
            "--attention-backend blocks"
        )
    if name == SEQUENCES and needs_items:
        raise ConfigError(
            f"--attention-backend sequences cannot evaluate --attention-mask {rule.mode}; choose --attention-backend blocks"
        )
    return name


def load_backend(name: str) -> AttentionBackend:
    """Return the function of a backend other than `auto` and `sequences`; raises ConfigError when its package is missing."""
    module, function = _FUNCTIONS[name]
    try:
        attend: Callable[..., Tensor] = getattr(import_module(f"multimodal.attention.{module}"), function)
    except ModuleNotFoundError as problem:
        raise ConfigError(
            f"--attention-backend {name}: {problem.name} is not installed; install it (pip install 'braid[triton]' brings "
            "Triton), or choose --attention-backend blocks"
        ) from problem
    return attend
