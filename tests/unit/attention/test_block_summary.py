import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimodal.attention import block_summary as module
from multimodal.attention.bitfield import CAUSAL_BIT, BitfieldMask, MaskSegment, build_bitfield_mask
from multimodal.attention.block_summary import BlockLists, count_block_workloads, list_blocks
from multimodal.values.errors import DataError
from tests.unit.without_kernels import without_kernels

LIST_BLOCKS = pytest.mark.parametrize("list_blocks", [list_blocks, without_kernels(list_blocks)])
COUNT = pytest.mark.parametrize("count", [count_block_workloads, without_kernels(count_block_workloads)])
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
        mode=draw(st.sampled_from(("causal", "embedded", "modality"))),
        window=draw(st.none() | st.integers(1, 12)),
    )
    if not draw(st.booleans()):
        return mask
    # As if some of the text looked at vision only, or at text only.
    hidden = np.array(draw(st.lists(st.sampled_from((0, 2, 4, 6)), min_size=mask.num_tokens, max_size=mask.num_tokens)), np.int64)
    return BitfieldMask(np.where(mask.bits < 0, mask.bits & ~hidden, mask.bits), mask.sample_ids, mask.item_ids, mask.window)


def summarize_dense(mask, size):
    """Per block of queries: its (key block, is full), and its visible pairs; from the dense mask."""
    dense = mask.to_dense()
    rows, pairs = [], []
    for first in range(0, mask.num_tokens, size):
        row = dense[first : first + size]
        blocks = [row[:, start : start + size] for start in range(0, mask.num_tokens, size)]
        rows.append([(index, bool(block.all())) for index, block in enumerate(blocks) if block.any()])
        pairs.append(int(row.sum()))
    return rows, pairs


def listed(lists):
    return [list(zip(*(array.tolist() for array in lists.row(index)), strict=True)) for index in range(len(lists.row_starts) - 1)]


def test_the_kernels_are_built_where_a_compiler_is():
    if not any(shutil.which(compiler) for compiler in ("c++", "g++", "clang++")):
        pytest.skip("no C++ compiler on this machine")
    assert module.kernels is not None, "run 'pip install -e .' to build multimodal._kernels"


@LIST_BLOCKS
@given(mask=masks(), size=SIZES)
def test_blocks_are_those_of_the_dense_mask(list_blocks, mask, size):
    lists = list_blocks(mask, block_size=size)
    assert listed(lists) == summarize_dense(mask, size)[0]


@given(mask=masks(), size=SIZES)
def test_the_kernel_equals_its_reference(mask, size):
    found, expected = list_blocks(mask, block_size=size), without_kernels(list_blocks)(mask, block_size=size)
    for one, other in (
        (found.row_starts, expected.row_starts),
        (found.blocks, expected.blocks),
        (found.is_full, expected.is_full),
    ):
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)


@COUNT
@given(mask=masks(), size=SIZES)
def test_workloads_are_counted_without_listing(count, mask, size):
    rows, pairs = summarize_dense(mask, size)
    workloads = count(mask, block_size=size)
    assert workloads.num_blocks.tolist() == [len(row) for row in rows]
    assert workloads.visible_pairs.tolist() == pairs


@given(mask=masks(), size=SIZES)
def test_lists_by_key_are_the_transposed_lists(mask, size):
    lists = list_blocks(mask, block_size=size)
    by_key = lists.transposed(num_columns=-(-mask.num_tokens // size))
    expected = [[] for _ in range(0, mask.num_tokens, size)]
    for query_block, row in enumerate(listed(lists)):
        for key_block, is_full in row:
            expected[key_block].append((query_block, is_full))
    assert listed(by_key) == expected
    assert by_key.blocks.dtype == np.int32


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


@LIST_BLOCKS
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
def test_masks_that_break_a_rule_are_refused(list_blocks, bits, sample_ids, message):
    mask = BitfieldMask(np.array(bits, np.int64), np.array(sample_ids, np.int32), np.zeros(3, np.int32))
    with pytest.raises(DataError, match=message):
        list_blocks(mask, block_size=2)


@LIST_BLOCKS
def test_blocks_have_at_least_one_token(list_blocks):
    with pytest.raises(DataError, match="blocks of 0 queries x 0 keys; expected at least 1 x 1"):
        list_blocks(build_bitfield_mask([], modalities=()), block_size=0)
