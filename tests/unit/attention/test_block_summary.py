import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimodal.attention import block_summary as module
from multimodal.attention.bitfield import CAUSAL_BIT, BitfieldMask, MaskSegment, build_bitfield_mask
from multimodal.attention.block_summary import (
    BlockLists,
    count_block_workloads,
    summarize_blocks,
    summarize_blocks_reference,
)
from multimodal.values.errors import DataError

SUMMARIZE = pytest.mark.parametrize("summarize", [summarize_blocks, summarize_blocks_reference])
SIZES = st.integers(1, 9)


@st.composite
def masks(draw):
    """Masks as the builder makes them, of every mode, or with texts that see some modalities only."""
    pieces = st.tuples(st.sampled_from(("text", "text", "vision", "audio")), st.integers(0, 3), st.integers(0, 9))
    samples = draw(st.lists(st.lists(pieces, max_size=7), max_size=4))
    segments = [
        [MaskSegment(n, name, -1 if name == "text" else 2 * index + (name == "audio")) for name, index, n in sample]
        for sample in samples
    ]
    mask = build_bitfield_mask(
        segments,
        modalities=("vision", "audio"),
        mode=draw(st.sampled_from(("causal", "packed"))),
        attend_across_items=draw(st.booleans()),
    )
    if not draw(st.booleans()):
        return mask
    # As if some of the text looked at vision only, or at text only.
    hidden = np.array(draw(st.lists(st.sampled_from((0, 2, 4, 6)), min_size=mask.num_tokens, max_size=mask.num_tokens)), np.int64)
    return BitfieldMask(np.where(mask.bits < 0, mask.bits & ~hidden, mask.bits), mask.sample_ids, mask.item_ids)


def summarize_dense(mask, query_size, key_size):
    """Per block of queries: its (key block, is full), and its visible pairs; from the dense mask."""
    dense = mask.to_dense()
    rows, pairs = [], []
    for first in range(0, mask.num_tokens, query_size):
        row = dense[first : first + query_size]
        blocks = [row[:, start : start + key_size] for start in range(0, mask.num_tokens, key_size)]
        rows.append([(index, bool(block.all())) for index, block in enumerate(blocks) if block.any()])
        pairs.append(int(row.sum()))
    return rows, pairs


def listed(lists):
    return [list(zip(*(array.tolist() for array in lists.row(index)), strict=True)) for index in range(len(lists.row_starts) - 1)]


def test_the_kernels_are_built_where_a_compiler_is():
    if not any(shutil.which(compiler) for compiler in ("c++", "g++", "clang++")):
        pytest.skip("no C++ compiler on this machine")
    assert module.kernels is not None, "run 'pip install -e .' to build multimodal._kernels"


@SUMMARIZE
@given(mask=masks(), query_size=SIZES, key_size=SIZES)
def test_summaries_are_those_of_the_dense_mask(summarize, mask, query_size, key_size):
    summary = summarize(mask, block_size=query_size, key_block_size=key_size)
    rows, pairs = summarize_dense(mask, query_size, key_size)
    assert listed(summary.by_query) == rows
    assert summary.visible_pairs.tolist() == pairs


@given(mask=masks(), size=SIZES)
def test_the_kernel_equals_its_reference(mask, size):
    found, expected = summarize_blocks(mask, block_size=size), summarize_blocks_reference(mask, block_size=size)
    for one, other in (
        (found.by_query.row_starts, expected.by_query.row_starts),
        (found.by_query.blocks, expected.by_query.blocks),
        (found.by_query.is_full, expected.by_query.is_full),
        (found.visible_pairs, expected.visible_pairs),
    ):
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)


@given(mask=masks(), query_size=SIZES, key_size=SIZES)
def test_workloads_are_counted_without_listing(mask, query_size, key_size):
    rows, pairs = summarize_dense(mask, query_size, key_size)
    workloads = count_block_workloads(mask, block_size=query_size, key_block_size=key_size)
    assert workloads.num_blocks.tolist() == [len(row) for row in rows]
    assert workloads.visible_pairs.tolist() == pairs


def test_everything_works_without_kernels(monkeypatch):
    mask = build_bitfield_mask([[MaskSegment(5), MaskSegment(6, "vision", 0), MaskSegment(4)]], modalities=("vision",))
    with_kernels = listed(summarize_blocks(mask, block_size=4).by_query), count_block_workloads(mask, block_size=4).num_blocks
    monkeypatch.setattr(module, "kernels", None)
    assert listed(summarize_blocks(mask, block_size=4).by_query) == with_kernels[0]
    assert np.array_equal(count_block_workloads(mask, block_size=4).num_blocks, with_kernels[1])


@given(mask=masks(), query_size=SIZES, key_size=SIZES)
def test_lists_by_key_are_the_transposed_lists(mask, query_size, key_size):
    summary = summarize_blocks(mask, block_size=query_size, key_block_size=key_size)
    expected = [[] for _ in range(0, mask.num_tokens, key_size)]
    for query_block, row in enumerate(listed(summary.by_query)):
        for key_block, is_full in row:
            expected[key_block].append((query_block, is_full))
    assert listed(summary.by_key) == expected
    assert summary.by_key.blocks.dtype == np.int32


def test_rows_are_selected_in_the_given_order():
    lists = BlockLists(np.array([0, 2, 2, 5]), np.arange(5, dtype=np.int32), np.array([True, False, True, True, False]))
    assert listed(lists.select(np.array([2, 1, 0, 2]))) == [listed(lists)[row] for row in (2, 1, 0, 2)]
    assert listed(lists.select(np.array([], dtype=np.int64))) == []


def test_a_million_causal_tokens_are_counted_by_their_formula():
    num_blocks = 8192
    mask = build_bitfield_mask([[MaskSegment(num_blocks * 128)]], modalities=())
    workloads = count_block_workloads(mask)
    assert np.array_equal(workloads.num_blocks, np.arange(1, num_blocks + 1))
    assert workloads.visible_pairs.sum() == num_blocks * 128 * (num_blocks * 128 + 1) // 2


@SUMMARIZE
@pytest.mark.parametrize(
    ("bits", "sample_ids", "message"),
    [
        ([CAUSAL_BIT | 1] * 3, [0, 1, 0], "token 2 of a mask has sample id 0 after 1; expected ids that never descend"),
        (
            [CAUSAL_BIT | 1, CAUSAL_BIT | 2, 2],
            [0, 0, 0],
            "token 1 of a mask has bits 0x8000000000000002; expected bit 0 .text. on a causal",
        ),
        ([2, 2, 6], [0, 0, 0], "token 2 of a mask has bits 0x6; .* exactly one bit of 1-61 on any other"),
        ([2, 1, 1], [0, 0, 0], "token 1 of a mask has bits 0x1"),
        ([2, 2, 0], [0, 0, 0], "token 2 of a mask has bits 0x0"),
    ],
)
def test_masks_that_break_a_rule_are_refused(summarize, bits, sample_ids, message):
    mask = BitfieldMask(np.array(bits, np.int64), np.array(sample_ids, np.int32), np.zeros(3, np.int32))
    with pytest.raises(DataError, match=message):
        summarize(mask, block_size=2)


@SUMMARIZE
def test_blocks_have_at_least_one_token(summarize):
    with pytest.raises(DataError, match="blocks of 4 queries x 0 keys; expected at least 1 x 1"):
        summarize(build_bitfield_mask([], modalities=()), block_size=4, key_block_size=0)
