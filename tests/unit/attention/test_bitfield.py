"""Values that travel in one buffer, and those derived from lengths before."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from multimodal.attention.attention_backend import AttentionShape
from multimodal.attention.bitfield import BitfieldMask, MaskMode, MaskSegment, build_bitfield_mask
from multimodal.attention.block_attention import attend_by_blocks
from multimodal.attention.block_summary import count_block_workloads, list_blocks
from multimodal.attention.core_attention import choose_attention
from multimodal.attention.device_values import DerivedValues, Parcels, map_tensors, tensors_of
from multimodal.attention.packed_lengths import ItemSpan, MaskRule, PackedLengths, build_packed_mask
from multimodal.values.errors import DataError, ModelError
from tests.unit.attention.mask_cases import MASKS, build_mask, draw_inputs, random_masks
from tests.unit.golden_answers import Kinds, golden_test
from tests.unit.without_kernels import without_kernels

TEXT2, TEXT1 = MaskSegment(2), MaskSegment(1)


def item(num_tokens, index, modality="vision"):
    return MaskSegment(num_tokens, modality, index)


def rows(mask):
    return ["".join("x" if seen else "." for seen in row) for row in mask.to_dense()]


def build(*samples, **options):
    return build_bitfield_mask(samples, modalities=("vision", "audio"), **options)


def seen_by_tokens(document):
    """Return what each token sees; segments: numbers of a text's tokens, or (modality, tokens, item)."""
    samples = [
        [MaskSegment(each) if isinstance(each, int) else item(each[1], each[2], each[0]) for each in segments]
        for segments in document["samples"]
    ]
    return " ".join(rows(build(*samples, mode=document["mode"]))) or "nothing"


MASKED: Kinds = {"samples": ({"samples": [], "mode": "embedded"}, seen_by_tokens)}
test_tokens_see_what_is_written = golden_test("masks.txt", MASKED)


def test_a_prefix_sees_itself_in_both_directions():
    """Markers before and between items are part of it, items of any modality see each other, text behind it is causal."""
    found = build([TEXT1, item(1, 0), TEXT1, item(1, 1, "audio"), TEXT2], [TEXT2, item(0, 0)], mode="prefix")
    assert rows(found) == ["xxxx....", "xxxx....", "xxxx....", "xxxx....", "xxxxx...", "xxxxxx..", "......x.", "......xx"]


def test_all_61_encoders_have_their_bit():
    names = [f"encoder{index}" for index in range(61)]
    mask = build_bitfield_mask([[MaskSegment(1, name, index) for index, name in enumerate(names)] + [TEXT1]], modalities=names)
    assert np.array_equal(mask.to_dense()[:-1, :-1], np.eye(61, dtype=bool))
    assert mask.to_dense()[-1].all()


def test_items_that_overlap_are_refused():
    with pytest.raises(DataError, match="sample 0: its items overlap"):
        build([TEXT1, MaskSegment(-1)])


@pytest.mark.parametrize(
    ("modalities", "message"),
    [
        (("vision", "text"), "not distinct or contain 'text'"),
        ([f"encoder{index}" for index in range(64)], "64 modalities .* do not fit an attention mask of 64 bits; .* at most 61"),
    ],
)
def test_modalities_that_have_no_bits_of_their_own_are_refused(modalities, message):
    with pytest.raises(ModelError, match=message):
        build_bitfield_mask([], modalities=modalities)


MODALITIES = ("vision", "audio")
ITEMS = (ItemSpan(7, 2, "audio"), ItemSpan(2, 3, "vision"), ItemSpan(5, 1, "vision"))
"""In a first sample of 6 tokens and a second of 4; in no order."""


def rule(mode: MaskMode) -> MaskRule:
    return MaskRule(is_causal=True, mode=mode, modalities=MODALITIES)


def test_text_and_items_are_cut_at_their_borders() -> None:
    found = build_packed_mask((6, 4), items=ITEMS, rule=rule(MaskMode.EMBEDDED))
    text, item = MaskSegment, lambda length, index, modality: MaskSegment(length, modality, index)
    first = [text(2), item(3, 0, "vision"), item(1, 1, "vision")]
    second = [text(1), item(2, 0, "audio"), text(1)]
    expected = build_bitfield_mask([first, second], modalities=MODALITIES, mode="embedded")
    assert (found.to_dense() == expected.to_dense()).all()


DTYPES = (torch.uint8, torch.int32, torch.int64, torch.float64, torch.bool)


