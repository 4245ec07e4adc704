"""The backward kernels of bitfield attention: the gradient of queries over rows of blocks, those of keys and values over columns.

Both recompute the weights from the forward's sums of exponentials (FlashAttention-2, Dao 2023) and visit only listed blocks;
neither needs atomics on gradients, so results do not depend on the order in which items run.
"""

import triton
import triton.language as tl

from multimodal.attention.triton_kernels.forward import SIZES, load_tile, load_tokens, store_tile, take_ticket, tile_sees


@triton.jit(do_not_specialize=SIZES)
def query_gradient_kernel(
    query, key, value, output_gradient, log_sums, deltas, query_gradient, partial,
    query_bits, query_ids, key_bits, key_ids, blocks, items, counter, scale_log2, scale,
    query_stride, query_head_stride, key_stride, key_head_stride, value_stride, value_head_stride,
    num_queries, num_keys, num_tickets, num_heads, num_slot_rows,
    HEADS_PER_GROUP: tl.constexpr, CHANNELS: tl.constexpr, PADDED_CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, DOT_TYPE: tl.constexpr, IS_DYNAMIC: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Work through tickets as the forward does; output_gradient contiguous, deltas: [heads, num_queries], float32.

    query_gradient: like query, contiguous; partial: [heads, num_slot_rows, padded channels], float32, to be summed.
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
        gradient_tile = load_tile(
            output_gradient + head * CHANNELS, start, channels, num_heads * CHANNELS, num_queries, TILE_ROWS, True, CHANNELS,
        ).to(DOT_TYPE)  # fmt: skip
        first = head.to(tl.int64) * num_queries
        log_sum = tl.load(log_sums + first + rows, mask=rows < num_queries, other=0.0)
        log_sum = tl.where(log_sum == float("-inf"), 0.0, log_sum)
        delta = tl.load(deltas + first + rows, mask=rows < num_queries, other=0.0)
        bits, samples, members, positions = load_tokens(query_bits, query_ids, rows, num_queries, rows < num_queries)
        gradient = tl.zeros([TILE_ROWS, PADDED_CHANNELS], tl.float32)
        key_base = key + group.to(tl.int64) * key_head_stride
        value_base = value + group.to(tl.int64) * value_head_stride
        gradient = _add_query_gradients(
            gradient, query_tile, gradient_tile, log_sum, delta, bits, samples, members, positions, key_base, value_base,
            key_bits, key_ids, blocks, begin, full_end, scale_log2, key_stride, value_stride, num_keys, channels,
            CHANNELS, PADDED_CHANNELS, BLOCK, TILE_COLUMNS, DOT_TYPE, False, WINDOW,
        )  # fmt: skip
        gradient = _add_query_gradients(
            gradient, query_tile, gradient_tile, log_sum, delta, bits, samples, members, positions, key_base, value_base,
            key_bits, key_ids, blocks, full_end, end, scale_log2, key_stride, value_stride, num_keys, channels,
            CHANNELS, PADDED_CHANNELS, BLOCK, TILE_COLUMNS, DOT_TYPE, True, WINDOW,
        )  # fmt: skip
        if slot < 0:
            store_tile(
                query_gradient + head * CHANNELS, gradient * scale, start, channels, num_heads * CHANNELS, num_queries,
                TILE_ROWS, CHANNELS,
            )  # fmt: skip
        else:
            store_tile(
                partial + head.to(tl.int64) * num_slot_rows * PADDED_CHANNELS, gradient * scale, slot * BLOCK + tile_start,
                channels, PADDED_CHANNELS, num_slot_rows, TILE_ROWS, PADDED_CHANNELS,
            )  # fmt: skip
        ticket = take_ticket(counter, ticket + tl.num_programs(0), IS_DYNAMIC)


@triton.jit
def _add_query_gradients(
    gradient, query_tile, gradient_tile, log_sum, delta, bits, samples, members, positions, key_base, value_base,
    key_bits, key_ids, blocks, begin, end, scale_log2, key_stride, value_stride, num_keys, channels,
    CHANNELS: tl.constexpr, PADDED_CHANNELS: tl.constexpr, BLOCK: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    DOT_TYPE: tl.constexpr, IS_PARTIAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = BLOCK // TILE_COLUMNS
    for step in range(begin * tiles, end * tiles):
        start = tl.load(blocks + step // tiles) * BLOCK + step % tiles * TILE_COLUMNS
        columns = start + tl.arange(0, TILE_COLUMNS)
        key_tile = load_tile(key_base, start, channels, key_stride, num_keys, TILE_COLUMNS, IS_PARTIAL, CHANNELS).to(DOT_TYPE)
        value_tile = load_tile(
            value_base, start, channels, value_stride, num_keys, TILE_COLUMNS, IS_PARTIAL, CHANNELS
        ).to(DOT_TYPE)  # fmt: skip
        scores = tl.dot(query_tile, tl.trans(key_tile), input_precision="ieee") * scale_log2
        if IS_PARTIAL:
            kinds, key_samples, key_members, key_positions = load_tokens(key_bits, key_ids, columns, num_keys, columns < num_keys)
            visible = tile_sees(
                bits[:, None], samples[:, None], members[:, None], positions[:, None],
                kinds[None, :], key_samples[None, :], key_members[None, :], key_positions[None, :], WINDOW,
            )  # fmt: skip
            scores = tl.where(visible, scores, float("-inf"))
        weights = tl.exp2(scores - log_sum[:, None])
        weight_gradient = tl.dot(gradient_tile, tl.trans(value_tile), input_precision="ieee")
        score_gradient = weights * (weight_gradient - delta[:, None])
        gradient = tl.dot(score_gradient.to(key_base.dtype.element_ty).to(DOT_TYPE), key_tile, gradient, input_precision="ieee")
    return gradient


@triton.jit(do_not_specialize=SIZES)
def key_value_gradient_kernel(
    query, key, value, output_gradient, log_sums, deltas, key_gradient, value_gradient, partial_key, partial_value,
    query_bits, query_ids, key_bits, key_ids, blocks, items, counter, scale_log2, scale,
    query_stride, query_head_stride, key_stride, key_head_stride, value_stride, value_head_stride,
    num_queries, num_keys, num_tickets, num_groups, num_slot_rows,
    HEADS_PER_GROUP: tl.constexpr, CHANNELS: tl.constexpr, PADDED_CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, DOT_TYPE: tl.constexpr, IS_DYNAMIC: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Work through tickets (item, tile of a block of keys, group); rows are keys here and the listed blocks are of queries.

    A program adds up all query heads of its group. key_gradient, value_gradient: [num_keys, groups, channels], contiguous;
    partial_key, partial_value: [groups, num_slot_rows, padded channels], float32, to be summed.
    """
    tiles: tl.constexpr = BLOCK // TILE_ROWS
    channels = tl.arange(0, PADDED_CHANNELS)
    ticket = take_ticket(counter, tl.program_id(0), IS_DYNAMIC)
    while ticket < num_tickets:
        group = ticket % num_groups
        item = items + ticket // num_groups // tiles * 5
        tile_start = ticket // num_groups % tiles * TILE_ROWS
        start = tl.load(item) * BLOCK + tile_start
        rows = start + tl.arange(0, TILE_ROWS)
        begin, full_end, end, slot = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3), tl.load(item + 4)
        key_tile = load_tile(
            key + group.to(tl.int64) * key_head_stride, start, channels, key_stride, num_keys, TILE_ROWS, True, CHANNELS,
        ).to(DOT_TYPE)  # fmt: skip
        value_tile = load_tile(
            value + group.to(tl.int64) * value_head_stride, start, channels, value_stride, num_keys, TILE_ROWS, True, CHANNELS,
        ).to(DOT_TYPE)  # fmt: skip
        kinds, samples, members, positions = load_tokens(key_bits, key_ids, rows, num_keys, rows < num_keys)
        key_sum = tl.zeros([TILE_ROWS, PADDED_CHANNELS], tl.float32)
        value_sum = tl.zeros([TILE_ROWS, PADDED_CHANNELS], tl.float32)
        for head in range(group * HEADS_PER_GROUP, (group + 1) * HEADS_PER_GROUP):
            query_base = query + tl.cast(head, tl.int64) * query_head_stride
            gradient_base = output_gradient + head * CHANNELS
            first_query = tl.cast(head, tl.int64) * num_queries
            key_sum, value_sum = _add_key_value_gradients(
                key_sum, value_sum, key_tile, value_tile, kinds, samples, members, positions, query_base, gradient_base,
                log_sums + first_query, deltas + first_query, query_bits, query_ids, blocks, begin, full_end, scale_log2,
                query_stride, num_groups * HEADS_PER_GROUP * CHANNELS, num_queries, channels,
                CHANNELS, PADDED_CHANNELS, BLOCK, TILE_COLUMNS, DOT_TYPE, False, WINDOW,
            )  # fmt: skip
            key_sum, value_sum = _add_key_value_gradients(
                key_sum, value_sum, key_tile, value_tile, kinds, samples, members, positions, query_base, gradient_base,
                log_sums + first_query, deltas + first_query, query_bits, query_ids, blocks, full_end, end, scale_log2,
                query_stride, num_groups * HEADS_PER_GROUP * CHANNELS, num_queries, channels,
                CHANNELS, PADDED_CHANNELS, BLOCK, TILE_COLUMNS, DOT_TYPE, True, WINDOW,
            )  # fmt: skip
        if slot < 0:
            stride = num_groups * CHANNELS
            first_channel = group * CHANNELS
            store_tile(key_gradient + first_channel, key_sum * scale, start, channels, stride, num_keys, TILE_ROWS, CHANNELS)
            store_tile(value_gradient + first_channel, value_sum, start, channels, stride, num_keys, TILE_ROWS, CHANNELS)
        else:
            slot_start = slot * BLOCK + tile_start
            first = group.to(tl.int64) * num_slot_rows * PADDED_CHANNELS
            store_tile(
                partial_key + first, key_sum * scale, slot_start, channels, PADDED_CHANNELS, num_slot_rows, TILE_ROWS,
                PADDED_CHANNELS,
            )  # fmt: skip
            store_tile(
                partial_value + first, value_sum, slot_start, channels, PADDED_CHANNELS, num_slot_rows, TILE_ROWS,
                PADDED_CHANNELS,
            )  # fmt: skip
        ticket = take_ticket(counter, ticket + tl.num_programs(0), IS_DYNAMIC)


@triton.jit
def _add_key_value_gradients(
    key_sum, value_sum, key_tile, value_tile, kinds, samples, members, positions, query_base, gradient_base,
    log_sums, deltas, query_bits, query_ids, blocks, begin, end, scale_log2, query_stride, gradient_stride, num_queries, channels,
    CHANNELS: tl.constexpr, PADDED_CHANNELS: tl.constexpr, BLOCK: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    DOT_TYPE: tl.constexpr, IS_PARTIAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Add the gradients from the listed blocks of queries of one head; tiles of weights are [keys, queries]."""
    tiles: tl.constexpr = BLOCK // TILE_COLUMNS
    for step in range(begin * tiles, end * tiles):
        start = tl.load(blocks + step // tiles) * BLOCK + step % tiles * TILE_COLUMNS
        columns = start + tl.arange(0, TILE_COLUMNS)
        query_tile = load_tile(
            query_base, start, channels, query_stride, num_queries, TILE_COLUMNS, IS_PARTIAL, CHANNELS
        ).to(DOT_TYPE)  # fmt: skip
        gradient_tile = load_tile(
            gradient_base, start, channels, gradient_stride, num_queries, TILE_COLUMNS, IS_PARTIAL, CHANNELS
        ).to(DOT_TYPE)
        scores = tl.dot(key_tile, tl.trans(query_tile), input_precision="ieee") * scale_log2
        if IS_PARTIAL:
            is_there = columns < num_queries
            log_sum = tl.load(log_sums + columns, mask=is_there, other=0.0)
            log_sum = tl.where(log_sum == float("-inf"), 0.0, log_sum)
            delta = tl.load(deltas + columns, mask=is_there, other=0.0)
            bits, query_samples, query_members, query_positions = load_tokens(
                query_bits, query_ids, columns, num_queries, is_there
            )
            visible = tile_sees(
                bits[None, :], query_samples[None, :], query_members[None, :], query_positions[None, :],
                kinds[:, None], samples[:, None], members[:, None], positions[:, None], WINDOW,
            )  # fmt: skip
            scores = tl.where(visible, scores, float("-inf"))
        else:
            log_sum = tl.load(log_sums + columns)
            delta = tl.load(deltas + columns)
        weights = tl.exp2(scores - log_sum[None, :])
        element: tl.constexpr = query_base.dtype.element_ty
        value_sum = tl.dot(weights.to(element).to(DOT_TYPE), gradient_tile, value_sum, input_precision="ieee")
        weight_gradient = tl.dot(value_tile, tl.trans(gradient_tile), input_precision="ieee")
        score_gradient = weights * (weight_gradient - delta[None, :])
        key_sum = tl.dot(score_gradient.to(element).to(DOT_TYPE), query_tile, key_sum, input_precision="ieee")
    return key_sum, value_sum


@triton.jit(do_not_specialize=SIZES)
def join_gradients_kernel(
    partial, split_rows, gradient, num_tokens, num_heads, num_slot_rows,
    CHANNELS: tl.constexpr, PADDED_CHANNELS: tl.constexpr, BLOCK: tl.constexpr, TILE_ROWS: tl.constexpr,
):  # fmt: skip
    """Sum the partial gradients of split rows, in the order of their slots; grid: (split rows x tiles of a row, heads)."""
    tiles: tl.constexpr = BLOCK // TILE_ROWS
    split_row = split_rows + tl.program_id(0) // tiles * 3
    head = tl.program_id(1).to(tl.int64)
    tile_start = tl.program_id(0) % tiles * TILE_ROWS
    within = tile_start + tl.arange(0, TILE_ROWS)
    start = tl.load(split_row) * BLOCK + tile_start
    first_slot, num_slots = tl.load(split_row + 1), tl.load(split_row + 2)
    channels = tl.arange(0, PADDED_CHANNELS)
    total = tl.zeros([TILE_ROWS, PADDED_CHANNELS], tl.float32)
    for slot in range(first_slot, first_slot + num_slots):
        slot_rows = head * num_slot_rows + slot * BLOCK + within
        total += tl.load(partial + slot_rows[:, None] * PADDED_CHANNELS + channels[None, :])
    store_tile(gradient + head * CHANNELS, total, start, channels, num_heads * CHANNELS, num_tokens, TILE_ROWS, CHANNELS)


@triton.jit(do_not_specialize=SIZES)
def delta_kernel(
    output, output_gradient, deltas, num_queries, num_heads,
    CHANNELS: tl.constexpr, PADDED_CHANNELS: tl.constexpr, TILE_ROWS: tl.constexpr,
):  # fmt: skip
    """Write deltas: [heads, num_queries], each row's output times its gradient, which the softmax's gradient subtracts.

    output, output_gradient: [num_queries, heads, channels], contiguous; grid: (tiles of queries, heads).
    """
    head = tl.program_id(1).to(tl.int64)
    start = tl.program_id(0) * TILE_ROWS
    rows = start + tl.arange(0, TILE_ROWS)
    channels = tl.arange(0, PADDED_CHANNELS)
    tile = load_tile(
        output + head * CHANNELS, start, channels, num_heads * CHANNELS, num_queries, TILE_ROWS, True, CHANNELS,
    )  # fmt: skip
    gradient = load_tile(
        output_gradient + head * CHANNELS, start, channels, num_heads * CHANNELS, num_queries, TILE_ROWS, True, CHANNELS,
    )  # fmt: skip
    found = tl.sum(tile.to(tl.float32) * gradient.to(tl.float32), 1)
    tl.store(deltas + head * num_queries + rows, found, mask=rows < num_queries)
