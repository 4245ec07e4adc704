"""The forward kernel of bitfield attention, over planned work items, and the kernel that adds up partial results of split rows.

Online softmax as in FlashAttention-2 (Dao 2023), in base 2; the work list alone determines the tiles that are visited.
"""

import triton
import triton.language as tl

ACROSS_ITEMS_BIT = tl.constexpr(1 << 62)
SIZES = ("num_queries", "num_keys", "num_tokens", "num_tickets", "num_slot_rows")
"""Arguments that change with the microbatch. Triton compiles anew for sizes that are 1 or that 16 divides, which would stop ranks
in the middle of training, each at another step."""


@triton.jit
def take_ticket(counter, own, IS_DYNAMIC: tl.constexpr):
    """Return the next ticket of a program: of the counter if programs share it, else its own."""
    if IS_DYNAMIC:
        own = tl.atomic_add(counter, 1)
    return own


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
def load_tile(base, start, channels, stride, num_tokens, TILE: tl.constexpr, CHECK_ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """Load [TILE, channels] from row `start` on; zeros beyond the last token or channel."""
    check_channels: tl.constexpr = channels.shape[0] != CHANNELS
    rows = tl.arange(0, TILE)
    # Only the scalar part of an address may need 64 bits.
    pointers = base + start.to(tl.int64) * stride + (rows[:, None] * stride + channels[None, :])
    if CHECK_ROWS and check_channels:
        tile = tl.load(pointers, mask=(start + rows < num_tokens)[:, None] & (channels < CHANNELS)[None, :], other=0.0)
    elif CHECK_ROWS:
        tile = tl.load(pointers, mask=(start + rows < num_tokens)[:, None], other=0.0)
    elif check_channels:
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


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    query, key, value, output, log_sums, partial_output, partial_log_sums,
    query_bits, query_ids, key_bits, key_ids, blocks, items, counter, scale_log2,
    query_stride, query_head_stride, key_stride, key_head_stride, value_stride, value_head_stride,
    num_queries, num_keys, num_tickets, num_heads, num_slot_rows,
    HEADS_PER_GROUP: tl.constexpr, CHANNELS: tl.constexpr, PADDED_CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, DOT_TYPE: tl.constexpr, IS_DYNAMIC: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Work through tickets: (item, tile of the item's row, head).

    query: [num_queries, heads, channels], key, value: [num_keys, groups, channels], channels contiguous; output contiguous;
    log_sums: [heads, num_queries], float32, base 2. partial_output: [heads, num_slot_rows, padded channels], float32;
    partial_log_sums: [heads, num_slot_rows]. num_slot_rows = slots x BLOCK.
    counter: zero; if IS_DYNAMIC, programs take the next ticket from it, else every program runs its own ticket.
    """
    tiles: tl.constexpr = BLOCK // TILE_ROWS
    channels = tl.arange(0, PADDED_CHANNELS)
    ticket = take_ticket(counter, tl.program_id(0), IS_DYNAMIC)
    while ticket < num_tickets:
        head = ticket % num_heads
        item = items + ticket // num_heads // tiles * 5
        tile_start = ticket // num_heads % tiles * TILE_ROWS
        start = tl.load(item) * BLOCK + tile_start
        rows = start + tl.arange(0, TILE_ROWS)
        begin, full_end, end, slot = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3), tl.load(item + 4)
        group = head // HEADS_PER_GROUP
        query_tile = load_tile(
            query + head.to(tl.int64) * query_head_stride, start, channels, query_stride, num_queries, TILE_ROWS, True, CHANNELS,
        ).to(DOT_TYPE)  # fmt: skip
        bits, samples, members, positions = load_tokens(query_bits, query_ids, rows, num_queries, rows < num_queries)
        maximum = tl.full([TILE_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([TILE_ROWS], tl.float32)
        mixed = tl.zeros([TILE_ROWS, PADDED_CHANNELS], tl.float32)
        key_base = key + group.to(tl.int64) * key_head_stride
        value_base = value + group.to(tl.int64) * value_head_stride
        mixed, maximum, total = _mix_tiles(
            mixed, maximum, total, query_tile, bits, samples, members, positions, key_base, value_base, key_bits, key_ids,
            blocks, begin, full_end, scale_log2, key_stride, value_stride, num_keys, channels,
            CHANNELS, PADDED_CHANNELS, BLOCK, TILE_COLUMNS, DOT_TYPE, False, WINDOW,
        )  # fmt: skip
        mixed, maximum, total = _mix_tiles(
            mixed, maximum, total, query_tile, bits, samples, members, positions, key_base, value_base, key_bits, key_ids,
            blocks, full_end, end, scale_log2, key_stride, value_stride, num_keys, channels,
            CHANNELS, PADDED_CHANNELS, BLOCK, TILE_COLUMNS, DOT_TYPE, True, WINDOW,
        )  # fmt: skip
        # If a query attends to no key (of this sub-block), the maximum is minus infinity and so is the logarithm: weight 0 when
        # joined.
        divisor = tl.where(total == 0.0, 1.0, total)
        mixed = mixed / divisor[:, None]
        log_sum = maximum + tl.log2(divisor)
        if slot < 0:
            store_tile(output + head * CHANNELS, mixed, start, channels, num_heads * CHANNELS, num_queries, TILE_ROWS, CHANNELS)
            tl.store(log_sums + head.to(tl.int64) * num_queries + rows, log_sum, mask=rows < num_queries)
        else:
            slot_start = slot * BLOCK + tile_start
            first = head.to(tl.int64) * num_slot_rows
            store_tile(
                partial_output + first * PADDED_CHANNELS, mixed, slot_start, channels, PADDED_CHANNELS, num_slot_rows,
                TILE_ROWS, PADDED_CHANNELS,
            )  # fmt: skip
            tl.store(partial_log_sums + first + slot_start + tl.arange(0, TILE_ROWS), log_sum)
        ticket = take_ticket(counter, ticket + tl.num_programs(0), IS_DYNAMIC)


@triton.jit
def _mix_tiles(
    mixed, maximum, total, query_tile, bits, samples, members, positions, key_base, value_base, key_bits, key_ids,
    blocks, begin, end, scale_log2, key_stride, value_stride, num_keys, channels,
    CHANNELS: tl.constexpr, PADDED_CHANNELS: tl.constexpr, BLOCK: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    DOT_TYPE: tl.constexpr, IS_PARTIAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Mix in the values of the listed blocks; the mask is evaluated only where IS_PARTIAL."""
    tiles: tl.constexpr = BLOCK // TILE_COLUMNS
    for step in range(begin * tiles, end * tiles):
        start = tl.load(blocks + step // tiles) * BLOCK + step % tiles * TILE_COLUMNS
        columns = start + tl.arange(0, TILE_COLUMNS)
        key_tile = load_tile(key_base, start, channels, key_stride, num_keys, TILE_COLUMNS, IS_PARTIAL, CHANNELS)
        scores = tl.dot(query_tile, tl.trans(key_tile).to(DOT_TYPE), input_precision="ieee") * scale_log2
        if IS_PARTIAL:
            kinds, key_samples, key_members, key_positions = load_tokens(key_bits, key_ids, columns, num_keys, columns < num_keys)
            visible = tile_sees(
                bits[:, None], samples[:, None], members[:, None], positions[:, None],
                kinds[None, :], key_samples[None, :], key_members[None, :], key_positions[None, :], WINDOW,
            )  # fmt: skip
            scores = tl.where(visible, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        if IS_PARTIAL:
            pivot = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        else:
            pivot = new_maximum
        weights = tl.exp2(scores - pivot[:, None])
        shrink = tl.exp2(maximum - pivot)
        total = total * shrink + tl.sum(weights, 1)
        value_tile = load_tile(value_base, start, channels, value_stride, num_keys, TILE_COLUMNS, IS_PARTIAL, CHANNELS)
        mixed = tl.dot(
            weights.to(value_base.dtype.element_ty).to(DOT_TYPE), value_tile.to(DOT_TYPE), mixed * shrink[:, None],
            input_precision="ieee",
        )  # fmt: skip
        maximum = new_maximum
    return mixed, maximum, total


@triton.jit(do_not_specialize=SIZES)
def join_outputs_kernel(
    partial_output, partial_log_sums, split_rows, output, log_sums, num_queries, num_heads, num_slot_rows,
    CHANNELS: tl.constexpr, PADDED_CHANNELS: tl.constexpr, BLOCK: tl.constexpr, TILE_ROWS: tl.constexpr,
):  # fmt: skip
    """Add up the partial outputs of split rows, weighted by their sums of exponentials; grid: (split rows x tiles, heads)."""
    tiles: tl.constexpr = BLOCK // TILE_ROWS
    split_row = split_rows + tl.program_id(0) // tiles * 3
    head = tl.program_id(1).to(tl.int64)
    tile_start = tl.program_id(0) % tiles * TILE_ROWS
    within = tile_start + tl.arange(0, TILE_ROWS)
    start = tl.load(split_row) * BLOCK + tile_start
    rows = start + tl.arange(0, TILE_ROWS)
    first_slot, num_slots = tl.load(split_row + 1), tl.load(split_row + 2)
    channels = tl.arange(0, PADDED_CHANNELS)
    maximum = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    mixed = tl.zeros([TILE_ROWS, PADDED_CHANNELS], tl.float32)
    for slot in range(first_slot, first_slot + num_slots):
        slot_rows = head * num_slot_rows + slot * BLOCK + within
        log_sum = tl.load(partial_log_sums + slot_rows)
        new_maximum = tl.maximum(maximum, log_sum)
        pivot = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weight, shrink = tl.exp2(log_sum - pivot), tl.exp2(maximum - pivot)
        part = tl.load(partial_output + slot_rows[:, None] * PADDED_CHANNELS + channels[None, :])
        mixed = mixed * shrink[:, None] + part * weight[:, None]
        total = total * shrink + weight
        maximum = new_maximum
    divisor = tl.where(total == 0.0, 1.0, total)
    mixed = mixed / divisor[:, None]
    store_tile(output + head * CHANNELS, mixed, start, channels, num_heads * CHANNELS, num_queries, TILE_ROWS, CHANNELS)
    tl.store(log_sums + head * num_queries + rows, maximum + tl.log2(divisor), mask=rows < num_queries)
