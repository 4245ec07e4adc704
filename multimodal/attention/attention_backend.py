"""The backends of attention, by name, and the mask that all take: computed once, shared by all layers of a stage."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from multimodal.attention.bitfield import ACROSS_ITEMS_BIT, BitfieldMask
from multimodal.attention.block_summary import BlockLists, list_blocks
from multimodal.attention.device_values import DerivedValues, HoldsTensors
from multimodal.values.errors import ConfigError


@dataclass(frozen=True, slots=True)
class MaskTensors(HoldsTensors):
    """The tokens of a mask on a device; every tensor is [num_tokens]."""

    bits: Tensor
    """int64: the kinds of tokens that each token attends to, as bits."""
    key_bits: Tensor
    """int64: the kinds that each token is of."""
    sample_ids: Tensor
    """int32, like those that follow."""
    item_ids: Tensor
    positions: Tensor
    """Positions in the whole packed sequence."""
    window: int | None = None
    """See BitfieldMask."""

    def select(self, indices: Tensor | slice) -> "MaskTensors":
        """Return some tokens, in the given order and shape; indices: int64 or int32."""
        return self.map_tensors(lambda tensor: tensor[indices])

    def sees(self, keys: "MaskTensors") -> Tensor:
        """Evaluate the rule of `bitfield.py` of every token here and every one of `keys`: [num_tokens, num_keys], bool."""
        return elementwise_sees(self.map_tensors(lambda tensor: tensor[:, None]), keys)


def elementwise_sees(queries: MaskTensors, keys: MaskTensors) -> Tensor:
    """Evaluate the rule of `bitfield.py` for pairs of tokens; the tensors of both sides must broadcast."""
    seen = (queries.sample_ids == keys.sample_ids) & ((queries.bits & keys.key_bits) != 0)
    same_item = (queries.item_ids == keys.item_ids) | ((queries.bits & ACROSS_ITEMS_BIT) != 0)
    is_before = keys.positions <= queries.positions
    if queries.window is not None:
        is_before = is_before & (keys.positions > queries.positions - queries.window)
    return seen & torch.where(queries.bits < 0, is_before, same_item)


@dataclass(eq=False)
class AttentionMask(HoldsTensors):
    """The keys that each query attends to. Keys are all tokens; queries are all tokens or, with context parallelism, some blocks.

    tokens: the whole packed sequence; block_size: tokens of a block of queries and of keys; query_blocks: ascending indices of
    the blocks whose tokens are queries, None for all; softcap: see MaskRule.
    """

    tokens: BitfieldMask
    block_size: int = 128
    query_blocks: tuple[int, ...] | None = None
    softcap: float | None = None
    derived: DerivedValues = field(default_factory=DerivedValues, repr=False)
    """Forms that backends derive from it."""

    @property
    def num_keys(self) -> int:
        """Number of tokens of the whole sequence."""
        return self.tokens.num_tokens

    @property
    def num_queries(self) -> int:
        """Number of tokens that attend."""
        return len(self.query_positions)

    @cached_property
    def query_positions(self) -> NDArray[np.int64]:
        """[num_queries]: positions of the queries in the sequence."""
        if self.query_blocks is None:
            return np.arange(self.num_keys)
        starts = np.array(self.query_blocks, dtype=np.int64) * self.block_size
        positions: NDArray[np.int64] = (starts[:, None] + np.arange(self.block_size)).reshape(-1)
        return positions[positions < self.num_keys]

    @cached_property
    def by_query(self) -> BlockLists:
        """For each block of queries, the blocks of keys that it attends to."""
        lists = list_blocks(self.tokens, block_size=self.block_size)
        return lists if self.query_blocks is None else lists.select(np.array(self.query_blocks, dtype=np.int64))

    @cached_property
    def by_key(self) -> BlockLists:
        """For each block of keys, the blocks of queries (numbered among the queries' own) that attend to it."""
        return self.by_query.transposed(num_columns=-(-self.num_keys // self.block_size))

    def keys_on(self, device: torch.device) -> MaskTensors:
        """Return all tokens, as keys."""
        return self.derived.on(device, "keys", lambda: _to_tensors(self.tokens, np.arange(self.num_keys)))

    def queries_on(self, device: torch.device) -> MaskTensors:
        """Return the tokens that attend."""
        if self.query_blocks is None:
            return self.keys_on(device)
        return self.derived.on(device, "queries", lambda: _to_tensors(self.tokens, self.query_positions))


def _to_tensors(mask: BitfieldMask, positions: NDArray[np.int64]) -> MaskTensors:
    columns = (column[positions] for column in (mask.bits, mask.key_bits, mask.sample_ids, mask.item_ids))
    bits, key_bits, sample_ids, item_ids = map(torch.from_numpy, columns)
    return MaskTensors(bits, key_bits, sample_ids, item_ids, torch.from_numpy(positions.astype(np.int32)), mask.window)


AUTO = "auto"
"""Whole sequences if the mask has no items and no window and ranks share no sequence, else blocks; the fastest that runs here."""
SEQUENCES = "sequences"
"""Torch's scaled dot product attention, one packed sequence at a time; without items: `causal` masks and encoders only."""
FLASH = "flash"
"""The same by one FlashAttention kernel for all sequences (`core_attention.py`)."""


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
