"""The work of a persistent grid of GPU programs: every block's work cut into sub-blocks, longest first.

One block of queries may attend to a hundred times as many blocks of keys as another, so with a program per block most of a GPU
waits for the longest (Cornstarch, thesis 3.3.2.2). If the work is cut into sub-blocks of bounded length, taken longest first by
free programs, all programs end at about the same time; sub-blocks of one block leave partial results that are added up
afterwards.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from multimodal.attention.block_summary import BlockLists
from multimodal.kernels import kernels

DIRECT = -1
"""The slot of an item that is the only one of its row: it writes the result directly."""


@dataclass(frozen=True, slots=True, eq=False)
class OrderedBlocks:
    """Block lists whose rows have their full blocks first, then those that need the mask; each kind ascending."""

    row_starts: NDArray[np.int32]
    """[num_rows + 1]."""
    full_ends: NDArray[np.int32]
    """[num_rows]: the entries row_starts[r] .. full_ends[r] - 1 are full."""
    blocks: NDArray[np.int32]
    """[num_entries]."""


@dataclass(frozen=True, slots=True, eq=False)
class WorkList:
    """Items in the order in which programs take them."""

    items: NDArray[np.int32]
    """[num_items, 5]: row, first entry, end of its full entries, end of its entries, slot of its partial result or DIRECT."""
    split_rows: NDArray[np.int32]
    """[num_split_rows, 3]: row, first slot, number of slots."""
    num_slots: int


def order_blocks(lists: BlockLists, *, num_row_tokens: int, num_column_tokens: int, block_size: int) -> OrderedBlocks:
    """Order every row; a block that extends beyond the last token counts as partial, so that the mask hides the excess.

    num_row_tokens, num_column_tokens: tokens along the rows and along the listed blocks. Runs as a C++ kernel, with the same
    result, if the kernels are built. O(listed blocks).
    """
    num_whole_rows, num_whole_columns = num_row_tokens // block_size, num_column_tokens // block_size
    row_starts = lists.row_starts.astype(np.int32)
    if kernels is not None:
        arrays = lists.row_starts, lists.blocks, lists.is_full
        return OrderedBlocks(row_starts, *kernels.order_blocks(*arrays, num_whole_rows, num_whole_columns))
    counts = np.diff(lists.row_starts)
    row_of_entry = np.repeat(np.arange(len(counts)), counts)
    is_full = lists.is_full & (lists.blocks < num_whole_columns) & (row_of_entry < num_whole_rows)
    order = np.argsort(2 * row_of_entry + ~is_full, kind="stable")
    num_full = np.bincount(row_of_entry[is_full], minlength=len(counts))
    return OrderedBlocks(row_starts, (lists.row_starts[:-1] + num_full).astype(np.int32), lists.blocks[order])


def plan_work_list(blocks: OrderedBlocks, *, max_blocks_per_item: int | None) -> WorkList:
    """Cut rows into items of nearly equal length, at most `max_blocks_per_item` each, and sort the items longest first.

    max_blocks_per_item: at least 1; None keeps rows whole and in order: a grid without balancing. Equal lengths keep the order of
    rows, whose neighbours share blocks. Runs as a C++ kernel, with the same result, if the kernels are built. O(items).
    """
    if kernels is not None:
        items, split_rows, num_slots = kernels.plan_work_list(blocks.row_starts, blocks.full_ends, max_blocks_per_item or 0)
        return WorkList(items.reshape(-1, 5), split_rows.reshape(-1, 3), num_slots)
    lengths = np.diff(blocks.row_starts).astype(np.int64)
    limit = max_blocks_per_item or max(1, int(lengths.max(initial=1)))
    parts = np.maximum(1, -(-lengths // limit))
    row = np.repeat(np.arange(len(lengths)), parts)
    first_item = np.cumsum(parts) - parts
    part = np.arange(len(row)) - first_item[row]
    begin, end = (blocks.row_starts[row] + lengths[row] * edge // parts[row] for edge in (part, part + 1))
    full_end = np.clip(blocks.full_ends[row], begin, end)
    is_split = parts > 1
    first_slot = np.cumsum(np.where(is_split, parts, 0)) - np.where(is_split, parts, 0)
    slot = np.where(is_split[row], first_slot[row] + part, DIRECT)
    items = np.stack((row, begin, full_end, end, slot), axis=1).astype(np.int32)
    if max_blocks_per_item is not None:
        items = items[np.argsort(begin - end, kind="stable")]
    split_rows = np.stack((np.flatnonzero(is_split), first_slot[is_split], parts[is_split]), axis=1).astype(np.int32)
    return WorkList(items, split_rows, int(parts[is_split].sum()))
