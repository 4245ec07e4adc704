"""The partial and full blocks of a bitfield mask, and the work in every block of queries."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from multimodal.attention.bitfield import BitfieldMask
from multimodal.kernels import kernels
from multimodal.values.arrays.rows import row_starts, take_rows

_Runs = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32], NDArray[np.int32], int]
"""Starts of runs, [num_runs + 1]; bits, sample and item ids, [num_runs]; and a window, at most the number of tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockLists:
    """For each row, the blocks with any visible pair, ascending; blocks that are not listed are empty. Compressed rows (CSR)."""

    row_starts: NDArray[np.int64]
    """[num_rows + 1]: row r has the entries row_starts[r] .. row_starts[r + 1] - 1."""
    blocks: NDArray[np.int32]
    """[num_entries]: index of the key block (of the query block in `transposed` lists)."""
    is_full: NDArray[np.bool_]
    """[num_entries]: True if every query attends to every key, False if only some do."""

    def row(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return (blocks, is_full) of one row."""
        entries = slice(self.row_starts[index], self.row_starts[index + 1])
        return self.blocks[entries], self.is_full[entries]

    def select(self, rows: NDArray[np.int64]) -> "BlockLists":
        """Return some rows, in the given order, such as those that a context parallel rank computes."""
        starts, entries = take_rows(self.row_starts, np.arange(len(self.blocks)), rows)
        return BlockLists(starts, self.blocks[entries], self.is_full[entries])

    def transposed(self, *, num_columns: int) -> "BlockLists":
        """Return the rows of every column, ascending, as the backward of keys and values needs them. O(entries)."""
        from scipy.sparse import csr_matrix  # loaded when first used

        shape = (len(self.row_starts) - 1, num_columns)
        flipped = csr_matrix((self.is_full, self.blocks, self.row_starts), shape=shape).tocsc()
        return BlockLists(flipped.indptr.astype(np.int64), flipped.indices.astype(np.int32), flipped.data)


@dataclass(frozen=True, slots=True, eq=False)
class BlockWorkloads:
    """The work in every block of queries, in two measures; [num_query_blocks], int64."""

    num_blocks: NDArray[np.int64]
    """Key blocks to compute; a kernel's time is proportional to them (Cornstarch, thesis Alg. 1)."""
    visible_pairs: NDArray[np.int64]
    """Pairs (query, key) that are visible."""


def list_blocks(mask: BitfieldMask, *, block_size: int = 128) -> BlockLists:
    """List, for each block of queries, the partial and full blocks of keys; block_size: of both, at least 1.

    Runs as a C++ kernel, with the same result, if the kernels are built. O(tokens + listed blocks) for masks of a few samples and
    items per block; a causal sample of n blocks lists n (n + 1) / 2: `count_block_workloads` is cheaper where that is enough.
    """
    if kernels is None:
        return _evaluate(mask, block_size)[0]
    return BlockLists(*kernels.list_mask_blocks(*_find_runs(mask), block_size, block_size)[:3])


def count_block_workloads(mask: BitfieldMask, *, block_size: int = 128) -> BlockWorkloads:
    """Count the work in every block of queries, for `distribute_tokens`, without listing blocks, in O(tokens).

    Arguments and errors as in `list_blocks`. Runs as a C++ kernel, with the same result, if the kernels are built.
    """
    if kernels is None:
        lists, visible_pairs = _evaluate(mask, block_size)
        return BlockWorkloads(np.diff(lists.row_starts), visible_pairs)
    starts, visible_pairs = kernels.count_mask_blocks(*_find_runs(mask), block_size, block_size)
    return BlockWorkloads(np.diff(starts), visible_pairs)


def _evaluate(mask: BitfieldMask, block_size: int) -> tuple[BlockLists, NDArray[np.int64]]:
    """Return the blocks with visible pairs, and the pairs of each block of queries, by definition: O(tokens^2 of a sample)."""
    counts, visible_pairs = [], []
    blocks: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
    is_full: list[NDArray[np.bool_]] = [np.empty(0, np.bool_)]
    for begin in range(0, mask.num_tokens, block_size):
        queries = np.arange(begin, min(begin + block_size, mask.num_tokens))
        of_samples = mask.sample_ids[queries[[0, -1]]]
        first = int(np.searchsorted(mask.sample_ids, of_samples[0])) // block_size
        keys = np.arange(first * block_size, np.searchsorted(mask.sample_ids, of_samples[1], side="right"))
        starts = np.arange(0, len(keys), block_size)
        seen = np.add.reduceat(mask.visible(queries, keys).sum(axis=0), starts)
        num_keys = np.minimum(block_size, mask.num_tokens - keys[starts])
        listed = np.flatnonzero(seen)
        blocks.append(first + listed)
        is_full.append(seen[listed] == len(queries) * num_keys[listed])
        counts.append(len(listed))
        visible_pairs.append(int(seen.sum()))
    lists = BlockLists(row_starts(counts), np.concatenate(blocks).astype(np.int32), np.concatenate(is_full))
    return lists, np.array(visible_pairs, dtype=np.int64)


def _find_runs(mask: BitfieldMask) -> _Runs:
    """Return a mask as the kernels take it: as runs of equal tokens, and the keys that a causal token attends to, at most."""
    starts = kernels.find_mask_runs(mask.bits, mask.sample_ids, mask.item_ids)
    firsts, size = starts[:-1], max(1, mask.num_tokens)
    bits, sample_ids = mask.bits[firsts], mask.sample_ids[firsts]
    return starts, bits, sample_ids, mask.item_ids[firsts], min(mask.window or size, size)
