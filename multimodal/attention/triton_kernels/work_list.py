"""The work of a persistent grid of GPU programs: every block's work cut into sub-blocks, longest first.

One block of queries may attend to a hundred times as many blocks of keys as another, so with a program per block most of a GPU
waits for the longest (Cornstarch, thesis 3.3.2.2). If the work is cut into sub-blocks of bounded length, taken longest first by
free programs, all programs end at about the same time; sub-blocks of one block leave partial results that are added up
afterwards. The C++ kernels plan it; without them there is no attention by Triton.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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


class WorkList(NamedTuple):
    """Items in the order in which programs take them; tensors are int32."""

    blocks: Tensor
    """[num_entries]: as in `OrderedBlocks`."""
    items: Tensor
    """[num_items, 5]: row, first entry, end of its full entries, end of its entries, slot of its partial result or DIRECT."""
    split_rows: Tensor
    """[num_split_rows, 3]: row, first slot, number of slots."""
    num_slots: int


def order_blocks(lists: BlockLists, *, num_row_tokens: int, num_column_tokens: int, block_size: int) -> OrderedBlocks:
    """Order every row; a block that extends beyond the last token counts as partial, so that the mask hides the excess.

    num_row_tokens, num_column_tokens: tokens along the rows and along the listed blocks. O(listed blocks).
    """
    arrays = lists.row_starts, lists.blocks, lists.is_full
    ordered = kernels.order_blocks(*arrays, num_row_tokens // block_size, num_column_tokens // block_size)
    return OrderedBlocks(lists.row_starts.astype(np.int32), *ordered)


def plan_work_list(blocks: OrderedBlocks, *, max_blocks_per_item: int | None) -> WorkList:
    """Cut rows into items of nearly equal length, at most `max_blocks_per_item` each, and sort the items longest first.

    max_blocks_per_item: at least 1; None keeps rows whole and in order: a grid without balancing. Equal lengths keep the order of
    rows, whose neighbours share blocks. O(items).
    """
    rows, splits, num_slots = kernels.plan_work_list(blocks.row_starts, blocks.full_ends, max_blocks_per_item or 0)
    listed, items, split_rows = map(torch.from_numpy, (blocks.blocks, rows.reshape(-1, 5), splits.reshape(-1, 3)))
    return WorkList(listed, items, split_rows, num_slots)
