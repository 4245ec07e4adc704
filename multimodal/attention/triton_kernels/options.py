"""Sizes with which the attention kernels run; they change speed, never results beyond rounding."""

from dataclasses import dataclass, replace

import torch

from multimodal.values.errors import ConfigError

MAX_CHANNELS = 256
HOPPER_SHARED_MEMORY_BYTES = 227 * 1024
LARGE_TILES_BYTES = 130 * 1024
"""Shared memory of the largest tiles below; GPUs of compute capability 8.6 and 8.9 have 99 KiB."""
SHORTEST_LIMIT = 16
"""Blocks below which work is not cut: the best published sub-blocks have 16 to 32 (Cornstarch, thesis 3.3.2.2)."""
PROGRAMS_PER_MULTIPROCESSOR = 2
"""Size of the persistent grid; more programs than fit at once would only queue."""
ITEMS_PER_PROGRAM = 4
"""Fewest of the longest items in a program's share of the work; taken longest first, all programs end within one item."""


@dataclass(frozen=True, slots=True)
class TileSizes:
    """One kernel's tiles: it owns `rows` tokens and streams `columns` at a time; both divide the block size."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """Sizes of one call."""

    forward: TileSizes
    query_gradient: TileSizes
    key_value_gradient: TileSizes
    max_blocks_per_item: int | None = SHORTEST_LIMIT
    """Intra-GPU balancing: longest sub-block in blocks; None runs rows whole, unbalanced."""


def choose_options(
    channels: int, *, dtype: torch.dtype, block_size: int, shared_memory_bytes: int = HOPPER_SHARED_MEMORY_BYTES
) -> KernelOptions:
    """Choose tiles by head size, close to those of FlexAttention on Hopper GPUs; on sm_90 they spill few registers or none.

    shared_memory_bytes: of a program; block_size: a power of two of at least 16. Raises ConfigError for heads beyond 256.
    """
    if channels > MAX_CHANNELS:
        raise ConfigError(
            f"--attention-backend triton: heads of {channels} channels are too large, its kernels hold at most {MAX_CHANNELS}; "
            "choose --attention-backend blocks"
        )
    if dtype not in (torch.float16, torch.bfloat16):
        side = 32 if channels <= 128 else 16
        tiles = (TileSizes(side, side, 4, 1),) * 3
    elif shared_memory_bytes < LARGE_TILES_BYTES:
        tiles = TileSizes(64, 32, 4, 2), TileSizes(64, 32, 4, 1), TileSizes(32, 32, 4, 1)
    elif channels <= 64:
        tiles = TileSizes(128, 128, 8, 3), TileSizes(128, 64, 8, 3), TileSizes(128, 64, 8, 3)
    elif channels <= 128:
        tiles = TileSizes(128, 64, 8, 3), TileSizes(128, 64, 8, 2), TileSizes(128, 32, 8, 3)
    else:
        tiles = TileSizes(64, 32, 8, 3), TileSizes(64, 32, 8, 2), TileSizes(64, 32, 8, 2)
    fitting = [replace(tile, rows=min(tile.rows, block_size), columns=min(tile.columns, block_size)) for tile in tiles]
    return KernelOptions(fitting[0], fitting[1], fitting[2])


def longest_item(num_blocks: int, *, num_heads: int, num_multiprocessors: int) -> int:
    """Return the longest sub-block with which all programs still end at about the same time; num_blocks: those of the mask.

    If there is enough work beside it, even the longest row is short enough, and nothing is cut; so the partial results of cut
    rows have at most `ITEMS_PER_PROGRAM` blocks of tokens per program, however long the sequence.
    """
    num_items = ITEMS_PER_PROGRAM * PROGRAMS_PER_MULTIPROCESSOR * max(1, num_multiprocessors)
    return max(SHORTEST_LIMIT, -(-num_blocks * num_heads // num_items))
