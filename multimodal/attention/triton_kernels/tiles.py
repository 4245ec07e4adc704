"""Functions that the attention kernels share: the mask of a tile, loading and storing tiles."""

import triton
import triton.language as tl

ACROSS_ITEMS_BIT = tl.constexpr(1 << 62)
SIZES = ("num_queries", "num_keys", "num_tokens", "num_tickets", "num_slot_rows")
"""Arguments that change with the microbatch. Triton compiles anew for sizes that are 1 or that 16 divides, which would stop ranks
in the middle of training, each at another step."""


@triton.jit
def load_tokens(bits, ids, rows, num_tokens, is_there):
    """Load the mask of a tile of tokens: bits (0 where there is no token, which sees nothing), samples, items, positions."""
    return (
        tl.load(bits + rows, mask=is_there, other=0),
        tl.load(ids + rows, mask=is_there, other=0),
        tl.load(ids + num_tokens + rows, mask=is_there, other=0),
        tl.load(ids + 2 * num_tokens + rows, mask=is_there, other=0),
    )


@triton.jit
def tile_sees(bits, samples, items, positions, key_bits, key_samples, key_items, key_positions, WINDOW: tl.constexpr):
    """Evaluate the rule of bitfield.py; the arguments of queries and keys broadcast against each other. WINDOW: 0 without one."""
    seen = (samples == key_samples) & ((bits & key_bits) != 0)
    same_item = (items == key_items) | ((bits & ACROSS_ITEMS_BIT) != 0)
    is_before = key_positions <= positions
    if WINDOW:
        is_before = is_before & (key_positions > positions - WINDOW)
    return seen & tl.where(bits < 0, is_before, same_item)


@triton.jit
def load_tile(
    base, start, channels, stride, num_tokens,
    TILE: tl.constexpr, CHECK_ROWS: tl.constexpr, CHECK_CHANNELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Load [TILE, channels] from row `start` on; zeros beyond the last token or channel."""
    rows = tl.arange(0, TILE)
    # Only the scalar part of an address may need 64 bits.
    pointers = base + start.to(tl.int64) * stride + (rows[:, None] * stride + channels[None, :])
    if CHECK_ROWS and CHECK_CHANNELS:
        tile = tl.load(pointers, mask=(start + rows < num_tokens)[:, None] & (channels < CHANNELS)[None, :], other=0.0)
    elif CHECK_ROWS:
        tile = tl.load(pointers, mask=(start + rows < num_tokens)[:, None], other=0.0)
    elif CHECK_CHANNELS:
        tile = tl.load(pointers, mask=(channels < CHANNELS)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def store_tile(base, tile, start, channels, stride, num_tokens, TILE: tl.constexpr, CHANNELS: tl.constexpr):
    """Store [TILE, channels] from row `start` on, without rows and channels beyond the last token or channel."""
    rows = tl.arange(0, TILE)
    pointers = base + start.to(tl.int64) * stride + (rows[:, None] * stride + channels[None, :])
    is_there = (start + rows < num_tokens)[:, None] & (channels < CHANNELS)[None, :]
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=is_there)