@given(sizes=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 3), st.sampled_from(DTYPES)), max_size=6))
def test_a_parcel_gives_back_what_was_packed(sizes: list[tuple[int, int, torch.dtype]]) -> None:
    tensors = [torch.randint(0, 2, (rows, columns)).to(dtype) for rows, columns, dtype in sizes]
    value = {"all": tuple(tensors), "again": tensors[-1:] and tensors[-1], "name": (1, "two", None)}
    parcel = Parcels.pack({"": value})[""]
    found = parcel.open()
    assert not any(isinstance(each, torch.Tensor) for each in tensors_of(parcel.contents)) and found["name"] == value["name"]
    assert all(torch.equal(mine, other) and mine.dtype == other.dtype for mine, other in zip(found["all"], tensors, strict=True))
    assert parcel.buffer.numel() == sum(-(-tensor.nbytes // 64) * 64 for tensor in tensors), "nothing is there twice"


def test_derived_values_are_made_once_and_follow_the_device() -> None:
    values, made = DerivedValues(), []

    def derive() -> torch.Tensor:
        made.append(1)
        return torch.zeros(3)

    first = values.on(torch.device("cpu"), "zeros", derive)
    assert values.on(torch.device("cpu"), "zeros", derive) is first
    elsewhere = map_tensors(values, lambda tensor: tensor.to("meta"))
    assert elsewhere.on(torch.device("meta"), "zeros", derive).is_meta and len(made) == 1


def test_all_that_attention_reads_of_items_is_prepared() -> None:
    rule = MaskRule(True, MaskMode.EMBEDDED, ("vision",))
    packed = PackedLengths(lengths=(40, 30), items=(ItemSpan(3, 20, "vision"),))
    choice = choose_attention("blocks", rule=rule, shape=AttentionShape(), is_shared=False)
    choice.prepare(packed)
    opened = Parcels.pack({"": packed})[""].open()
    assert opened.lengths == packed.lengths
    mask = opened.mask(rule)
    inputs = draw_inputs(packed.mask(rule))[:3]
    expected = attend_by_blocks(*inputs, mask=packed.mask(rule), softmax_scale=None)
    before = set(mask.derived._values)
    assert torch.equal(attend_by_blocks(*inputs, mask=mask, softmax_scale=None), expected)
    assert set(mask.derived._values) == before, "something was derived only when it was read"


def test_triton_and_flex_derive_nothing_later() -> None:
    from multimodal.attention.attention_backend import load_preparation
    from multimodal.attention.flex_attention import build_flex_mask
    from multimodal.attention.triton_kernels.options import longest_item
    from multimodal.attention.triton_kernels.triton_attention import _column_work, _mask_arguments, _row_work

    device, shape = torch.device("cpu"), AttentionShape(num_heads=4, num_groups=2, num_multiprocessors=132)
    mask = build_mask(MASKS["embedded"][1], mode="embedded", query_blocks=(0, 2))
    for name in ("triton", "flex"):
        load_preparation(name)(mask, shape)
    before = set(mask.derived._values)
    limit = longest_item(len(mask.by_query.blocks), num_heads=4, num_multiprocessors=132)
    _mask_arguments(mask, device), _row_work(mask, limit, device), _column_work(mask, limit, 2, device)
    build_flex_mask(mask, device)
    assert set(mask.derived._values) == before


LIST_BLOCKS = pytest.mark.parametrize("list_blocks", [list_blocks, without_kernels(list_blocks)])
COUNT = pytest.mark.parametrize("count", [count_block_workloads, without_kernels(count_block_workloads)])
SIZES = st.integers(1, 9)


@st.composite
def masks(draw):
    """Masks as the builder makes them, of every mode, or with texts that see some modalities only."""
    mask = draw(random_masks()).tokens
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


@LIST_BLOCKS
@given(mask=masks(), size=SIZES)
def test_blocks_are_those_of_the_dense_mask(list_blocks, mask, size):
    lists = list_blocks(mask, block_size=size)
    assert listed(lists) == summarize_dense(mask, size)[0]


@COUNT
@given(mask=masks(), size=SIZES)
def test_workloads_are_counted_without_listing(count, mask, size):
    rows, pairs = summarize_dense(mask, size)
    workloads = count(mask, block_size=size)
    assert workloads.num_blocks.tolist() == [len(row) for row in rows]
    assert workloads.visible_pairs.tolist() == pairs


def test_a_million_causal_tokens_are_counted_by_their_formula():
    num_blocks = 8192
    mask = build_bitfield_mask([[MaskSegment(num_blocks * 128)]], modalities=())
    workloads = count_block_workloads(mask)
    assert np.array_equal(workloads.num_blocks, np.arange(1, num_blocks + 1))
    assert workloads.visible_pairs.sum() == num_blocks * 128 * (num_blocks * 128 + 1) // 2
