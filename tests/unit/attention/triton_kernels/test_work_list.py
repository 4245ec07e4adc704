import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from multimodal.attention.attention_backend import AttentionMask
from multimodal.attention.block_summary import BlockLists
from multimodal.attention.triton_kernels.work_list import DIRECT, OrderedBlocks, WorkList, order_blocks, plan_work_list
from tests.unit.attention.mask_cases import random_masks

ROWS = st.lists(st.lists(st.booleans(), max_size=9), min_size=1, max_size=8)
"""Per row, whether each of its blocks is full."""


def lists_of(rows: list[list[bool]]) -> BlockLists:
    starts = np.cumsum([0, *map(len, rows)])
    blocks = [block for row in rows for block in range(len(row))]
    return BlockLists(starts, np.array(blocks, dtype=np.int32), np.array([full for row in rows for full in row], dtype=np.bool_))


def ordered(rows: list[list[bool]]) -> OrderedBlocks:
    return order_blocks(lists_of(rows), num_row_tokens=100, num_column_tokens=100, block_size=10)


def entries_of(work: WorkList, row: int) -> list[int]:
    return sorted(entry for each, begin, _, end, _ in work.items.tolist() if each == row for entry in range(begin, end))


def test_a_long_row_becomes_even_items_that_are_taken_first() -> None:
    work = plan_work_list(ordered([[True], [True] * 6 + [False], [True, False]]), max_blocks_per_item=3)
    # row, begin, end of full, end, slot
    assert work.items.tolist() == [[1, 5, 7, 8, 2], [1, 1, 3, 3, 0], [1, 3, 5, 5, 1], [2, 8, 9, 10, DIRECT], [0, 0, 1, 1, DIRECT]]
    assert (work.split_rows.tolist(), work.num_slots) == ([[1, 0, 3]], 3)


@given(rows=ROWS, limit=st.none() | st.integers(1, 5))
def test_every_entry_is_in_one_item_and_every_slot_in_one_join(rows: list[list[bool]], limit: int | None) -> None:
    blocks = ordered(rows)
    work = plan_work_list(blocks, max_blocks_per_item=limit)
    for row in range(len(rows)):
        assert entries_of(work, row) == list(range(blocks.row_starts[row], blocks.row_starts[row + 1]))
    lengths = work.items[:, 3] - work.items[:, 1]
    slots = sorted(slot for slot in work.items[:, 4].tolist() if slot != DIRECT)
    split_slots = [first + part for _, first, num in work.split_rows.tolist() for part in range(num)]
    assert slots == list(range(work.num_slots)) == split_slots
    assert limit is None or (max(lengths) <= limit and sorted(lengths, reverse=True) == lengths.tolist())
    is_full = [False] * len(blocks.blocks)
    for _, begin, full_end, _, _ in work.items.tolist():
        is_full[begin:full_end] = [True] * (full_end - begin)
    assert sum(is_full) == sum(map(sum, rows))


@given(mask=random_masks())
def test_full_entries_need_no_mask(mask: AttentionMask) -> None:
    visible = mask.tokens.to_dense()[mask.query_positions]
    sizes = {"num_row_tokens": mask.num_queries, "num_column_tokens": mask.num_keys, "block_size": mask.block_size}
    blocks = order_blocks(mask.by_query, **sizes)
    seen = np.zeros_like(visible)
    for row, (begin, full_end, end) in enumerate(
        zip(blocks.row_starts[:-1], blocks.full_ends, blocks.row_starts[1:], strict=True)
    ):
        queries = slice(row * mask.block_size, (row + 1) * mask.block_size)
        for entry in range(begin, end):
            keys = slice(blocks.blocks[entry] * mask.block_size, (blocks.blocks[entry] + 1) * mask.block_size)
            seen[queries, keys] = visible[queries, keys]
            assert entry >= full_end or (visible[queries, keys].all() and visible[queries, keys].size == mask.block_size**2)
    assert np.array_equal(seen, visible)
